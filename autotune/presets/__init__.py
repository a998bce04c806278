"""Tuned presets: kept by the tuner, looked up by training code.

Example:
    >>> from autotune import presets
    >>> presets.lookup("matmul", {"m": 4096, "n": 4096, "k": 4096, "dtype": "bfloat16"}, device_kind="TPU v5 lite")
"""

from autotune.presets.entry import MEASURED, PREDICTED, Preset
from autotune.presets.explain import Explanation, explain
from autotune.presets.hosts import check_hosts, digest
from autotune.presets.index import distance, problem_of
from autotune.presets.notice import PresetWarning
from autotune.presets.policy import on_miss, policy
from autotune.presets.resolve import Match, find, lookup, tune_command, usable_config
from autotune.presets.sources import search_path, using
from autotune.presets.store import files, preset_path, read, save

__all__ = [
    "MEASURED",
    "PREDICTED",
    "Explanation",
    "Match",
    "Preset",
    "PresetWarning",
    "check_hosts",
    "digest",
    "distance",
    "explain",
    "files",
    "find",
    "lookup",
    "on_miss",
    "policy",
    "preset_path",
    "problem_of",
    "read",
    "save",
    "search_path",
    "tune_command",
    "usable_config",
    "using",
]
