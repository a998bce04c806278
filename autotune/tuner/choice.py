"""Which of a search's configs to keep: the fastest that is right, or what wins the finals where times are measured."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, wait
from typing import TypeVar

from autotune.engines._base import Engine
from autotune.outcome import Config, Outcome, Status
from autotune.search import Interrupt, TrialRecord, fastest_first
from autotune.search.study import TuningStudy
from autotune.space import config_key
from autotune.tuner.finals import Final, Rivals, close_ones, decide
from autotune.tuner.observer import Observer
from autotune.tuner.result import REFERENCE
from autotune.validation import Validation

_T = TypeVar("_T")
_POLL_S = 0.2
# What an interrupted run may still take, in all, to validate its best, to time the reference, and for the finals.
INTERRUPTED_GRACE_S = 120.0
# A kernel that is wrong everywhere would otherwise have all its configs validated, one after the other.
REFUSALS_IN_A_ROW = 10
VALIDATION_ATTEMPTS = 2
# So many groups of finalists have a turn without anyone being refused: each may cost as many races as time out.
FRUITLESS_FINALS = 3


@dataclasses.dataclass
class Choice:
    """Chooses among a study's records.

    Attributes:
        engine: The engine whose times they are.
        study: Remembers each verdict, so that a resumed run need not find out again.
        baselines: Named configs.
        interrupt: Once requested, little more is waited for.
        observer: Is told what is validated and raced.
        gave_up: Validation refused so many configs in a row that no more were tried.
        refusals: How many it has refused.
    """

    engine: Engine
    study: TuningStudy
    baselines: Mapping[str, Config]
    interrupt: Interrupt
    observer: Observer
    gave_up: bool = False
    refusals: int = 0
    _set_aside: set[tuple] = dataclasses.field(default_factory=set)

    def settle_reference(self, reference: Future[Outcome] | None) -> Outcome | None:
        """Waits for the reference's time; a resumed study may know it already."""
        if self.study.reference is not None:
            return self.study.reference
        outcome = self.wait(reference or self.engine.evaluate_reference())
        if outcome is not None:
            self.study.keep_reference(outcome)
        return outcome

    def fastest_right(self) -> TrialRecord | None:
        """The fastest config that passes.

        Those that are refused are remembered, and never tried again. One whose worker died was not refused.
        """
        for fast in fastest_first(self.study.records()):
            if self.refusals == REFUSALS_IN_A_ROW:
                self.gave_up = True
                return None
            record = self.judged(fast)
            if record is None:
                return None
            if record.status is Status.OK:
                return record
        return None

    def final(self, reference: Outcome | None) -> Final | None:
        """The fastest measured again, and the first of them that is right beside the baselines.

        Where none of them is right, or can be run again and again, it is the turn of the next.
        """
        fruitless = 0
        while fruitless < FRUITLESS_FINALS:
            before = self.refusals
            finalists = close_ones(self._candidates())
            if not finalists:
                return None
            final = decide(
                self.engine, finalists, self._is_right, lambda: self._rivals(reference), self.wait, self.observer.says
            )
            if final is not None or self.interrupt.requested:
                return final
            if self.refusals >= REFUSALS_IN_A_ROW:
                self.gave_up = True
                return None
            self._set_aside |= {config_key(record.config) for record in finalists}
            fruitless += self.refusals == before
        return None

    def _candidates(self) -> list[TrialRecord]:
        """Fastest first, without those set aside: the study knows nothing against them."""
        records = fastest_first(self.study.records())
        return [record for record in records if config_key(record.config) not in self._set_aside]

    def best_of(self, final: Final | None) -> tuple[TrialRecord | None, bool | None]:
        """What to keep of what was measured, and whether it is a gain: where none was shown, the baseline stands.

        Where the finals did not come to an end, nothing: one measurement of each shows no gain.
        """
        if final is None:
            return None, None
        records = {config_key(record.config): record for record in self.study.records()}
        own = config_key(final.winner.config)
        winner = dataclasses.replace(records[own], outcome=final.winner.outcome)
        if any(config_key(config) == own for config in self.baselines.values()):
            return winner, False
        gains = {name: final.gains_over(name) for name in self.baselines}
        ties = [name for name, gain in gains.items() if gain is False]
        if not ties:
            return winner, None if None in gains.values() else True
        name = min(ties, key=lambda name: final.baselines[name].time_ms or 0.0)
        return dataclasses.replace(records[config_key(self.baselines[name])], outcome=final.baselines[name]), False

    def judged(self, record: TrialRecord) -> TrialRecord | None:
        """The record with its verdict; None where an interrupted run may wait no longer."""
        if record.validation is not None:
            return record
        self.observer.validating(record)
        validation = self._validate(record.config)
        if validation is None:
            return None
        self.study.keep_validation(record.config, validation)
        record = dataclasses.replace(record, validation=validation)
        self.refusals += record.status is not Status.OK
        if validation.status.transient:
            self._set_aside.add(config_key(record.config))
        self.observer.validated(record)
        return record

    def _is_right(self, record: TrialRecord) -> bool | None:
        judged = self.judged(record)
        return None if judged is None else judged.status is Status.OK

    def _rivals(self, reference: Outcome | None) -> Rivals | None:
        """The baselines that work and are right."""
        found: dict[str, tuple[Config | None, Outcome]] = {}
        records = {config_key(record.config): record for record in self.study.records()}
        for name, config in self.baselines.items():
            record = records.get(config_key(config))
            if record is None or record.status is not Status.OK:
                continue
            if (right := self._is_right(record)) is None:
                return None
            if right:
                found[name] = (config, record.outcome)
        return found | ({REFERENCE: (None, reference)} if reference is not None else {})

    def _validate(self, config: Config) -> Validation | None:
        """The verdict; a worker that died or hung gives none, and is worth another try in a fresh one."""
        validation = None
        for _ in range(VALIDATION_ATTEMPTS):
            validation = self.wait(self.engine.validate(config))
            if validation is None or not validation.status.transient:
                break
        return validation

    def wait(self, future: Future[_T]) -> _T | None:
        """The future's result; None where an interrupted run may wait no longer."""
        while not future.done():
            if self.interrupt.since is not None and time.monotonic() > self.interrupt.since + INTERRUPTED_GRACE_S:
                return None
            wait([future], timeout=_POLL_S)
        try:
            return future.result()
        except CancelledError:
            return None
