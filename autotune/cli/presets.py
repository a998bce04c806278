"""``autotune presets list|show|check|confirm``: what a lookup would find, and whether it holds on a device."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune import presets, render
from autotune.chips import get_chip
from autotune.cli.common import kernel_code, load_kernel, print_json, problem_label
from autotune.errors import AutotuneError, UsageError
from autotune.kernel import kernel_names
from autotune.presets import Preset
from autotune.space import format_config


@dataclasses.dataclass(frozen=True)
class Finding:
    """One preset that a lookup would not use as it stands, and why."""

    file: Path
    problem: str
    reason: str


def run(arguments: argparse.Namespace) -> int:
    if arguments.kernel is not None and arguments.kernel not in kernel_names():
        load_kernel(arguments.kernel)  # Says which there are.
    if arguments.action == "confirm":
        from autotune.cli import confirm

        return confirm.run(arguments)
    found = list(_presets(arguments))
    if arguments.action == "check":
        return _check(found, arguments.json)
    if arguments.json:
        print_json([{"file": str(path), **preset.to_dict()} for path, preset in found])
    elif arguments.action == "list":
        _list(found)
    else:
        for path, preset in found:
            print(f"{path}\n{json.dumps(preset.to_dict(), indent=1, ensure_ascii=False)}")
    return 0


def _presets(arguments: argparse.Namespace) -> Iterator[tuple[Path, Preset]]:
    if arguments.results is None:
        places = presets.search_path()
    elif _is_folder(folder := arguments.results / "presets"):
        places = [folder]
    else:
        raise UsageError(f"--results {arguments.results}: it has no folder presets")
    for place in places:
        for path in [place] if place.is_file() else presets.files(place):
            for preset in presets.read(path):
                if arguments.kernel in (None, preset.kernel):
                    yield path, preset


def _is_folder(folder: Path) -> bool:
    try:
        is_folder = folder.is_dir()
    except OSError as error:
        raise UsageError(f"--results {folder.parent}: {error.strerror}") from None
    if is_folder and not os.access(folder, os.R_OK | os.X_OK):
        raise UsageError(f"--results {folder.parent}: {folder} cannot be read")
    return is_folder


def _list(found: list[tuple[Path, Preset]]) -> None:
    out = render.console()
    if not found:
        out.print("No presets yet: `python -m autotune KERNEL` makes one.")
        return
    groups: dict[tuple[str, str], list[Preset]] = {}
    for _, preset in found:
        groups.setdefault((preset.device_kind, preset.source), []).append(preset)
    for (device_kind, source), group in groups.items():
        out.print(f"{device_kind}, {source}", soft_wrap=True)
        table = render.table("kernel", "problem", "time", "over default", left=2)
        for preset in group:
            problem = problem_label(preset.kernel, preset.problem)
            speedup = render.times(preset.speedup("default"))
            table.add_row(preset.kernel, problem, render.milliseconds(preset.time_ms), speedup)
        out.print(table)


def _check(found: list[tuple[Path, Preset]], as_json: bool) -> int:
    """Whether each preset would be used for its own problem. Nothing is compiled."""
    findings = [Finding(path, str(dict(p.problem)), reason) for path, p in found if (reason := _unusable(p))]
    if as_json:
        document: Any = {
            "checked": len(found),
            "problems": [{"file": str(f.file), "problem": f.problem, "reason": f.reason} for f in findings],
        }
        print_json(document)
    else:
        for finding in findings:
            print(f"{finding.file}: {finding.problem}: {finding.reason}")
        print(f"{len(found)} presets read, {len(findings)} that a lookup would not use; nothing was compiled")
    return 1 if findings else 0


def _unusable(preset: Preset) -> str | None:
    try:
        kernel, chip = load_kernel(preset.kernel), get_chip(preset.device_kind)
        problem = kernel.problem_type.from_dict(preset.problem)
        space = kernel.space(problem, chip)
        config = space.parse(preset.config)
        with kernel_code(kernel.name):
            version = kernel.version
    except AutotuneError as error:
        return str(error)
    if reason := space.why_invalid(config):
        return f"{format_config(config)}: {reason}"
    if not preset.validated:
        return "it was never validated"
    if preset.versions.get("kernel") != version:
        return f"it is of another version of the kernel; renew it: {presets.tune_command(kernel, problem, chip)}"
    return None
