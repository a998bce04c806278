"""Writes what a run found as a preset."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import Any

from autotune import presets, versions
from autotune.engines._base import Task
from autotune.noise import Spread
from autotune.outcome import Outcome
from autotune.presets import Preset
from autotune.tuner.result import TuneResult, baseline_figures


def preset_file(task: Task, results: Path) -> Path:
    """Where the preset of `task` is kept."""
    return presets.preset_path(results / "presets", task.chip.device_kind, task.kernel.name)


def keep(result: TuneResult, results: Path) -> TuneResult:
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


def _interval_figures(ratio: Spread | None) -> dict[str, Any]:
    """What a preset keeps of how surely it beats a baseline."""
    return {} if ratio is None else {"speedup": ratio.value, "speedup_interval": [ratio.low, ratio.high]}
