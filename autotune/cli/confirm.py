"""``autotune presets confirm``: predicted presets measured against their runner-ups on the attached device."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
from pathlib import Path

from autotune import engines, presets, render, versions
from autotune.chips import Chip
from autotune.cli.common import load_kernel, print_json, problem_label
from autotune.engines._base import Task
from autotune.errors import UsageError
from autotune.outcome import Config
from autotune.presets import Preset
from autotune.search import SearchSettings, StopReason, fastest_first
from autotune.search.study import load_records
from autotune.tuner import TuneResult, check, tune
from autotune.tuner.finals import FINALISTS


def run(arguments: argparse.Namespace) -> int:
    results = arguments.results or SearchSettings.results
    _, chip = engines.choose("device", None)
    found = _predicted(results, chip, arguments.kernel)
    if not found:
        raise UsageError(f"{results} has no predicted presets for {chip.device_kind}, the attached device")
    confirmed: list[tuple[Preset, TuneResult]] = []
    for preset in found:
        try:
            confirmed.append((preset, _confirm(preset, chip, results, arguments)))
        except UsageError as error:  # Of an older kernel, say: the others can be confirmed all the same.
            render.console(stderr=True).print(f"{preset.kernel} {dict(preset.problem)}: {error}", soft_wrap=True)
            continue
        if confirmed[-1][1].stopped_because is StopReason.INTERRUPTED:
            break
    if arguments.json:
        print_json([result.to_dict() | {"predicted_ms": preset.time_ms} for preset, result in confirmed])
    else:
        _show(confirmed, chip)
    return 0 if len(confirmed) == len(found) and all(result.best is not None for _, result in confirmed) else 1


def _predicted(results: Path, chip: Chip, kernel: str | None) -> list[Preset]:
    return [
        preset
        for path in presets.files(results / "presets")
        for preset in presets.read(path)
        if preset.device_kind == chip.device_kind and not preset.measured and kernel in (None, preset.kernel)
    ]


def _confirm(preset: Preset, chip: Chip, results: Path, arguments: argparse.Namespace) -> TuneResult:
    """A short run on the device that begins with the preset and what was predicted next to it."""
    from autotune.cli.progress import make_progress

    kernel = load_kernel(preset.kernel)
    task = Task(kernel, kernel.problem_type.from_dict(preset.problem), chip)
    begin = _runner_ups(preset, results)
    trials = len(kernel.baselines(task.problem, chip)) + len(begin)
    settings = SearchSettings(trials=trials, results=results, study=_study(task, begin))
    check(task, settings)
    console = render.console(stderr=True)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(engines.open_engine("device", task, jobs=1, timeout_s=arguments.timeout))
        progress = stack.enter_context(make_progress(console, [f"{kernel.name} {task.problem} on {chip.name}"]))
        return tune(task, engine, settings, progress, start=begin)


def _study(task: Task, begin: list[Config]) -> str:
    """One of its own: a study of the same problem may have its trials already, and others."""
    parts = (task.kernel.version, str(task.problem), task.chip.name, begin, versions.deciding(task.chip.platform))
    return f"confirm-{task.kernel.name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:8]}"


def _runner_ups(preset: Preset, results: Path) -> list[Config]:
    """The preset's config, and the next ones of its study where that is in the results folder."""
    records = load_records(results, preset.study) if preset.study else None
    others = [record.config for record in fastest_first(records or []) if record.config != preset.config]
    return [preset.config, *others[: FINALISTS - 1]]


def _show(confirmed: list[tuple[Preset, TuneResult]], chip: Chip) -> None:
    out = render.console()
    table = render.table("kernel", "problem", "predicted", "measured", "over default", left=2)
    for preset, result in confirmed:
        best = result.best
        measured = render.milliseconds(best.outcome.time_ms) if best is not None else "not confirmed"
        gain = "no gain" if result.gain is False else render.times(result.speedup("default"))
        problem = problem_label(preset.kernel, preset.problem)
        table.add_row(preset.kernel, problem, render.milliseconds(preset.time_ms), measured, gain)
    out.print(table)
    held = sum(result.best is not None for _, result in confirmed)
    out.print(f"Measured on {chip.device_kind}; {held} of {len(confirmed)} presets now hold what was measured.")
