"""Tuned presets: kept by the tuner, looked up by training code.

Example:
    >>> from autotune import presets
    >>> presets.lookup("matmul", {"m": 4096, "n": 4096, "k": 4096, "dtype": "bfloat16"}, device_kind="TPU v5 lite")
"""

from autotune.presets.entry import MEASURED, PREDICTED, Preset
from autotune.presets.resolve import Match, PresetWarning, find, lookup, problem_of, tune_command, usable_config
from autotune.presets.sources import search_path, using
from autotune.presets.store import files, preset_path, read, save

__all__ = [
    "MEASURED",
    "PREDICTED",
    "Match",
    "Preset",
    "PresetWarning",
    "files",
    "find",
    "lookup",
    "preset_path",
    "problem_of",
    "read",
    "save",
    "search_path",
    "tune_command",
    "usable_config",
    "using",
]
