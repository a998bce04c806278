"""The search itself: several trials in flight until a budget ends it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import CancelledError as FutureCancelled
from pathlib import Path
from typing import Any

from autotune.engines._base import Engine, Task
from autotune.outcome import Config, Outcome, Status
from autotune.search.encoding import Encoding
from autotune.search.interrupt import Interrupt
from autotune.search.pool import STARTUP_TRIALS, Pool
from autotune.search.study import TuningStudy, check_studies, identity, study_name
from autotune.search.trials import TrialRecord

# Share of the trials that the analytic ranking decides; the sampler decides the others.
RANKED_SHARE = 0.22
# Trials that wait beside those being worked on, so that no worker idles while a proposal is made.
QUEUED = 1
_POLL_S = 0.2
# What an engine may turn out to be called, which nobody knows before it is started.
ENGINES = ("compiler", "analytic", "device")


class StopReason(enum.StrEnum):
    """Why the search ended."""

    TRIALS = "trials"
    BUDGET = "budget"
    EXHAUSTED = "space exhausted"
    INTERRUPTED = "interrupted"


@dataclasses.dataclass(frozen=True)
class SearchSettings:
    """How much to search, and where it is kept.

    Attributes:
        trials: Distinct configs to evaluate, those of earlier runs of the study included.
        seed: Of the sampler; part of the study's identity.
        budget_s: Seconds after which nothing more is tried and what is in flight is given up; None for no limit.
        storage: As ``--storage``; None for a journal file in `results`.
        study: The study's name; None for the derived one.
        results: The results folder.
    """

    trials: int = 100
    seed: int = 0
    budget_s: float | None = None
    storage: str | None = None
    study: str | None = None
    results: Path = Path("results")


def check_request(task: Task, baselines: Mapping[str, Config], settings: SearchSettings) -> None:
    """Looks, before an engine is started and without changing anything, whether the study can be opened.

    Raises:
        UsageError: The study was made for something else, or its storage cannot be used.
        ResultsError: The storage cannot be read.
    """
    encoding = Encoding(task.kernel.space(task.problem, task.chip), baselines.values())
    wanted: dict[str, dict[str, str]] = {}
    for engine in ENGINES:
        parts = identity(task, engine, settings.seed, encoding)
        name = settings.study or study_name(parts)
        if settings.study:
            del parts["engine"]
        wanted[name] = parts
    check_studies(wanted, settings.storage, settings.results)


class Search:
    """One study's search. Creating it opens the study; `run` does the work.

    Args:
        engine: Evaluates the configs of its task.
        baselines: Named configs to start with.
        settings: How much, and where it is kept.
        start: Gives configs known to be good, to begin with after the baselines; called when first needed.
        foreseen: What a config was predicted to take, kept beside what is measured.

    Raises:
        UsageError: The space is empty, or the study was made for something else.
        ResultsError: The storage cannot be read.
    """

    def __init__(
        self,
        engine: Engine,
        baselines: Mapping[str, Config],
        settings: SearchSettings,
        *,
        start: Callable[[], Sequence[Config]] = lambda: (),
        foreseen: Callable[[Config], Outcome | None] = lambda config: None,
    ) -> None:
        task = engine.task
        self._engine = engine
        self._settings = settings
        self._space = task.kernel.space(task.problem, task.chip)
        self._baselines = list(baselines.values())
        self._encoding = Encoding(self._space, self._baselines)
        self._start, self._foreseen = start, foreseen
        self.study = TuningStudy(
            identity(task, engine.name, settings.seed, self._encoding),
            self._encoding,
            lambda: self.pool,
            storage=settings.storage,
            results=settings.results,
            name=settings.study,
        )
        self._in_flight: dict[Future[Outcome], Any] = {}
        self._ranking_queued = False

    @functools.cached_property
    def pool(self) -> Pool:
        """The valid configs, ranked: made once, while the engine's workers start."""
        task = self._engine.task
        valid = [config for config in self._baselines if self._space.why_invalid(config) is None]
        return Pool(
            self._space,
            self._encoding,
            lambda config: task.kernel.estimate_ms(task.problem, config, task.chip),
            extra=valid,
            seed=self._settings.seed,
        )

    def run(
        self,
        on_trial: Callable[[TrialRecord], None],
        interrupt: Interrupt,
        *,
        started: float,
    ) -> StopReason:
        """Searches until something ends it.

        Args:
            on_trial: Called after each trial, in this thread.
            interrupt: Ends the search when requested.
            started: `time.monotonic()` of the run's start, from which the budget counts.
        """
        deadline = started + self._settings.budget_s if self._settings.budget_s else None
        self.study.recover(self._engine.timeout_s)
        if self.study.done < self._settings.trials:
            for config in self._baselines:
                self.study.enqueue(config)
        try:
            while True:
                if interrupt.requested:
                    return StopReason.INTERRUPTED
                if deadline is not None and time.monotonic() >= deadline:
                    return StopReason.BUDGET
                exhausted = not self._fill()
                if not self._in_flight:
                    return StopReason.EXHAUSTED if exhausted else StopReason.TRIALS
                finished, _ = wait(self._in_flight, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                for future in finished:
                    on_trial(self._collect(future))
        finally:
            self._abandon()

    def _fill(self) -> bool:
        """Puts in flight what there is room for; False where the space has no more."""
        while self._room():
            if not self.study.waiting:
                # Only now, with the first baseline already compiling: ranking a space takes a moment.
                if not self._ranking_queued:
                    self._ranking_queued = True
                    self._queue_ranking()
                    continue
                if self.pool.exhausted(self.study.taken()):
                    return False
            if not self._submit():
                return False
        return True

    def _room(self) -> bool:
        """Other runs on the same study work for the same number of trials: theirs count."""
        in_flight = len(self._in_flight)
        if in_flight >= self._engine.jobs + QUEUED:
            return False
        return self.study.done + self.study.in_flight_elsewhere + in_flight < self._settings.trials

    def _queue_ranking(self) -> None:
        for config in self._start():
            if self._encoding.holds(config):  # What is no candidate would make another study of it.
                self.study.enqueue(config)
        share = max(1, round(self._settings.trials * RANKED_SHARE))
        if not self.pool.complete:  # Of a vast space, what the sampler draws before it has learnt is not worth a trial.
            share = max(share, STARTUP_TRIALS)
        for config in self.pool.ranked(share):
            self.study.enqueue(config)

    def _submit(self) -> bool:
        asked = self.study.ask()
        if asked is None:
            return False
        trial, config = asked
        if reason := self._space.why_invalid(config):  # A baseline: nothing else is proposed unchecked.
            future: Future[Outcome] = Future()
            future.set_result(Outcome(Status.INVALID, message=reason))
        else:
            future = self._engine.evaluate(config)
        self._in_flight[future] = (trial, config)
        return True

    def _collect(self, future: Future[Outcome]) -> TrialRecord:
        trial, config = self._in_flight[future]
        try:
            outcome = future.result()
        except FutureCancelled:
            outcome = Outcome(Status.CRASH, message="the engine gave the trial up")
        del self._in_flight[future]
        if outcome.measured and (foreseen := self._foreseen(config)) is not None:
            outcome = dataclasses.replace(outcome, predicted_ms=foreseen.time_ms, predicted_by=foreseen.source)
        self.study.tell(trial, outcome, limit_s=self._engine.timeout_s)
        return TrialRecord(trial.number, config, outcome)

    def _abandon(self) -> None:
        """What is in flight loses its trial, not its config: a resumed run tries it again."""
        for future in list(self._in_flight):
            if future.done() and not future.cancelled() and future.exception() is None:
                self._collect(future)
            else:
                future.cancel()
                self.study.abandon(self._in_flight.pop(future)[0])
