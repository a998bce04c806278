"""The compiler engine, and its stand-in where the TPU compiler cannot be had."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future

from autotune.engines._base import Engine, Task
from autotune.engines._pool import JobError, JobTimeout, WorkerDied, WorkerPool
from autotune.engines._pooled import PooledEngine
from autotune.engines.compiler.support import validation_environment, why_unsupported, worker_environment
from autotune.errors import UnavailableError
from autotune.outcome import Config, Outcome, Source, Status


class CompilerEngine(PooledEngine):
    """Compiles each config for the target and predicts its time from the compiler's schedule."""

    name = "compiler"

    def evaluate(self, config: Config) -> Future[Outcome]:
        return self._submit(dict(config))

    def evaluate_reference(self) -> Future[Outcome]:
        return self._submit(None)

    def _submit(self, config: Config | None) -> Future[Outcome]:
        arguments = {**self._identity, "target": self.task.chip.name, "config": config}
        return self._outcome(
            self._pool.submit("autotune.engines._jobs:compile_config", arguments, timeout_s=self.timeout_s)
        )


class AnalyticEngine(PooledEngine):
    """Ranks by arithmetic and still validates; for machines that cannot run the TPU compiler.

    Args:
        reason: Why the compiler is not used, in one line.
    """

    name = "analytic"

    def __init__(self, task: Task, pool: WorkerPool, *, jobs: int, timeout_s: float, reason: str) -> None:
        super().__init__(task, pool, jobs=jobs, timeout_s=timeout_s)
        self.notice = (
            f"no TPU compiler: {reason}. Times are analytic estimates: nothing is compiled for {task.chip.name}."
        )

    def evaluate(self, config: Config) -> Future[Outcome]:
        task = self.task
        time_ms = task.kernel.known_ms(task.problem, config, task.chip)
        if time_ms is None:
            return self._done(Outcome(Status.COMPILE_ERROR, message="nothing is known of its time: no TPU compiler"))
        return self._done(Outcome(Status.OK, time_ms=time_ms, source=Source.ANALYTIC))

    def evaluate_reference(self) -> Future[Outcome]:
        return self._done(Outcome(Status.COMPILE_ERROR, message="XLA's time is not known: no TPU compiler"))

    def _done(self, outcome: Outcome) -> Future[Outcome]:
        done: Future[Outcome] = Future()
        done.set_result(dataclasses.replace(outcome, provenance=self._provenance))
        return done


def open_compiler_engine(task: Task, *, jobs: int, timeout_s: float, or_analytic: bool) -> Engine:
    """The compiler engine.

    Args:
        or_analytic: Where the TPU compiler does not load, the analytic engine is opened instead, whose
            `notice` says why.

    Raises:
        UnavailableError: The compiler does not load, and nothing else was allowed.
    """
    devices = task.kernel.cpu_devices
    pool, reason = _start(jobs, devices, listings=task.kernel.topology(task.problem) is None)
    if pool is not None:
        return CompilerEngine(task, pool, jobs=jobs, timeout_s=timeout_s)
    if not or_analytic:
        raise UnavailableError(f"no TPU compiler: {reason}; --engine auto ranks by arithmetic alone")
    pool = WorkerPool(jobs, warm_up="autotune.engines._jobs:import_jax", environment=validation_environment(devices))
    return AnalyticEngine(task, pool, jobs=jobs, timeout_s=timeout_s, reason=reason)


def why_unusable() -> str | None:
    """Why the TPU compiler does not work on this machine, in one line; None where it does."""
    pool, reason = _start(1)
    if pool is not None:
        pool.close()
    return reason or None


def _start(jobs: int, cpu_devices: int = 1, *, listings: bool = True) -> tuple[WorkerPool | None, str]:
    """A pool whose first worker has compiled something; or None and why there is none."""
    if reason := why_unsupported():
        return None, reason
    environment = worker_environment(cpu_devices, listings=listings)
    pool = WorkerPool(jobs, warm_up="autotune.engines.compiler.toolchain:warm_up", environment=environment)
    try:
        pool.start().result()
        return pool, ""
    except (JobError, WorkerDied, JobTimeout) as error:
        pool.close()
        return None, f"libtpu does not work here ({' '.join(str(error).split())[:200]})"
    except BaseException:
        pool.close()
        raise
