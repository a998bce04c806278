"""From a task to a preset: `tune` searches, chooses and keeps."""

from __future__ import annotations

from autotune.tuner.choice import REFUSALS_IN_A_ROW
from autotune.tuner.keep import preset_file
from autotune.tuner.observer import Observer
from autotune.tuner.result import REFERENCE, TuneResult, baseline_figures
from autotune.tuner.run import check, tune

__all__ = [
    "REFERENCE",
    "REFUSALS_IN_A_ROW",
    "Observer",
    "TuneResult",
    "baseline_figures",
    "check",
    "preset_file",
    "tune",
]
