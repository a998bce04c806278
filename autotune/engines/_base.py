"""The one interface of all engines."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Self

from autotune.chips import Chip
from autotune.kernel import Kernel
from autotune.outcome import Config, Outcome, Status
from autotune.validation import Validation


@dataclasses.dataclass(frozen=True)
class Task:
    """What an engine works on: one kernel's problem on one chip."""

    kernel: Kernel
    problem: Any
    chip: Chip


@dataclasses.dataclass(frozen=True)
class Race:
    """Several candidates timed in turn, by one process.

    Attributes:
        status: ok, or what ended it.
        samples: Of each candidate, its times round by round, in milliseconds.
        timer: As of an outcome.
        message: Why there are no samples.
    """

    status: Status
    samples: Sequence[Sequence[float]] = ()
    timer: str = ""
    message: str = ""

    @property
    def ok(self) -> bool:
        return self.status is Status.OK


class Engine(abc.ABC):
    """Evaluates configs of one task, `jobs` at a time. A context manager: leaving it ends its processes.

    Every call returns at once with a future that resolves to a typed result and never raises for what
    a config did: a worker that dies or hangs costs its own future and nothing else.

    Attributes:
        name: "compiler" or "device".
        measures: Whether its times are measurements, noisy and worth repeating: then it can `race`.
        notice: One line the user must know about how this engine works today, or "".
    """

    name: ClassVar[str]
    measures: ClassVar[bool] = False
    notice: str = ""

    def __init__(self, task: Task, *, jobs: int, timeout_s: float) -> None:
        self.task = task
        self.jobs = jobs
        self.timeout_s = timeout_s

    @abc.abstractmethod
    def evaluate(self, config: Config) -> Future[Outcome]:
        """The kernel with `config`, which must satisfy the space's constraints."""

    @abc.abstractmethod
    def evaluate_reference(self) -> Future[Outcome]:
        """The reference as XLA compiles it: the ``xla`` baseline."""

    @abc.abstractmethod
    def validate(self, config: Config) -> Future[Validation]:
        """Compares the kernel with the reference numerically."""

    def race(self, entries: Sequence[Config | None], *, seconds: float, seed: int, fresh: bool = False) -> Future[Race]:
        """Times configs, or the reference where an entry is None, against each other.

        Args:
            entries: At least one; all must have been evaluated, and were ok.
            seconds: About so long, after all are compiled and warm.
            seed: Of the inputs.
            fresh: In a process that has done nothing before.
        """
        raise NotImplementedError(f"the {self.name} engine measures nothing")

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the engine's processes; futures not done yet are cancelled."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
