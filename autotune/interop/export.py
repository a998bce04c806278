"""Presets in other tuners' formats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from autotune import files
from autotune.chips import slug
from autotune.errors import AutotuneError
from autotune.interop import tokamax
from autotune.kernel import get_kernel
from autotune.presets import Preset

FORMATS = ("tokamax", "t4")


def export(found: Sequence[tuple[Path, Preset]], to: str, folder: Path) -> tuple[list[Path], list[str]]:
    """Writes the presets of these files in one of `FORMATS`.

    tokamax: ``DEVICE/OP.json``, as its caches are; of each instance the config and its time, whose metadata say
    whether it was predicted or measured. t4: ``KERNEL-DEVICE-NUMBER.json`` a preset, with every trial of the study
    that it came from where that is in the same results folder.

    Args:
        found: Presets with their files.
        folder: Is made where it is not there; files of the same name are replaced.

    Returns:
        The files, and a line for each preset that the format cannot say.
    """
    documents, left_out = _as_caches(found) if to == "tokamax" else _as_t4(found)
    written = []
    for name, document in documents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, json.dumps(document, indent=1) + "\n")
        written.append(path)
    return written, left_out


def _as_caches(found: Iterable[tuple[Path, Preset]]) -> tuple[dict[str, Any], list[str]]:
    caches: dict[str, dict[str, Any]] = {}
    left_out = []
    for _, preset in found:
        op, keys = _entry(preset)
        if op is None or keys is None:
            left_out.append(f"{preset.kernel} {_problem(preset)}: tokamax has no such operation or config")
            continue
        name = f"{preset.device_kind.lower().replace(' ', '_')}/{tokamax.FILES[op]}.json"
        benchmark = {
            "compile_time_ms": 0.0,
            "lower_time_ms": 0.0,
            "evaluation_times_ms": [preset.time_ms],
            "metadata": {
                "times": preset.source,
                "method": preset.method,
                "tuned": preset.kernel,
                "date": preset.date,
                "versions": dict(preset.versions),
            },
        }
        caches.setdefault(name, {})[keys[0]] = {keys[1]: benchmark}
    return caches, left_out


def _entry(preset: Preset) -> tuple[str | None, tuple[str, str] | None]:
    """The operation there, and its keys; the first of the kernel's relatives whose blocks say the whole config."""
    try:
        kernel = get_kernel(preset.kernel)
    except AutotuneError:
        return None, None
    for op, names in kernel.relatives.items():
        blocks = {theirs: preset.config.get(ours) for ours, theirs in names.items() if isinstance(theirs, str)}
        given = {ours: value for ours, value in names.items() if not isinstance(value, str)}
        if set(preset.config) - set(names) or any(preset.config.get(ours) != value for ours, value in given.items()):
            continue  # It has more to say, or is another kernel there.
        if op in tokamax.FILES:
            return op, tokamax.cache_entry(op, preset.problem, blocks)
    return None, None


def _as_t4(found: Iterable[tuple[Path, Preset]]) -> tuple[dict[str, Any], list[str]]:
    from autotune.interop import t4
    from autotune.search.study import load_records

    documents: dict[str, Any] = {}
    for number, (path, preset) in enumerate(found):
        results = path.parent.parent.parent  # of DIR/presets/DEVICE/KERNEL.json
        records = load_records(results, preset.study) if preset.study else None
        name = f"{preset.kernel.replace(':', '-').replace('/', '-')}-{slug(preset.device_kind)}-{number}.json"
        documents[name] = t4.document(preset, records or [])
    return documents, []


def _problem(preset: Preset) -> str:
    return ",".join(f"{name}={value}" for name, value in preset.problem.items() if value is not None)
