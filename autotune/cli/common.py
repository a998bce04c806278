"""What several commands need: reading the task, checking folders, writing JSON."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune import engines, files
from autotune.chips import DEFAULT_TARGET, get_chip
from autotune.cli.streams import print_json, reserved_stdout
from autotune.engines._base import Task
from autotune.errors import AutotuneError, UsageError
from autotune.kernel import Kernel, get_kernel

__all__ = [
    "check_writable",
    "kernel_code",
    "load_kernel",
    "print_json",
    "problem_label",
    "read_task",
    "reserved_stdout",
]


def read_task(arguments: argparse.Namespace, pod: Any = None) -> Task:
    """The task that KERNEL, --problem, --target and --engine name; `arguments.engine` becomes what auto means here.

    Args:
        arguments: As parsed.
        pod: All processes that measure together; None for this one alone.

    Raises:
        UsageError: One of them names nothing, or they do not go together.
        UnavailableError: The device that is to be measured on cannot be opened.
    """
    kernel = load_kernel(arguments.kernel)
    problem = kernel.parse_problem(arguments.problem)
    target = target_for(kernel, problem, arguments.target)
    if not hasattr(arguments, "engine"):
        return Task(kernel, problem, get_chip(target or DEFAULT_TARGET))
    arguments.engine, chip = engines.choose(arguments.engine, target, pod)
    task = Task(kernel, problem, chip)
    engines.check_platform(task)
    return task


def target_for(kernel: Kernel, problem: Any, given: str | None) -> str | None:
    """The target that the problem names, or else the one given on the command line."""
    own = kernel.target(problem)
    if own and given and get_chip(own) != get_chip(given):
        raise UsageError(f"--target {given}: the problem is one for {own}; leave --target out, or change the problem")
    return own or given


def load_kernel(name: str) -> Kernel:
    """The kernel; raises AutotuneError where there is none, or its module cannot be imported."""
    with kernel_code(name):
        return get_kernel(name)


def problem_label(kernel_name: str, fields: Mapping[str, Any]) -> str:
    """A problem as a table shows it: its name where it has one, else its fields, with room to wrap between them."""
    try:
        kernel = load_kernel(kernel_name)
        problem = kernel.problem_type.from_dict(fields)
    except AutotuneError:  # Of another version of the kernel, or of one that is not installed.
        return ", ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
    named = next((name for name, one in kernel.problems.items() if one == problem), None)
    return named or str(problem).replace(",", ", ")


@contextlib.contextmanager
def kernel_code(name: str) -> Iterator[None]:
    """While entered, whatever importing a kernel's modules raises (jax refuses a bad setting so) becomes one line."""
    try:
        yield
    except (AutotuneError, OSError):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise AutotuneError(f"kernel {name!r} cannot be loaded: {type(error).__name__}: {lines[0]}") from error


def check_writable(folder: Path) -> None:
    """Raises UsageError unless a results folder can be written, or made; makes nothing."""
    files.check_writable(folder, f"--results {folder}")
