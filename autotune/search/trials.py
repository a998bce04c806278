"""What a study knows, in this project's words."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from autotune.outcome import Outcome, Source, Status
from autotune.space import config_key, format_config
from autotune.validation import Validation

LONGEST_REASON = 300  # characters


@dataclasses.dataclass(frozen=True)
class TrialRecord:
    """One evaluated config.

    Attributes:
        number: The trial's number in the study.
        config: What was evaluated.
        outcome: What the engine said.
        validation: The numerical verdict, where one was asked for.
    """

    number: int
    config: Mapping[str, Any]
    outcome: Outcome
    validation: Validation | None = None

    @property
    def status(self) -> Status:
        """The outcome's, unless validation refused what the engine had accepted."""
        if self.outcome.ok and self.validation is not None:
            return self.validation.status
        return self.outcome.status

    @property
    def message(self) -> str:
        """What the engine, or else validation, said."""
        return self.outcome.message or (self.validation.message if self.validation is not None else "")


def counts(records: Iterable[TrialRecord]) -> dict[str, int]:
    """How many records of each status, ``ok`` first and in the order of `Status`."""
    found = Counter(record.status for record in records)
    return {status.value: found[status] for status in Status if found[status]}


def reasons(records: Iterable[TrialRecord]) -> dict[str, str]:
    """For each status but ``ok``, the first line of the first message that there is."""
    found: dict[str, str] = {}
    for record in records:
        lines = record.message.strip().splitlines()
        if record.status is not Status.OK and lines:
            found.setdefault(record.status.value, lines[0][:LONGEST_REASON])
    return found


def fastest_first(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """The records that are still candidates for the preset, best time first, the earlier trial among equals.

    Times by arithmetic alone come after all others: what the compiler's schedule did not show beats nothing it did.
    """
    usable = [record for record in records if record.status is Status.OK]
    return sorted(usable, key=lambda record: (*_evidence(record), record.number))


def _evidence(record: TrialRecord) -> tuple[bool, float]:
    return record.outcome.source is Source.ANALYTIC, record.outcome.time_ms or 0.0


def read_trials(trials: Iterable[Any], validations: Mapping[str, Validation]) -> list[TrialRecord]:
    """The evaluated configs among Optuna's `trials`, each once, in the order they were asked for.

    Of a config that was tried again, what came last counts, unless an earlier trial was ok.
    """
    records: dict[tuple, TrialRecord] = {}
    for trial in trials:
        attrs = trial.user_attrs
        if "outcome" not in attrs or not trial.state.is_finished():
            continue
        config = attrs["config"]
        validation = validations.get(format_config(config))
        record = TrialRecord(trial.number, config, Outcome.from_dict(attrs["outcome"]), validation)
        known = records.get(config_key(config))
        if known is None or not known.outcome.ok:
            records[config_key(config)] = record
    return list(records.values())
