"""A kernel and an engine that cost nothing, so that tests of the search are about the search."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

from autotune.chips import Chip, get_chip
from autotune.engines._base import Engine, Race, Task
from autotune.kernel import ArraySpec, Cost, Kernel
from autotune.outcome import Config, Outcome, Source, Status
from autotune.problem import Problem
from autotune.space import Constraint, Param, Space, config_key
from autotune.validation import Validation

SIZES = (128, 256, 512, 1024, 2048)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyProblem(Problem):
    m: int
    n: int
    dtype: str = "bfloat16"
    causal: bool = False
    cap: float | None = None


class ToyKernel(Kernel):
    """Fastest at block_m=1024, block_n=512, mode=b; its estimate is only roughly right."""

    name = "toy"
    summary = "a kernel for tests"
    problem_type = ToyProblem
    problems: ClassVar = {"small": ToyProblem(m=2048, n=2048), "large": ToyProblem(m=8192, n=8192)}
    sources = ("tests.fakes",)
    version = "toy-version"

    def space(self, problem: ToyProblem, chip: Chip) -> Space:
        params = [
            Param("block_m", SIZES, "rows"),
            Param("block_n", SIZES, "columns"),
            Param("mode", ("a", "b", "c"), "a word", default="a"),
        ]
        constraints = [
            Constraint("block_m must be positive", lambda c: c["block_m"] > 0),
            Constraint("block_n must be positive", lambda c: c["block_n"] > 0),
            Constraint("block_m must divide m", lambda c: problem.m % c["block_m"] == 0),
            Constraint("block_n must divide n", lambda c: problem.n % c["block_n"] == 0),
            Constraint("block_m * block_n must be at most 2**20", lambda c: c["block_m"] * c["block_n"] <= 2**20),
        ]
        return Space(params, constraints)

    def arguments(self, problem: ToyProblem) -> tuple[ArraySpec, ...]:
        return (ArraySpec((problem.m, problem.n), problem.dtype),)

    def bind(self, problem: ToyProblem, config: Config, *, interpret: Any = False) -> Callable[..., Any]:
        return lambda x: x

    def reference(self, problem: ToyProblem) -> Callable[..., Any]:
        return lambda x: x

    def baselines(self, problem: ToyProblem, chip: Chip) -> dict[str, Config]:
        return {"default": {"block_m": 128, "block_n": 128, "mode": "a"}}

    def cost(self, problem: ToyProblem) -> Cost:
        return Cost(flops=2.0 * problem.m * problem.n, nbytes=2.0 * problem.m * problem.n, dtype=problem.dtype)

    def estimate_ms(self, problem: ToyProblem, config: Config, chip: Chip) -> float:
        return 1.0 + abs(config["block_m"] - 512) / 512 + abs(config["block_n"] - 512) / 512

    def validation_problems(self, problem: ToyProblem, config: Config) -> list[ToyProblem]:
        return [problem]


def toy_time(config: Config) -> float:
    """In milliseconds: every config has a time of its own."""
    mode = {"a": 0.5, "b": 0.0, "c": 1.0}[config["mode"]]
    return 1.0 + abs(config["block_m"] - 1024) / 512 + abs(config["block_n"] - 512) / 500 + mode


def measured(config: Config, factor: float = 1.0) -> Outcome:
    """As a device would have it."""
    time_ms = toy_time(config) * factor
    return Outcome(Status.OK, time_ms=time_ms, source=Source.DEVICE, interval_ms=(time_ms, time_ms), timer="wall clock")


def timed(config: Config) -> Outcome:
    return Outcome(Status.OK, time_ms=toy_time(config), bound="compute", source=Source.SCHEDULE)


def toy_task(problem: str = "small", target: str = "v5e") -> Task:
    kernel = ToyKernel()
    return Task(kernel, kernel.parse_problem(problem), get_chip(target))


def _verdict(right: bool) -> Validation:
    if right:
        return Validation(Status.OK, 1e-3, 1e-2, 5e-3, ("m=256",))
    return Validation(Status.WRONG_RESULT, 0.5, 3.0, 5e-3, ("m=256",), "off by half on m=256")


class FakeEngine(Engine):
    """Answers at once from functions, and remembers what it was asked.

    Attributes:
        evaluated: Configs in the order they were asked for.
        validated: Likewise.
    """

    name = "compiler"

    def __init__(
        self,
        task: Task | None = None,
        *,
        jobs: int = 2,
        timeout_s: float = 60.0,
        outcome: Callable[[Config], Outcome | Future[Outcome]] = timed,
        right: Callable[[Config], bool] = lambda config: True,
        verdict: Callable[[Config], Validation] | None = None,
        reference: Outcome | None = None,
        reference_ms: float = 3.0,
        name: str = "compiler",
        measures: bool = False,
    ) -> None:
        super().__init__(task or toy_task(), jobs=jobs, timeout_s=timeout_s)
        self.name = name  # type: ignore[misc]
        self.measures = measures  # type: ignore[misc]
        self._outcome, self._verdict = outcome, verdict or (lambda config: _verdict(right(config)))
        self._reference = reference or Outcome(Status.OK, time_ms=reference_ms, source=Source.HLO)
        self.evaluated: list[Config] = []
        self.validated: list[Config] = []
        self.races: list[tuple[Any, bool]] = []
        self.most_in_flight = 0
        self._in_flight = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(jobs)

    def evaluate(self, config: Config) -> Future[Outcome]:
        self.evaluated.append(dict(config))
        with self._lock:
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
        return self._pool.submit(self._work, config)

    def _work(self, config: Config) -> Outcome:
        try:
            return self._outcome(config)
        finally:
            with self._lock:
                self._in_flight -= 1

    def evaluate_reference(self) -> Future[Outcome]:
        return self._pool.submit(lambda: self._reference)

    def race(self, entries, *, seconds: float, seed: int, fresh: bool = False) -> Future[Race]:
        """Each entry's own time, with noise that is the same for the same seed; `fresh` ones are remembered."""
        self.races.append((entries, fresh))
        return self._pool.submit(self._race, entries, random.Random(seed))

    def _race(self, entries, draw: random.Random) -> Race:
        times = [(self._reference if entry is None else self._outcome(entry)).time_ms for entry in entries]
        samples = [[time * draw.uniform(0.99, 1.01) for _ in range(7)] for time in times]
        return Race(Status.OK, samples, "wall clock")

    def validate(self, config: Config) -> Future[Validation]:
        self.validated.append(dict(config))
        return self._pool.submit(self._verdict, config)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def distinct(self) -> set:
        return {config_key(config) for config in self.evaluated}
