"""The tables of a report, as pandas frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from autotune import render
from autotune.chips import CHIPS
from autotune.outcome import Status
from autotune.presets import Preset
from autotune.search import TrialRecord, counts, fastest_first
from autotune.space import format_config

TOP = 10


def presets_frame(presets: Sequence[Preset]) -> pd.DataFrame:
    """One row a preset, best known device first, everything in it: what the CSV holds. Times in milliseconds."""
    return pd.DataFrame([_row(preset) for preset in presets])


def status_frame(records: Sequence[TrialRecord]) -> pd.DataFrame:
    """Trials by status."""
    found = counts(records)
    return pd.DataFrame({"status": list(found), "trials": list(found.values())})


def top_frame(records: Sequence[TrialRecord]) -> pd.DataFrame:
    """The fastest configs that nothing speaks against; "validated" says which were."""
    return pd.DataFrame(
        [
            {
                "trial": record.number,
                "config": format_config(record.config),
                "time_ms": record.outcome.time_ms,
                **({"predicted_ms": record.outcome.predicted_ms} if record.outcome.measured else {}),
                "bound": record.outcome.bound,
                "validated": "yes" if record.validation else "not tested",
            }
            for record in fastest_first(records)[:TOP]
        ]
    )


def progress_frame(records: Sequence[TrialRecord]) -> pd.DataFrame:
    """Each trial that was faster than all before it."""
    rows: list[dict[str, Any]] = []
    for record in sorted(records, key=lambda record: record.number):
        time_ms = record.outcome.time_ms
        usable = time_ms is not None and record.status is Status.OK
        if usable and (not rows or time_ms < rows[-1]["best_ms"]):
            rows.append({"trial": record.number, "best_ms": time_ms})
    return pd.DataFrame(rows)


def memory_frame(records: Sequence[TrialRecord]) -> pd.DataFrame:
    """The front of time against memory: each takes less of it than every faster one. Empty where none is known."""
    rows: list[dict[str, Any]] = []
    least: int | None = None
    for record in fastest_first(records):
        taken = record.outcome.peak_bytes
        if taken is not None and (least is None or taken < least):
            least = taken
            rows.append(
                {
                    "trial": record.number,
                    "time_ms": record.outcome.time_ms,
                    "memory": render.memory(taken),
                    "config": format_config(record.config),
                }
            )
    return pd.DataFrame(rows)


def refused_frame(records: Sequence[TrialRecord]) -> pd.DataFrame:
    """Configs that the device's memory cannot hold, the nearest first: what they need, where the compiler says so."""
    refused = [r for r in records if r.outcome.status is Status.HBM_OOM and r.outcome.over_bytes is not None]
    return pd.DataFrame(
        [
            {
                "trial": record.number,
                "needs": render.memory(record.outcome.peak_bytes or 0),
                "too much by": render.memory(record.outcome.over_bytes or 0),
                "config": format_config(record.config),
            }
            for record in sorted(refused, key=lambda record: record.outcome.over_bytes or 0)
        ]
    )


def batch_frames(presets: Sequence[Preset]) -> dict[str, pd.DataFrame]:
    """Where problems differ in their batch alone, what each batch takes and one example of it; by what they share."""
    groups: dict[str, list[Preset]] = {}
    for preset in presets:
        if "batch" in preset.problem:
            shared = {name: value for name, value in preset.problem.items() if name != "batch"}
            groups.setdefault(f"{target_of(preset)}: {pairs(shared)}", []).append(preset)
    return {title: _by_batch(group) for title, group in groups.items() if len(group) > 1}


def _by_batch(presets: Sequence[Preset]) -> pd.DataFrame:
    rows = [
        {
            "batch": preset.problem["batch"],
            "time_ms": preset.time_ms,
            "an example_ms": preset.time_ms / preset.problem["batch"],
            "source": preset.source,
            "config": format_config(preset.config),
        }
        for preset in presets
    ]
    return pd.DataFrame(sorted(rows, key=lambda row: row["batch"]))


def _row(preset: Preset) -> dict[str, Any]:
    validation = preset.validation or {}
    return {
        "kernel": preset.kernel,
        "device_kind": preset.device_kind,
        "target": target_of(preset),
        "problem": pairs(preset.problem),
        "config": format_config(preset.config),
        "time_ms": preset.time_ms,
        **_ends("time", preset.interval_ms, "_ms"),
        "timer": preset.timer,
        "source": preset.source,
        "method": preset.method,
        "default_ms": preset.baselines.get("default", {}).get("time_ms"),
        "xla_ms": preset.baselines.get("xla", {}).get("time_ms"),
        "speedup_default": preset.speedup("default"),
        "speedup_xla": preset.speedup("xla"),
        **_ends("speedup_default", preset.baselines.get("default", {}).get("speedup_interval")),
        **_ends("speedup_xla", preset.baselines.get("xla", {}).get("speedup_interval")),
        "bound": preset.bound,
        "compute_ms": preset.compute_ms,
        "memory_ms": preset.memory_ms,
        "roofline_ms": preset.roofline_ms,
        "roofline_share": preset.roofline_ms / preset.time_ms if preset.roofline_ms else None,
        "max_rel_error": validation.get("max_rel_error"),
        "max_element_error": validation.get("max_element_error"),
        "tolerance": validation.get("tolerance"),
        "engine": preset.engine,
        **{name: preset.versions.get(name) for name in ("jax", "jaxlib", "libtpu")},
        "kernel_version": preset.versions.get("kernel"),
        "date": preset.date,
        "study": preset.study,
    }


def _ends(name: str, interval: Sequence[float] | None, unit: str = "") -> dict[str, float | None]:
    """The two columns of an interval, empty for a prediction."""
    low, high = interval if interval is not None else (None, None)
    return {f"{name}_low{unit}": low, f"{name}_high{unit}": high}


def target_of(preset: Preset) -> str:
    """``v5e`` for ``TPU v5 lite``; the device kind itself where it is none of ours."""
    return next((c.name for c in CHIPS.values() if c.device_kind == preset.device_kind), preset.device_kind)


def pairs(fields: Mapping[str, Any]) -> str:
    """``m=4096,causal=true``: the fields as the command line takes them."""
    return ",".join(f"{n}={str(v).lower() if isinstance(v, bool) or v is None else v}" for n, v in fields.items())
