"""Kernels of one's own, made tunable where they are defined: see `tunable`."""

from __future__ import annotations

from autotune.own.decorator import Tunable, tunable

__all__ = ["Tunable", "tunable"]
