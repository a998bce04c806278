"""Engines give each config an `Outcome`: by compiling it for a target, or on a device."""

from __future__ import annotations

from autotune.engines._base import Engine, Task
from autotune.errors import UnavailableError, UsageError

__all__ = ["Engine", "Task", "open_engine"]

NAMES = ("auto", "compiler", "device")


def open_engine(name: str, task: Task, *, jobs: int, timeout_s: float) -> Engine:
    """Starts the engine called `name`; close it, or use it in a ``with`` block.

    Args:
        name: "compiler", "device", or "auto" for what this machine has.
        task: What to work on.
        jobs: Evaluations in flight at once.
        timeout_s: Limit for each evaluation, in seconds.

    Raises:
        UnavailableError: Where there is no such engine on this machine.
    """
    if name not in NAMES:
        raise UsageError(f"unknown engine {name!r}: use auto, compiler or device")
    if name == "device":
        raise UnavailableError("the device engine is not built yet: use --engine compiler")
    from autotune.engines.compiler.engine import open_compiler_engine

    return open_compiler_engine(task, jobs=jobs, timeout_s=timeout_s, or_analytic=name == "auto")
