"""Configs of the stock kernels from presets."""

from __future__ import annotations

from autotune import presets
from autotune.chips import CHIPS
from autotune.errors import one_of
from autotune.outcome import Config
from autotune.problem import Problem
from kernels import requests
from kernels._dispatch import attached_chip


def found(kernel: str, problem: Problem, device_kind: str | None) -> Config:
    """The preset's config for `problem` on that chip, or on the one attached; the heuristic where there is none."""
    requests.note(kernel, problem)
    if device_kind is None and (chip := attached_chip()) is not None:
        device_kind = chip.device_kind
    if device_kind is None:
        raise ValueError(
            f"no TPU is attached, so say for which one the blocks are to be: device_kind='v6e', or {one_of(CHIPS)}"
        )
    return presets.lookup(kernel, problem, device_kind=device_kind)
