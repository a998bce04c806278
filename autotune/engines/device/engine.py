"""The device engine: each config is compiled, run and timed by the process that owns the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from autotune.engines._base import Race, Task
from autotune.engines._pool import Job, WorkerPool
from autotune.engines._pooled import PooledEngine, no_verdict, typed
from autotune.engines.compiler.support import many_cpus, validation_environment
from autotune.engines.device import hardware
from autotune.engines.device.pod import Pod
from autotune.engines.device.pod.results import refused
from autotune.errors import UsageError
from autotune.outcome import Config, Outcome, Status
from autotune.validation import Validation, worst

_JOBS = "autotune.engines.device.jobs"
# XLA keeps what it allocates on a CPU; on an accelerator a worker's own memory stays small.
_RECYCLE_BYTES = 6 * 1024**3
_TUNING_SEED, _CHECK_SEED = 0, 100_000
# A check compiles the kernel anew and runs it three times, and its reference in float32 as often.
_CHECK_TIMEOUTS = 4


class DeviceEngine(PooledEngine):
    """Measures on the attached accelerator, one worker a chip; validates there too.

    `timeout_s` limits a config's compile and, apart from that, its run.

    Args:
        task: What to work on.
        device: What is attached.
        jobs: Workers at most.
        timeout_s: As above, in seconds.
        pod: All processes that measure together; None for this one alone. Whose it is ends it.
    """

    name = "device"
    measures = True

    def __init__(
        self, task: Task, device: hardware.Attached, *, jobs: int, timeout_s: float, pod: Pod | None = None
    ) -> None:
        self._lock = hardware.reserve() if pod is None else None  # A pod has it already.
        small = validation_environment(task.kernel.cpu_devices)
        # A program for a mesh has all its devices, in one process.
        devices, spread = task.kernel.devices(task.problem), task.kernel.spread
        count = 1 if spread else min(jobs, device.count)
        pool = pod or WorkerPool(
            count,
            warm_up=hardware.DESCRIBE,
            environment=hardware.environment() | many_cpus(max(devices, task.kernel.cpu_devices)),
            own=[{}] if spread else hardware.own_environments(count),
            recycle_bytes=_RECYCLE_BYTES,
        )
        # Small problems are validated on the CPU, where Pallas' interpreter is.
        validators = WorkerPool(1, warm_up="autotune.engines._jobs:import_jax", environment=small)
        super().__init__(task, pool, jobs=count, timeout_s=timeout_s, validators=validators)
        self._threads = ThreadPoolExecutor(1)
        self._spread = spread
        self._provenance |= {"device_kind": device.device_kind}
        if pod is not None:
            self._provenance |= {"processes": str(pod.place.processes)}

    def evaluate(self, config: Config) -> Future[Outcome]:
        return self._measure(dict(config))

    def evaluate_reference(self) -> Future[Outcome]:
        return self._measure(None)

    def _measure(self, config: Config | None) -> Future[Outcome]:
        what = {**self._identity, "config": config, "seed": _TUNING_SEED}
        job = self._pool.submit_all(
            [self._job("compile_program", what, "compile"), self._job("run_program", what, "run")],
            until=refused,
            spent=_spent,
        )
        return self._outcome(job, _last)

    def race(self, entries: Sequence[Config | None], *, seconds: float, seed: int, fresh: bool = False) -> Future[Race]:
        configs = [dict(entry) if entry is not None else None for entry in entries]
        jobs = [
            self._job("compile_program", {**self._identity, "config": config, "seed": seed}, "compile")
            for config in configs
        ]
        together = {**self._identity, "configs": configs, "seed": seed, "seconds": seconds}
        race = self._job("race", together, "race")
        jobs.append(dataclasses.replace(race, timeout_s=self.timeout_s * len(configs)))
        job = self._pool.submit_all(jobs, until=refused, spent=_spent, fresh=fresh)
        return typed(self._pool, job, _read_race, lambda status, text: Race(status, message=text))

    def validate(self, config: Config, *, seed: int = 0) -> Future[Validation]:
        return self._threads.submit(self._validate, dict(config), seed)

    def _validate(self, config: Config, seed: int) -> Validation:
        """On small problems first: what is wrong there need not take the device's time."""
        small = super().validate(config, seed=seed).result()
        if not small.ok or self._spread:  # Undivided, a model that needs a mesh fits nowhere: there is no reference.
            return small
        check = self._job("check", {**self._identity, "config": config, "seed": _CHECK_SEED + seed}, "check")
        check = dataclasses.replace(check, timeout_s=_CHECK_TIMEOUTS * self.timeout_s)
        job = self._pool.submit_all([check], spent=_spent)
        full: Validation = typed(
            self._pool, job, lambda results: Validation.from_dict(_last(results)), no_verdict
        ).result()
        # The larger of the errors, or the first refusal.
        return dataclasses.replace(worst([small, full]), problems=(*small.problems, *full.problems))

    def close(self) -> None:
        super().close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._lock is not None:
            self._lock.release()

    def _job(self, function: str, arguments: dict[str, Any], phase: str) -> Job:
        return Job(f"{_JOBS}:{function}", arguments, self.timeout_s, phase)


def open_device_engine(task: Task, *, jobs: int, timeout_s: float, pod: Pod | None = None) -> DeviceEngine:
    """The device engine.

    Raises:
        UsageError: The task is for another chip than the one that is attached, for a kernel that does not run there, or
            not for all devices of the pod.
        UnavailableError: No device can be opened, or another run has it.
    """
    device = hardware.attached() if pod is None else pod.attached()
    if task.chip != device.chip:
        raise UsageError(f"the attached device is {device.device_kind}, not {task.chip.device_kind}")
    if pod is not None and pod.devices != (wanted := task.kernel.devices(task.problem)):
        text = f"the problem is one for {wanted} devices, and the {pod.place.processes} processes have {pod.devices}"
        raise UsageError(f"{text}: every one of them must take part; use another topology, or other processes")
    return DeviceEngine(task, device, jobs=jobs, timeout_s=timeout_s, pod=pod)


def _spent(result: Any) -> bool:
    """Whether a worker's memory, or the device as it sees it, may be past use: a TPU that halted runs nothing more."""
    return result.get("status") in (Status.HBM_OOM, Status.RUNTIME_ERROR)


def _last(results: Sequence[Any]) -> Any:
    return results[-1]


def _read_race(results: Sequence[Any]) -> Race:
    last = _last(results)
    if "samples" in last:
        return Race(Status.OK, last["samples"], last["timer"])
    return Race(Status(last["status"]), message=last.get("message", ""))
