"""Which config a problem gets: exact preset, nearest valid one, or the kernel's heuristic."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping
from typing import Any

from autotune import versions
from autotune.chips import Chip, get_chip
from autotune.errors import UsageError
from autotune.kernel import Kernel, get_kernel
from autotune.presets import sources
from autotune.presets.entry import Preset
from autotune.problem import Problem, field_kinds
from autotune.space import Space

VMEM_LIMIT = "vmem_limit_mib"  # as every kernel that has one calls it


class PresetWarning(UserWarning):
    """A problem has no preset of its own, or one of another version of its kernel."""


@dataclasses.dataclass(frozen=True)
class Match:
    """A config and where it came from.

    Attributes:
        config: What to run with.
        how: "pinned" (by `using`), "exact", "nearest" or "heuristic".
        preset: The preset it was taken from, where it was.
    """

    config: dict[str, Any]
    how: str
    preset: Preset | None = None


def lookup(kernel: str | Kernel, problem: Problem | Mapping[str, Any], *, device_kind: str) -> dict[str, Any]:
    """The config to run `problem` with; warns once per problem unless it has a preset of its own.

    Args:
        kernel: A registered kernel's name, or the kernel.
        problem: The kernel's problem, or its fields.
        device_kind: What `jax.Device.device_kind` says, or a target's name.

    Raises:
        UsageError: An unknown kernel, field or device kind, or a problem without any valid config.
        ResultsError: A preset file cannot be read.

    Example:
        >>> lookup("matmul", {"m": 4096, "n": 4096, "k": 4096, "dtype": "bfloat16"}, device_kind="TPU v6 lite")
    """
    kernel = get_kernel(kernel) if isinstance(kernel, str) else kernel
    problem = problem if isinstance(problem, Problem) else kernel.problem_type.from_dict(problem)
    match = find(kernel, problem, get_chip(device_kind))
    if notice := _notice(kernel, problem, get_chip(device_kind), match):
        _warn_once(notice)
    return dict(match.config)


def find(kernel: Kernel, problem: Problem, chip: Chip) -> Match:
    """Like `lookup`, without a warning and with where the config came from."""
    if (config := sources.pinned(kernel.name)) is not None:
        return Match(kernel.space(problem, chip).parse(config), "pinned")
    space = kernel.space(problem, chip)
    near = []
    for priority, preset in sources.candidates(kernel.name, chip.device_kind):
        if not preset.validated:
            continue
        theirs = problem_of(kernel, preset)
        if theirs is not None and math.isfinite(apart := distance(problem, theirs)):
            near.append((apart, [-rank for rank in priority], preset))
    for apart, _, preset in sorted(near, key=lambda entry: entry[:2]):
        if config := usable_config(space, preset):
            return Match(_roomy(space, config) if apart else config, "nearest" if apart else "exact", preset)
    return Match(dict(heuristic(kernel, problem, chip.name)), "heuristic")


def _roomy(space: Space, config: dict[str, Any]) -> dict[str, Any]:
    """`config` under the highest limit of VMEM: under its own it was compiled for another problem only."""
    if VMEM_LIMIT not in space.params:
        return config
    roomy = {**config, VMEM_LIMIT: max(space.params[VMEM_LIMIT].candidates)}
    return roomy if space.why_invalid(roomy) is None else config


def distance(problem: Problem, other: Problem) -> float:
    """How far apart two problems are: |log2| of their numbers' ratios, summed; infinite where another field differs.

    An option that one of them has and the other has not (a soft cap, a window) is no matter of degree.
    """
    total = 0.0
    for name, (kind, _) in field_kinds(type(problem)).items():
        ours, theirs = getattr(problem, name), getattr(other, name)
        if ours == theirs:
            continue
        if kind not in (int, float) or not ours or not theirs or ours * theirs < 0:
            return math.inf
        total += abs(math.log2(ours / theirs))
    return total


@functools.lru_cache(maxsize=1024)
def heuristic(kernel: Kernel, problem: Problem, target: str) -> Mapping[str, Any]:
    """The kernel's own config for want of a preset."""
    return kernel.heuristic(problem, get_chip(target))


def tune_command(kernel: Kernel, problem: Problem, chip: Chip) -> str:
    """The command line that would tune `problem`."""
    where = f"--target {chip.name}" if chip.known else "--engine device"  # Elsewhere nothing is predicted.
    return f"python -m autotune {kernel.name} {where} --problem {problem}"


def _notice(kernel: Kernel, problem: Problem, chip: Chip, match: Match) -> str:
    miss, command = f"{kernel.name}: no preset for {problem} on {chip.name}", tune_command(kernel, problem, chip)
    if match.how == "nearest" and match.preset is not None:
        return f"{miss}, took the one for {problem_of(kernel, match.preset)}; tune it: {command}"
    if match.how == "heuristic":
        return f"{miss}, took an untuned config; tune it: {command}"
    if match.preset is not None and match.preset.versions.get("kernel") != kernel.version:
        return f"{kernel.name}: the preset for {problem} on {chip.name} is of an older kernel; renew it: {command}"
    machine = match.preset.versions.get("machine") if match.preset is not None else None
    if machine not in (None, versions.machine()):
        return (
            f"{kernel.name}: the preset for {problem} was measured on another machine, {machine}; renew it: {command}"
        )
    return ""


@functools.lru_cache(maxsize=4096)
def _warn_once(notice: str) -> None:
    warnings.warn(notice, PresetWarning, stacklevel=3)


def problem_of(kernel: Kernel, preset: Preset) -> Problem | None:
    """The preset's problem; None where the kernel has no such problem any more."""
    try:
        return kernel.problem_type.from_dict(preset.problem)
    except UsageError:
        return None


def usable_config(space: Space, preset: Preset) -> dict[str, Any] | None:
    """The preset's config where it is valid in `space`."""
    try:
        config = space.parse(preset.config)
    except UsageError:
        return None
    return config if space.why_invalid(config) is None else None
