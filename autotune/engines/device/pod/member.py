"""What one process of a pod contributes: one worker at a time, part of the JAX program of all."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from autotune.engines._pool import Job, WorkerPool
from autotune.engines.compiler.support import many_cpus
from autotune.engines.device import hardware

JOIN = "autotune.engines.device.jobs:join"
JOIN_LIMIT_S = 180.0


class Member(Protocol):
    """A process of the pod, here or elsewhere. Its futures raise as those of `WorkerPool.submit` do."""

    name: str

    def start(self, program: Mapping[str, Any], cpu_devices: int) -> Future[Any]:
        """A fresh worker, which joins the program of all."""

    def run(self, job: Job) -> Future[Any]:
        """One job in that worker."""

    def stop(self) -> None:
        """Ends the worker, whatever it is at."""


class Here:
    """This process's own worker.

    Args:
        name: How messages call this process.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._pool: WorkerPool | None = None

    def start(self, program: Mapping[str, Any], cpu_devices: int) -> Future[Any]:
        self.stop()
        self._pool = WorkerPool(
            1,
            warm_up="autotune.engines._jobs:import_jax",
            environment=hardware.environment() | many_cpus(cpu_devices),
            recycle_bytes=sys.maxsize,  # One alone cannot be replaced.
        )
        return self._pool.submit(JOIN, program, timeout_s=JOIN_LIMIT_S)

    def run(self, job: Job) -> Future[Any]:
        assert self._pool is not None, "a member runs jobs after it was started"
        return self._pool.submit_job(job)

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
