"""Warnings to whoever looks presets up: each once, and at the line of theirs that asked."""

from __future__ import annotations

import functools
import sys
import warnings

# Whose lines a warning does not point at: it is for who called them.
_BETWEEN = {"autotune", "kernels", "search_spaces", "jax", "jaxlib", "flax", "contextlib", "functools"}


class PresetWarning(UserWarning):
    """A problem has no preset of its own, or one of another version of its kernel, or presets are not where said."""


@functools.lru_cache(maxsize=4096)
def warn_once(notice: str) -> None:
    """Warns of `notice`, once a process."""
    warnings.warn(notice, PresetWarning, stacklevel=2 + _frames_of_ours())


def _frames_of_ours() -> int:
    """How many frames above `warn_once` are this project's or its tracer's: the next one is the user's."""
    frame, count = sys._getframe(2), 0
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _BETWEEN:
            return count
        frame, count = frame.f_back, count + 1  # type: ignore[assignment]
    return 1
