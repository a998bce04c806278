"""``autotune KERNEL``: the main job."""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune import engines, presets, render
from autotune.cli.common import kernel_code, print_json, read_task
from autotune.cli.pod import find_place, follow, lead
from autotune.engines._base import Task
from autotune.errors import UnavailableError
from autotune.foresight import predict
from autotune.noise import Spread
from autotune.outcome import Config, Outcome
from autotune.search import SearchSettings, StopReason
from autotune.space import format_config
from autotune.tuner import REFERENCE, REFUSALS_IN_A_ROW, TuneResult, check, tune

if TYPE_CHECKING:
    from autotune.engines.device.pod import Pod

_STOPPED = {
    StopReason.TRIALS: "",
    StopReason.BUDGET: "; stopped by --budget",
    StopReason.EXHAUSTED: "; the space has no more",
    StopReason.INTERRUPTED: "; interrupted: run the same command to resume",
}


def run(arguments: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        pod = None
        if place := find_place(arguments):
            if place.process_id:
                return follow(place)
            pod = stack.enter_context(lead(place, arguments))
        return _run(arguments, pod)


def _run(arguments: argparse.Namespace, pod: Pod | None) -> int:
    task = read_task(arguments, pod)
    settings = SearchSettings(
        trials=arguments.trials,
        seed=arguments.seed,
        budget_s=arguments.budget,
        storage=arguments.storage,
        study=arguments.study,
        results=arguments.results,
    )
    with kernel_code(task.kernel.name):
        _ = task.kernel.version
    check(task, settings)
    start = _start(task, arguments)
    result = _tune(task, arguments, settings, pod, start)
    if arguments.json:
        print_json(result.to_dict())
    else:
        _show(result)
    return 0 if result.best is not None else 1


def _start(task: Task, arguments: argparse.Namespace) -> tuple[Config, ...]:
    """The configs that other tuners' tables give."""
    if not arguments.start_from:
        return ()
    from autotune.interop import starting_configs

    found = starting_configs(task, arguments.start_from)
    render.console(stderr=True).print(
        f"of {found.rows} rows of other tuners' tables, {len(found.configs)} configs fit the space and are tried first",
        soft_wrap=True,
    )
    return found.configs


def _tune(
    task: Task, arguments: argparse.Namespace, settings: SearchSettings, pod: Pod | None, start: tuple[Config, ...]
) -> TuneResult:
    from autotune.cli.progress import make_progress

    console, started = render.console(stderr=True), time.monotonic()
    if arguments.engine == "device" and task.chip.known:
        _predict_first(task, arguments, settings, console, started)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(
            engines.open_engine(arguments.engine, task, jobs=arguments.jobs, timeout_s=arguments.timeout, pod=pod)
        )
        heading = [f"{task.kernel.name} {task.problem}", f"on {task.chip.name}, {engine.name} engine"]
        heading += [engine.notice] if engine.notice else []
        progress = stack.enter_context(make_progress(console, heading))
        return tune(task, engine, settings, progress, start=start, started=started)


def _predict_first(
    task: Task, arguments: argparse.Namespace, settings: SearchSettings, console: Any, started: float
) -> None:
    """Has the compiler rank configs, so that the device measures the promising ones."""
    from autotune.cli.progress import LineProgress

    try:
        opened = engines.open_engine("compiler", task, jobs=arguments.jobs, timeout_s=arguments.timeout)
    except UnavailableError as error:
        console.print(f"nothing is predicted first: {error}", soft_wrap=True)
        return
    progress = LineProgress(console, [])
    progress.trials = settings.trials
    console.print(f"predicting {settings.trials} configs, to measure the best of them first", soft_wrap=True)
    with opened as engine:
        reason = predict(engine, settings, progress.trial, started=started)
    if reason is StopReason.INTERRUPTED:
        raise KeyboardInterrupt  # Who wants an end wants no measurements; the predictions made are kept.


def _show(result: TuneResult) -> None:
    out = render.console()
    done = sum(result.counts.values())
    out.print(
        f"\n{done} trials in {render.seconds(result.seconds)}: {render.count_text(result.counts)}"
        f"{_STOPPED[result.stopped_because]}",
        soft_wrap=True,
    )
    out.print(_table(result))
    if result.best is not None and result.gain is False:
        out.print(_no_gain(result), soft_wrap=True)
    if result.best is not None and result.gain is None:
        out.print("No gain is claimed: a baseline config does not work, or was not compared.", soft_wrap=True)
    for name in result.baselines:
        if (factor := result.speedup(name)) is not None and factor < 1 and result.gain is not False:
            out.print(f"{name} is faster than the tuned config: {render.times(factor)}.", soft_wrap=True)
    if result.best is None:
        out.print(_why_nothing(result), soft_wrap=True)
        for status, message in result.messages.items():
            out.print(f"{status}: {message}", soft_wrap=True)
        return
    best, target = result.best, result.task.chip.name
    for label, text in _facts(result):
        out.print(f"{label:<12} {text}", soft_wrap=True)
    source = render.provenance(best.outcome.source, target)
    by = f" by {best.outcome.timer}" if best.outcome.timer else ""
    out.print(f"\nTimes are {source}{by}.")
    if (agreed := result.agreement) is not None:
        out.print(
            f"Predictions ({render.METHODS[agreed.source]}) ranked {agreed.configs} of the measured configs with a "
            f"correlation of {agreed.spearman:.2f}.",
            soft_wrap=True,
        )
    if result.final is not None:
        out.print("Intervals hold with 99 % confidence, from races in fresh processes.")
    for name, outcome in result.baselines.items():
        if outcome is not None and outcome.ok and outcome.source is not best.outcome.source:
            out.print(f"Not so {name}'s: {render.provenance(outcome.source, target)}.")
    out.print(
        f'In training code: presets.lookup("{result.task.kernel.name}", {result.task.problem.shown()}, '
        f'device_kind="{result.task.chip.device_kind}")',
        soft_wrap=True,
    )
    if result.preset is not None and not _looked_up(result.preset):
        out.print(
            f"There, lookups do not look in this results folder: name it in $AUTOTUNE_PRESETS, or use them under "
            f'presets.using("{result.preset}").',
            soft_wrap=True,
        )


def _looked_up(preset: Path) -> bool:
    """Whether a lookup started here would come across the preset file."""
    places = {place.resolve() for place in presets.search_path()}
    return bool(places & {preset.resolve(), preset.resolve().parent.parent})


def _why_nothing(result: TuneResult) -> str:
    if result.gave_up:
        return (
            f"{REFUSALS_IN_A_ROW} configs, one after the other, were not shown right, so nothing is kept: look at the "
            "kernel; the same command tries the next ones."
        )
    if (fastest := result.unvalidated) is None:
        return "No config works and was shown right: nothing is kept."
    time = render.milliseconds(fastest.outcome.time_ms)
    lacks = "confirmed in fresh processes" if fastest.outcome.measured and fastest.validation else "validated"
    return (
        f"The fastest, {format_config(fastest.config)} at {time}, was not {lacks} yet, so nothing is kept: "
        "run the same command to resume."
    )


def _no_gain(result: TuneResult) -> str:
    """The search's winner was not shown to be faster than a baseline config; the reference is none."""
    final = result.final
    assert final is not None
    winner = final.winner
    ratios = [
        f"{_factor(ratio)} against {name}"
        for name, ratio in final.ratios.items()
        if name != REFERENCE and not final.gains_over(name)
    ]
    return (
        f"No gain: the baseline stands. The fastest of the search, {format_config(winner.config)}, "
        f"was not shown to be faster ({', '.join(ratios) or 'it is the baseline'})."
    )


def _factor(ratio: Spread) -> str:
    """``1.87× (1.83 to 1.91)``: 99 % confidence."""
    return f"{render.times(ratio.value)} ({ratio.low:.2f} to {ratio.high:.2f})"


def _table(result: TuneResult) -> Any:
    table = render.table("", "time", "tuned is faster", "of roofline")
    roofline = result.roofline_ms
    for name, outcome in result.baselines.items():
        label = f"{name} (the reference)" if name == REFERENCE else f"{name} config"
        ratio = result.ratio(name)
        faster = _factor(ratio) if ratio is not None else render.times(result.speedup(name))
        table.add_row(label, _time(outcome), faster, _share(outcome, roofline))
    best = result.best.outcome if result.best else None
    table.add_row("tuned", _time(best), "", _share(best, roofline), style="bold")
    if roofline is not None:
        table.add_row("roofline", render.milliseconds(roofline), "", "")
    return table


def _facts(result: TuneResult) -> list[tuple[str, str]]:
    best = result.best
    assert best is not None
    outcome, validation = best.outcome, best.validation
    facts = [("config", format_config(best.config)), *result.terms.items()]
    if outcome.bound:
        parts = [f"{name} {render.milliseconds(value)}" for name, value in _parts(outcome) if value is not None]
        facts.append(("bound", f"{outcome.bound}" + (f" ({', '.join(parts)})" if parts else "")))
    if outcome.interval_ms is not None:
        low, high = (render.milliseconds(value) for value in outcome.interval_ms)
        facts.append(("time", f"between {low} and {high}, by {outcome.repeats} samples"))
    if outcome.peak_bytes is not None:
        facts.append(("memory", render.memory(outcome.peak_bytes)))
    if validation is not None and validation.max_rel_error is not None:
        held = f", tolerance {validation.tolerance:.1e}" if validation.tolerance is not None else ""
        facts.append(("validated", f"relative error {validation.max_rel_error:.1e}{held}"))
    if result.needed_bytes:
        few, many = (render.memory(of) for of in (min(result.needed_bytes), max(result.needed_bytes)))
        facts.append(("hbm_oom", f"{len(result.needed_bytes)} configs, which need {few} to {many}"))
    for record in result.rejected:
        facts.append((record.status.value, f"{format_config(record.config)} was faster and is not used"))
    kept = " (one as good or better was there and stays)" if result.kept else ""
    facts.append(("preset", f"{result.preset}{kept}"))
    return facts


def _parts(outcome: Outcome) -> list[tuple[str, float | None]]:
    return [
        ("compute", outcome.compute_ms),
        ("memory", outcome.memory_ms),
        ("waiting for collectives", outcome.collective_ms),
    ]


def _time(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not reached"
    return render.milliseconds(outcome.time_ms) if outcome.ok else outcome.status.value


def _share(outcome: Outcome | None, roofline_ms: float | None) -> str:
    if outcome is None or not outcome.time_ms or roofline_ms is None:
        return ""
    return render.percent(roofline_ms / outcome.time_ms)
