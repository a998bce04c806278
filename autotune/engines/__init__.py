"""Engines give each config an `Outcome`: by compiling it for a target, or on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.chips import CHIPS, DEFAULT_TARGET, Chip, get_chip
from autotune.engines._base import Engine, Race, Task
from autotune.errors import UnavailableError, UsageError, one_of

if TYPE_CHECKING:
    from autotune.engines.device.pod import Pod

__all__ = ["Engine", "Race", "Task", "check_platform", "choose", "open_engine"]

NAMES = ("auto", "compiler", "device")


def choose(name: str, target: str | None, pod: Pod | None = None) -> tuple[str, Chip]:
    """Which engine `name` means on this machine, and which chip it works for.

    Args:
        name: "compiler", "device", or "auto": the device where a TPU is attached and `target` is no other.
        target: As ``--target``; None for the attached device, or the default without one.
        pod: All processes that measure together; None for this one alone.

    Raises:
        UsageError: No engine has that name, or the engine does not work for that target.
        UnavailableError: The device cannot be opened.
    """
    if name not in NAMES:
        raise UsageError(f"unknown engine {name!r}: use auto, compiler or device")
    wanted = get_chip(target) if target is not None else None
    if name != "compiler":
        from autotune.engines.device import hardware

        if name == "device" or hardware.tpu_chips():
            attached = None
            try:
                attached = (hardware.attached() if pod is None else pod.attached()).chip
            except UnavailableError:  # What is not the device's own chip can be predicted for all the same.
                if name == "device" or wanted is None:
                    raise
            if attached is not None and wanted in (None, attached):
                return "device", attached
            if attached is not None and name == "device":
                raise UsageError(
                    f"--target {target}: the attached device is {attached.device_kind}; leave --target out to measure "
                    f"on it, or predict for {target} with --engine compiler"
                )
    chip = wanted or get_chip(DEFAULT_TARGET)
    if not chip.known:
        raise UsageError(f"--target {target}: nothing is compiled for it; use {one_of(CHIPS)}, or --engine device")
    return name, chip


def check_platform(task: Task) -> None:
    """Raises UsageError unless the task's kernel runs on its chip."""
    kernel, platform = task.kernel, task.chip.platform
    if platform not in kernel.platforms:
        right = "predict it for a TPU with --engine compiler" if "tpu" in kernel.platforms else "use such a machine"
        raise UsageError(f"{kernel.name} runs on {one_of(kernel.platforms)}, not on a {platform}: {right}")


def open_engine(name: str, task: Task, *, jobs: int, timeout_s: float | None, pod: Pod | None = None) -> Engine:
    """Starts the engine called `name`; close it, or use it in a ``with`` block.

    Args:
        name: "compiler", "device", or "auto" for what this machine has.
        task: What to work on.
        jobs: Evaluations in flight at once.
        timeout_s: Limit for each evaluation, in seconds; None for the kernel's own.
        pod: All processes that the device engine measures with; None for this one alone.

    Raises:
        UnavailableError: Where there is no such engine on this machine.
    """
    if name not in NAMES:
        raise UsageError(f"unknown engine {name!r}: use auto, compiler or device")
    check_platform(task)
    timeout_s = task.kernel.timeout_s if timeout_s is None else timeout_s
    if name == "device":
        from autotune.engines.device.engine import open_device_engine

        return open_device_engine(task, jobs=jobs, timeout_s=timeout_s, pod=pod)
    from autotune.engines.compiler.engine import open_compiler_engine

    return open_compiler_engine(task, jobs=jobs, timeout_s=timeout_s, or_analytic=name == "auto")
