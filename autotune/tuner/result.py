"""What a run found."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.engines._base import Task
from autotune.foresight import Agreement
from autotune.noise import Spread
from autotune.outcome import Outcome
from autotune.search import StopReason, TrialRecord
from autotune.tuner.finals import Final

REFERENCE = "xla"  # the reference's name among the baselines


@dataclasses.dataclass(frozen=True)
class TuneResult:
    """What a run found.

    Attributes:
        task: What was tuned.
        engine: The engine's name.
        counts: Number of trials by status.
        best: The fastest config that validation passed; None where there is none.
        baselines: Outcome of each baseline; None where it was not reached.
        unvalidated: The fastest config, where the run was ended before its validation was.
        rejected: Configs that were fast enough to be validated and were refused.
        seconds: Wall time of this run.
        stopped_because: Why the search ended.
        study: The study's name.
        preset: The preset's file, where this result is the one kept there.
        kept: A better preset that was there before and stays; then `preset` names its file too.
        needed_bytes: Of each config that did not fit the device's memory, what it needs, where the compiler says so.
        gave_up: Validation refused so many configs in a row that no more were tried.
        messages: Of each status but ok, the first message.
        final: What the finals showed, where times are measured.
        agreement: How well what was predicted ranked what was measured.
        gain: Whether the best was shown to be faster than the baseline configs; where not, the fastest of those is
            `best`. None: they were not compared, as one does not work, and no gain is claimed.
    """

    task: Task
    engine: str
    counts: Mapping[str, int]
    best: TrialRecord | None
    baselines: Mapping[str, Outcome | None]
    unvalidated: TrialRecord | None
    rejected: tuple[TrialRecord, ...]
    seconds: float
    stopped_because: StopReason
    study: str
    preset: Path | None = None
    kept: bool = False
    needed_bytes: tuple[int, ...] = ()
    gave_up: bool = False
    messages: Mapping[str, str] = dataclasses.field(default_factory=dict)
    final: Final | None = None
    agreement: Agreement | None = None
    gain: bool | None = True

    @property
    def roofline_ms(self) -> float | None:
        """The least time the chip could take, in milliseconds; None where its figures are not known."""
        return self.task.kernel.cost(self.task.problem).roofline_ms(self.task.chip)

    @property
    def terms(self) -> dict[str, str]:
        """The best config as others write it; see `Kernel.terms`."""
        return dict(self.task.kernel.terms(self.task.problem, self.best.config)) if self.best else {}

    def speedup(self, baseline: str) -> float | None:
        """The baseline's time over the best; None where either is unknown."""
        if (ratio := self.ratio(baseline)) is not None:
            return ratio.value
        outcome = self.baselines.get(baseline)
        if self.best is None or outcome is None or outcome.time_ms is None:
            return None
        return outcome.time_ms / self.best.outcome.time_ms

    def ratio(self, baseline: str) -> Spread | None:
        """The same with its interval, where the finals measured both in turn."""
        return self.final.ratios.get(baseline) if self.final is not None and self.gain is not False else None

    def to_dict(self) -> dict[str, Any]:
        """The command line's JSON document."""
        best = None
        if self.best is not None:
            outcome, validation = self.best.outcome, self.best.validation
            best = {
                "config": dict(self.best.config),
                "time_ms": outcome.time_ms,
                "validated": validation is not None and validation.ok,
                "max_rel_error": validation.max_rel_error if validation else None,
                "max_element_error": validation.max_element_error if validation else None,
                "compute_ms": outcome.compute_ms,
                "memory_ms": outcome.memory_ms,
                "bound": outcome.bound,
                "source": outcome.source,
                "measured": outcome.measured,
                "roofline_ms": self.roofline_ms,
                **({"terms": self.terms} if self.terms else {}),
                **({"peak_bytes": outcome.peak_bytes} if outcome.peak_bytes is not None else {}),
                **({"collective_ms": outcome.collective_ms} if outcome.collective_ms is not None else {}),
            } | ({"interval_ms": outcome.interval_ms, "timer": outcome.timer} if outcome.measured else {})
        return {
            "kernel": self.task.kernel.name,
            "problem": self.task.problem.to_dict(),
            "target": self.task.chip.name,
            "engine": self.engine,
            "trials": dict(self.counts),
            "best": best,
            "baselines": {name: baseline_figures(outcome) for name, outcome in self.baselines.items()},
            "speedup": {name: self.speedup(name) for name in self.baselines},
            **self._measured(),
            "seconds": round(self.seconds, 3),
            "stopped_because": self.stopped_because.value,
            "study": self.study,
            "preset": str(self.preset) if self.preset else None,
            "messages": dict(self.messages),
            **({"hbm_needed_bytes": sorted(self.needed_bytes)} if self.needed_bytes else {}),
        }

    def _measured(self) -> dict[str, Any]:
        if self.final is None:
            return {}
        intervals = {name: [ratio.low, ratio.high] for name in self.baselines if (ratio := self.ratio(name))}
        return {
            "gain": self.gain,
            "speedup_interval": intervals,
            "predictions": dataclasses.asdict(self.agreement) if self.agreement is not None else None,
        }


def baseline_figures(outcome: Outcome | None) -> dict[str, Any]:
    """``{"time_ms": …, "source": …}``; where there is no time, None and the status that says why."""
    if outcome is None:
        return {"time_ms": None, "status": "not reached"}
    if not outcome.ok:
        return {"time_ms": None, "status": outcome.status.value}
    return {"time_ms": outcome.time_ms} | ({"source": outcome.source.value} if outcome.source else {})
