"""``autotune presets list|show|check|confirm|export``: what a lookup would find, and whether it still holds."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from autotune import files, presets, render
from autotune.chips import get_chip
from autotune.cli.common import load_kernel, print_json, problem_label
from autotune.errors import AutotuneError, ResultsError, UsageError, one_of
from autotune.kernel import kernel_names
from autotune.presets import Preset


def run(arguments: argparse.Namespace) -> int:
    if arguments.kernel is not None and arguments.kernel not in kernel_names():
        load_kernel(arguments.kernel)  # Says which there are.
    if arguments.action == "confirm":
        from autotune.cli import confirm

        return confirm.run(arguments)
    broken: list[ResultsError] = []
    found = list(_presets(arguments, broken))
    if arguments.action == "check":
        from autotune.cli import check

        return check.run(found, broken, arguments)
    if arguments.action == "export":
        return _export(found, broken, arguments)
    if arguments.json:
        print_json([{"file": str(path), **preset.to_dict()} for path, preset in found])
    elif arguments.action == "list":
        _list(found)
    else:
        for path, preset in found:
            print(f"{path}\n{json.dumps(preset.to_dict(), indent=1, ensure_ascii=False)}")
            for name, text in _terms(preset).items():
                print(f"{name}: {text}")
    if broken:  # The others are shown all the same.
        raise ResultsError("; ".join(map(str, broken)))
    return 0


def _presets(arguments: argparse.Namespace, broken: list[ResultsError]) -> Iterator[tuple[Path, Preset]]:
    """Each with its file; what files cannot be read is added to `broken`."""
    wanted = get_chip(arguments.target).device_kind if arguments.target else None
    if arguments.results is None:
        places = presets.search_path()
    elif _is_folder(folder := arguments.results / "presets"):
        places = [folder]
    else:
        raise UsageError(f"--results {arguments.results}: it has no folder presets")
    for place in places:
        for path in [place] if place.is_file() else presets.files(place):
            try:
                read = presets.read(path)
            except ResultsError as error:
                broken.append(error)
                continue
            for preset in read:
                if arguments.kernel in (None, preset.kernel) and wanted in (None, preset.device_kind):
                    yield path, preset


def _terms(preset: Preset) -> dict[str, str]:
    """The config as others write it; none of a kernel that is not installed, or of an older version's config."""
    try:
        kernel = load_kernel(preset.kernel)
        problem = kernel.problem_type.from_dict(preset.problem)
        config = kernel.space(problem, get_chip(preset.device_kind)).parse(preset.config)
    except AutotuneError:
        return {}
    return dict(kernel.terms(problem, config))


def _export(found: list[tuple[Path, Preset]], broken: list[ResultsError], arguments: argparse.Namespace) -> int:
    from autotune.interop import FORMATS, export

    if arguments.to is None:
        raise UsageError(f"presets export: say which format with --to {one_of(FORMATS)}")
    files.check_writable(arguments.out, f"--out {arguments.out}")
    written, left_out = export(found, arguments.to, arguments.out)
    if arguments.json:
        print_json({"files": [str(path) for path in written], "left_out": left_out})
    else:
        out = render.console()
        for path in written:
            out.print(str(path), soft_wrap=True)
        kinds = Counter(line.partition(": ")[2] for line in left_out)
        for why, count in kinds.items():
            out.print(f"{count} of {len(found)} presets left out: {why}", soft_wrap=True)
    if broken:
        raise ResultsError("; ".join(map(str, broken)))
    return 0 if written else 1


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
