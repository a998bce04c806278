"""Tunes one task from end to end: search, baselines, validation, the finals where times are measured, preset."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future

from autotune import presets
from autotune.engines._base import Engine, Task
from autotune.errors import AutotuneError, UsageError
from autotune.files import check_writable
from autotune.foresight import Foresight, agreement
from autotune.outcome import Config, Outcome, Status
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
from autotune.search.pool import any_valid
from autotune.search.storage import shown, working
from autotune.space import config_key
from autotune.tuner.choice import Choice
from autotune.tuner.finals import Final
from autotune.tuner.keep import keep, preset_file
from autotune.tuner.observer import Observer
from autotune.tuner.result import REFERENCE, TuneResult


def check(task: Task, settings: SearchSettings) -> None:
    """Looks for whatever would stop a run, before an engine is started; changes nothing.

    Raises:
        UsageError: Nothing can be tuned as asked, or its results could not be written.
        ResultsError: A results file cannot be read.
    """
    space, baselines = task.kernel.space(task.problem, task.chip), task.kernel.baselines(task.problem, task.chip)
    if all(space.why_invalid(config) for config in baselines.values()) and not any_valid(space):
        raise UsageError(f"{task.kernel.name} has no valid config for {task.problem} on {task.chip.name}")
    given = f"--results {settings.results}"
    for folder in (settings.results / "studies", preset_file(task, settings.results).parent):
        check_writable(folder, given)
    presets.read(preset_file(task, settings.results))
    check_request(task, baselines, settings)


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
    final: Final | None = None
    gain: bool | None = True
    with working(shown(settings.storage, settings.results, study.name)):
        observer.started(study.name, study.records(), settings.trials)
        with Interrupt() as interrupt, contextlib.suppress(KeyboardInterrupt):  # From the second signal on.
            choice = Choice(engine, study, baselines, interrupt, observer)
            reason = search.run(on_trial, interrupt, started=started)
            if interrupt.requested:
                observer.says("interrupted: finishing with what is known; once more ends at once")
            outcome = choice.settle_reference(reference)
            if engine.measures:
                final = choice.final(outcome)
            else:
                best = choice.fastest_right()
    if engine.measures:
        best, gain = choice.best_of(final)
    if best is None and interrupt.requested:
        reason = StopReason.INTERRUPTED  # The search had ended; what came after it had not.
    records = study.records()
    outcomes = {config_key(record.config): record.outcome for record in records}
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
        needed_bytes=tuple(
            r.outcome.peak_bytes for r in records if r.outcome.over_bytes is not None and r.outcome.peak_bytes
        ),
        gave_up=choice.gave_up,
        messages=reasons(records),
        final=final,
        agreement=agreement(records),
        gain=gain,
    )
    return result if best is None else keep(result, settings.results)


def _in_use(task: Task) -> list[Config]:
    """What training code runs this problem with today: the preset of it, or of one near, or the kernel's heuristic.

    To begin with it makes the search find no less, and renews a preset of an older kernel in a few trials.
    """
    try:
        return [presets.find(task.kernel, task.problem, task.chip).config]
    except AutotuneError:  # Nothing usable: a space without a heuristic, presets that cannot be read.
        return []
