"""Engines whose work is done in worker processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from autotune import versions
from autotune.engines import _jobs
from autotune.engines._base import Engine, Task
from autotune.engines._pool import JobError, JobTimeout, WorkerDied, WorkerPool
from autotune.outcome import Config, Outcome, Status
from autotune.validation import Validation

_VALIDATION_TIMEOUT_S = 600.0


class PooledEngine(Engine):
    """What the engines share: validation in workers, and typed results for whatever happens to a worker.

    Args:
        task: What to work on.
        pool: Whose workers evaluate.
        jobs: Evaluations in flight at once.
        timeout_s: Limit for each, in seconds.
        validators: Whose workers validate on small problems; None for the same.
    """

    def __init__(
        self, task: Task, pool: WorkerPool, *, jobs: int, timeout_s: float, validators: WorkerPool | None = None
    ) -> None:
        super().__init__(task, jobs=jobs, timeout_s=timeout_s)
        self._pool, self._validators = pool, validators or pool
        self._identity = {"kernel": _jobs.kernel_path(task.kernel), "problem": task.problem.to_dict()}
        self._provenance = {"engine": self.name, "target": task.chip.name, **versions.deciding(task.chip.platform)}

    def validate(self, config: Config, *, seed: int = 0) -> Future[Validation]:
        arguments = {**self._identity, "config": dict(config), "seed": seed}
        job = self._validators.submit("autotune.engines._jobs:validate", arguments, timeout_s=_VALIDATION_TIMEOUT_S)
        return typed(self._validators, job, Validation.from_dict, no_verdict)

    def close(self) -> None:
        self._pool.close()
        self._validators.close()

    def _outcome(self, job: Future[Any], pick: Callable[[Any], Any] = lambda result: result) -> Future[Outcome]:
        """The outcome that the job's result is, or holds where `pick` finds it."""

        def finish(outcome: Outcome) -> Outcome:
            return dataclasses.replace(outcome, provenance=self._provenance)

        return typed(
            self._pool,
            job,
            lambda result: finish(Outcome.from_dict(pick(result))),
            lambda status, text: finish(Outcome(status, message=text)),
        )


def no_verdict(status: Status, text: str) -> Validation:
    """The worker did not deliver one."""
    return Validation(status, message=text)


def typed(
    pool: WorkerPool, job: Future[Any], read: Callable[[Any], Any], fail: Callable[[Status, str], Any]
) -> Future[Any]:
    """A future of `read(result)`, or of `fail(status, text)` where the worker did not deliver.

    Cancelling it gives the job up: a worker that is at it is killed.
    """
    answer: Future[Any] = Future()

    def settle(job: Future[Any]) -> None:
        if not answer.set_running_or_notify_cancel():
            return
        if job.cancelled():
            answer.set_result(fail(Status.CRASH, "the engine was closed before this was run"))
            return
        statuses = {JobTimeout: Status.TIMEOUT, WorkerDied: Status.CRASH, JobError: Status.RUNTIME_ERROR}
        try:
            answer.set_result(read(job.result()))
        except tuple(statuses) as error:
            answer.set_result(fail(statuses[type(error)], str(error)))
        except Exception as error:  # a bug of ours: it must reach the caller
            answer.set_exception(error)

    answer.add_done_callback(lambda answer: pool.give_up(job) if answer.cancelled() else None)
    job.add_done_callback(settle)
    return answer
