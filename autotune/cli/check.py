"""``autotune presets check``: whether each preset is reached by a lookup, still compiles, and still pays."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune import engines, presets, render
from autotune.chips import get_chip
from autotune.cli.common import kernel_code, load_kernel, print_json, reserved_stdout
from autotune.engines._base import Engine, Task
from autotune.engines.compiler.support import why_unsupported
from autotune.errors import AutotuneError, ResultsError
from autotune.outcome import Outcome
from autotune.presets import Preset
from autotune.space import format_config

SLOWER = 1.02  # than the heuristic: less is no difference that a prediction can tell


@dataclasses.dataclass(frozen=True)
class Finding:
    """One preset, or file, with which something is wrong."""

    file: Path
    problem: str
    reason: str


def run(found: Sequence[tuple[Path, Preset]], broken: Sequence[ResultsError], arguments: argparse.Namespace) -> int:
    """Checks the presets; exit code 1 where something is wrong with any.

    Args:
        found: Each with its file.
        broken: What files could not be read.
        arguments: As parsed.
    """
    findings = [Finding(Path(), "", str(error)) for error in broken]
    usable: list[tuple[Path, Preset]] = []
    for path, preset in found:
        if reason := _unusable(preset, in_path=arguments.results is None):
            findings.append(Finding(path, _named(preset), reason))
        else:
            usable.append((path, preset))
    compiled = 0
    reason = "--quick" if arguments.quick else why_unsupported()
    if reason is None:
        with reserved_stdout(arguments.json):
            compiled, slow = _compile_all(usable, arguments)
        findings += slow
    checked = {"checked": len(found), "compiled": compiled}
    if arguments.json:
        problems = [{"file": str(f.file), "problem": f.problem, "reason": f.reason} for f in findings]
        print_json({**checked, "problems": problems})
        return 1 if findings else 0
    for finding in findings:
        print(f"{finding.file}: {finding.problem}: {finding.reason}" if finding.problem else finding.reason)
    without = "" if reason is None else f" ({reason})"
    print(f"{len(found)} presets read, {compiled} compiled{without}; something is wrong with {len(findings)}")
    return 1 if findings else 0


def _named(preset: Preset) -> str:
    return f"{preset.kernel} {dict(preset.problem)}"


def _task(preset: Preset) -> Task:
    kernel = load_kernel(preset.kernel)
    return Task(kernel, kernel.problem_type.from_dict(preset.problem), get_chip(preset.device_kind))


def _unusable(preset: Preset, *, in_path: bool) -> str | None:
    """Why a lookup would not take the preset for its own problem as it stands."""
    try:
        task = _task(preset)
        space = task.kernel.space(task.problem, task.chip)
        config = space.parse(preset.config)
        with kernel_code(task.kernel.name):
            version = task.kernel.version
        if reason := space.why_invalid(config):
            return f"{format_config(config)}: {reason}"
        if not preset.validated:
            return "it was never validated"
        if preset.versions.get("kernel") != version:
            renew = presets.tune_command(task.kernel, task.problem, task.chip)
            return f"it is of another version of the kernel; renew it: {renew}"
        if in_path and (match := presets.find(task.kernel, task.problem, task.chip)).preset != preset:
            return f"no lookup ever takes it: the one in {match.place} comes first"
    except AutotuneError as error:
        return str(error)
    return None


def _compile_all(usable: Sequence[tuple[Path, Preset]], arguments: argparse.Namespace) -> tuple[int, list[Finding]]:
    """How many were compiled, and what is wrong with some of them. Ctrl-C ends it with what is known."""
    findings: list[Finding] = []
    compiled = 0
    console = render.console(stderr=True)
    todo = [(path, preset, _task(preset)) for path, preset in usable if get_chip(preset.device_kind).known]
    try:
        for number, (path, preset, task) in enumerate(todo, start=1):
            console.print(f"{number}/{len(todo)} {task.kernel.name} {task.problem} on {task.chip.name}", soft_wrap=True)
            with engines.open_engine("compiler", task, jobs=arguments.jobs, timeout_s=arguments.timeout) as engine:
                if reason := _why_wrong(engine, preset):
                    findings.append(Finding(path, _named(preset), reason))
            compiled += 1
    except KeyboardInterrupt:
        console.print(f"interrupted after {compiled} of {len(todo)}")
    return compiled, findings


def _why_wrong(engine: Engine, preset: Preset) -> str | None:
    task = engine.task
    config = task.kernel.space(task.problem, task.chip).parse(preset.config)
    untuned = dict(task.kernel.heuristic(task.problem, task.chip))
    futures = [engine.evaluate(one) for one in ([config] if untuned == config else [config, untuned])]
    tuned, *rest = (future.result() for future in futures)
    if not tuned.ok:
        return f"it does not compile any more: {tuned.status.value}: {_line(tuned)}"
    heuristic = rest[0] if rest else tuned
    if heuristic.ok and heuristic.source is tuned.source and tuned.time_ms > SLOWER * heuristic.time_ms:
        times = f"{render.milliseconds(tuned.time_ms)} against {render.milliseconds(heuristic.time_ms)}"
        return f"the untuned config is faster now, {times}: {_renew(task)}"
    return None


def _renew(task: Task) -> str:
    return f"renew it: {presets.tune_command(task.kernel, task.problem, task.chip)}"


def _line(outcome: Outcome) -> Any:
    return " ".join(outcome.message.split())[:200]
