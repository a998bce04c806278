"""Tunes one task from end to end: search, baselines, validation, the finals where times are measured, preset."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from pathlib import Path
from typing import Any, TypeVar

from autotune import presets, versions
from autotune.engines._base import Engine, Task
from autotune.errors import AutotuneError, UsageError
from autotune.files import check_writable
from autotune.finals import Final, close_ones, decide
from autotune.foresight import Agreement, Foresight, agreement
from autotune.noise import Spread
from autotune.outcome import Config, Outcome, Status
from autotune.presets import Preset
from autotune.search import (
    Interrupt,
    Search,
    SearchSettings,
    StopReason,
    TrialRecord,
    check_request,
    counts,
    fastest_first,
    reasons,
)
from autotune.search.storage import shown, working
from autotune.search.study import TuningStudy
from autotune.space import config_key
from autotune.validation import Validation

_T = TypeVar("_T")
_POLL_S = 0.2
# What an interrupted run may still take, in all, to validate its best, to time the reference, and for the finals.
INTERRUPTED_GRACE_S = 120.0
REFERENCE = "xla"
# A kernel that is wrong everywhere would otherwise have all its configs validated, one after the other.
REFUSALS_IN_A_ROW = 5
VALIDATION_ATTEMPTS = 2


class Observer:
    """Is told how a run goes. Every method may be overridden and does nothing here."""

    def started(self, study: str, known: list[TrialRecord], trials: int) -> None:
        """The study is open; `known` are the trials of earlier runs, `trials` the number aimed at."""

    def trial(self, record: TrialRecord) -> None:
        """A trial ended."""

    def validating(self, record: TrialRecord) -> None:
        """The fastest config so far is being compared with the reference."""

    def validated(self, record: TrialRecord) -> None:
        """Its verdict is known."""

    def says(self, line: str) -> None:
        """What goes on beside the trials."""


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
    gave_up: bool = False
    messages: Mapping[str, str] = dataclasses.field(default_factory=dict)
    final: Final | None = None
    agreement: Agreement | None = None
    gain: bool | None = True

    @property
    def roofline_ms(self) -> float | None:
        """The least time the chip could take, in milliseconds; None where its figures are not known."""
        return self.task.kernel.cost(self.task.problem).roofline_ms(self.task.chip)

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


def _interval_figures(ratio: Spread | None) -> dict[str, Any]:
    """What a preset keeps of how surely it beats a baseline."""
    return {} if ratio is None else {"speedup": ratio.value, "speedup_interval": [ratio.low, ratio.high]}


def preset_file(task: Task, results: Path) -> Path:
    """Where the preset of `task` is kept."""
    return presets.preset_path(results / "presets", task.chip.device_kind, task.kernel.name)


def check(task: Task, settings: SearchSettings) -> None:
    """Looks for whatever would stop a run, before an engine is started; changes nothing.

    Raises:
        UsageError: Nothing can be tuned as asked, or its results could not be written.
        ResultsError: A results file cannot be read.
    """
    if next(iter(task.kernel.space(task.problem, task.chip)), None) is None:
        raise UsageError(f"{task.kernel.name} has no valid config for {task.problem} on {task.chip.name}")
    given = f"--results {settings.results}"
    for folder in (settings.results / "studies", preset_file(task, settings.results).parent):
        check_writable(folder, given)
    presets.read(preset_file(task, settings.results))
    check_request(task, task.kernel.baselines(task.problem, task.chip), settings)


def tune(
    task: Task,
    engine: Engine,
    settings: SearchSettings,
    observer: Observer | None = None,
    *,
    start: Sequence[Config] = (),
    started: float | None = None,
) -> TuneResult:
    """Searches, validates the winner and keeps it as a preset.

    The first SIGINT or SIGTERM ends the search and finishes with what is known; the second ends at once.

    Args:
        task: What to tune.
        engine: An open engine of that task.
        settings: How much to search, and where results are kept.
        observer: Is told how it goes.
        start: Configs to begin with after the baselines.
        started: `time.monotonic()` of the run's start, where something was done before; its budget counts from there.

    Raises:
        UsageError: Nothing can be tuned as asked. Nothing has been written then.
        ResultsError: A results file cannot be read. It is untouched.
    """
    observer = observer or Observer()
    started = time.monotonic() if started is None else started
    presets.read(preset_file(task, settings.results))  # Better now than after the search.
    baselines = task.kernel.baselines(task.problem, task.chip)
    known = Foresight(task, settings) if engine.measures else None
    search = Search(
        engine,
        baselines,
        settings,
        start=lambda: [*start, *_in_use(task), *(known.best(settings.trials) if known else ())],
        foreseen=known.predicted if known else lambda config: None,
    )
    study = search.study
    reference: Future[Outcome] | None = None

    def on_trial(record: TrialRecord) -> None:
        nonlocal reference
        if reference is None and study.reference is None:
            reference = engine.evaluate_reference()  # Not before: a first result should come soon.
        observer.trial(record)

    reason, outcome = StopReason.INTERRUPTED, None
    best: TrialRecord | None = None
    gave_up, final = False, None
    gain: bool | None = True
    with working(shown(settings.storage, settings.results, study.name)):
        observer.started(study.name, study.records(), settings.trials)
        with Interrupt() as interrupt, contextlib.suppress(KeyboardInterrupt):  # From the second signal on.
            reason = search.run(on_trial, interrupt, started=started)
            outcome = _settle_reference(engine, study, reference, interrupt)
            if engine.measures:
                final, gave_up = _finals(engine, study, outcome, baselines, interrupt, observer)
            else:
                best, gave_up = _validate_fastest(engine, study, interrupt, observer)
    records = study.records()
    outcomes = {config_key(record.config): record.outcome for record in records}
    if engine.measures:
        best, gain = _best(final, baselines, {config_key(record.config): record for record in records})
    if best is None and interrupt.requested:
        reason = StopReason.INTERRUPTED  # The search had ended; what came after it had not.
    result = TuneResult(
        task=task,
        engine=engine.name,
        counts=counts(records),
        best=best,
        baselines={
            **{name: outcomes.get(config_key(config)) for name, config in baselines.items()},
            REFERENCE: outcome or study.reference,
            **(final.baselines if final is not None else {}),
        },
        unvalidated=next(iter(fastest_first(records)), None) if best is None else None,
        rejected=tuple(r for r in records if r.outcome.ok and r.status is not Status.OK),
        seconds=time.monotonic() - started,
        stopped_because=reason,
        study=study.name,
        gave_up=gave_up,
        messages=reasons(records),
        final=final,
        agreement=agreement(records),
        gain=gain,
    )
    return result if best is None else _keep(result, settings.results)


def _in_use(task: Task) -> list[Config]:
    """What training code runs this problem with today: the preset of it, or of one near, or the kernel's heuristic.

    To begin with it makes the search find no less, and renews a preset of an older kernel in a few trials.
    """
    try:
        return [presets.find(task.kernel, task.problem, task.chip).config]
    except AutotuneError:  # Nothing usable: a space without a heuristic, presets that cannot be read.
        return []


def _settle_reference(
    engine: Engine, study: TuningStudy, reference: Future[Outcome] | None, interrupt: Interrupt
) -> Outcome | None:
    """Waits for the reference's time; a resumed study may know it already."""
    if study.reference is not None:
        return study.reference
    outcome = _result(reference or engine.evaluate_reference(), interrupt)
    if outcome is not None:
        study.keep_reference(outcome)
    return outcome


def _validate_fastest(
    engine: Engine, study: TuningStudy, interrupt: Interrupt, observer: Observer
) -> tuple[TrialRecord | None, bool]:
    """The fastest config that passes, and whether too many were refused to go on looking.

    Those that are refused are remembered, and never tried again. One whose worker died was not refused.
    """
    for refusals, fast in enumerate(fastest_first(study.records())):
        if refusals == REFUSALS_IN_A_ROW:
            return None, True
        record = _judged(engine, study, fast, interrupt, observer)
        if record is None:
            return None, False
        if record.status is Status.OK:
            return record, False
    return None, False


def _judged(
    engine: Engine, study: TuningStudy, record: TrialRecord, interrupt: Interrupt, observer: Observer
) -> TrialRecord | None:
    """The record with its verdict; None where an interrupted run may wait no longer."""
    if record.validation is not None:
        return record
    observer.validating(record)
    validation = _validate(engine, record.config, interrupt)
    if validation is None:
        return None
    study.keep_validation(record.config, validation)
    record = dataclasses.replace(record, validation=validation)
    observer.validated(record)
    return record


def _finals(
    engine: Engine,
    study: TuningStudy,
    reference: Outcome | None,
    baselines: Mapping[str, Config],
    interrupt: Interrupt,
    observer: Observer,
) -> tuple[Final | None, bool]:
    """The fastest measured again, and the first of them that is right beside the baselines; whether too many were not.

    Baselines that are wrong do not run.
    """
    refused = 0

    def judge(record: TrialRecord) -> bool | None:
        nonlocal refused
        judged = _judged(engine, study, record, interrupt, observer)
        if judged is None:
            return None
        refused += judged.status is not Status.OK
        return judged.status is Status.OK

    def rivals() -> dict[str, tuple[Config | None, Outcome]] | None:
        found: dict[str, tuple[Config | None, Outcome]] = {REFERENCE: (None, reference)} if reference else {}
        for name, config in baselines.items():
            record = next((r for r in study.records() if config_key(r.config) == config_key(config)), None)
            if record is None or record.status is not Status.OK:
                continue
            if (right := judge(record)) is None:
                return None
            if right:
                found[name] = (config, record.outcome)
        return found

    while finalists := close_ones(fastest_first(study.records())):
        before = refused
        final = decide(engine, finalists, judge, rivals, lambda future: _result(future, interrupt), observer.says)
        if final is not None or interrupt.requested or refused == before:
            return final, False
        if refused >= REFUSALS_IN_A_ROW:
            return None, True
    return None, False


def _best(
    final: Final | None, baselines: Mapping[str, Config], records: Mapping[tuple, TrialRecord]
) -> tuple[TrialRecord | None, bool | None]:
    """What to keep of what was measured, and whether it is a gain: where it was not shown to be, the baseline stands.

    Where the finals did not come to an end, nothing: one measurement of each shows no gain.
    """
    if final is None:
        return None, None
    own = config_key(final.winner.config)
    winner = dataclasses.replace(records[own], outcome=final.winner.outcome)
    if any(config_key(config) == own for config in baselines.values()):
        return winner, False
    gains = {name: final.gains_over(name) for name in baselines}
    ties = [name for name, gain in gains.items() if gain is False]
    if not ties:
        return winner, None if None in gains.values() else True
    name = min(ties, key=lambda name: final.baselines[name].time_ms or 0.0)
    return dataclasses.replace(records[config_key(baselines[name])], outcome=final.baselines[name]), False


def _validate(engine: Engine, config: Config, interrupt: Interrupt) -> Validation | None:
    """The verdict; a worker that died or hung gives none, and is worth another try in a fresh one."""
    validation = None
    for _ in range(VALIDATION_ATTEMPTS):
        validation = _result(engine.validate(config), interrupt)
        if validation is None or not validation.status.transient:
            break
    return validation


def _result(future: Future[_T], interrupt: Interrupt) -> _T | None:
    """The future's result; None where an interrupted run may wait no longer."""
    while not future.done():
        if interrupt.since is not None and time.monotonic() > interrupt.since + INTERRUPTED_GRACE_S:
            return None
        wait([future], timeout=_POLL_S)
    try:
        return future.result()
    except CancelledError:
        return None


def _keep(result: TuneResult, results: Path) -> TuneResult:
    """Writes the preset, unless a better one is there."""
    task, best = result.task, result.best
    assert best is not None
    assert best.validation is not None
    preset = Preset(
        kernel=task.kernel.name,
        device_kind=task.chip.device_kind,
        problem=task.problem.to_dict(),
        config=dict(best.config),
        time_ms=best.outcome.time_ms,
        source=presets.MEASURED if best.outcome.measured else presets.PREDICTED,
        method=best.outcome.source.value if best.outcome.source else None,
        engine=result.engine,
        baselines={
            name: baseline_figures(outcome) | _interval_figures(result.ratio(name))
            for name, outcome in result.baselines.items()
        },
        interval_ms=best.outcome.interval_ms,
        timer=best.outcome.timer,
        compute_ms=best.outcome.compute_ms,
        memory_ms=best.outcome.memory_ms,
        roofline_ms=result.roofline_ms,
        bound=best.outcome.bound,
        validation=best.validation.to_dict(),
        versions={**_compiler_of(best.outcome), "kernel": task.kernel.version},
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        study=result.study,
    )
    path, space = preset_file(task, results), task.kernel.space(task.problem, task.chip)
    written = presets.save(
        path,
        preset,
        lambda old: presets.usable_config(space, old) is not None,
        lambda old: presets.problem_of(task.kernel, old) == task.problem,
    )
    return dataclasses.replace(result, preset=path, kept=not written)


def _compiler_of(outcome: Outcome) -> dict[str, str]:
    """The versions that made the time, which may be older than what is installed now."""
    return {package: outcome.provenance[package] for package in versions.DECIDING if package in outcome.provenance}
