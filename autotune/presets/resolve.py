"""Which config a problem gets: exact preset, nearest valid one, or the kernel's heuristic."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from autotune import versions
from autotune.chips import Chip, get_chip
from autotune.errors import UsageError
from autotune.kernel import Kernel, get_kernel
from autotune.presets import sources
from autotune.presets.entry import Preset
from autotune.presets.index import Index, problem_of
from autotune.presets.notice import warn_once
from autotune.presets.policy import Policy, current_on_miss, current_policy, staleness
from autotune.problem import Problem
from autotune.space import Space, format_config

VMEM_LIMIT = "vmem_limit_mib"  # as every kernel that has one calls it


@dataclasses.dataclass(frozen=True)
class Match:
    """A config and where it came from.

    Attributes:
        config: What to run with.
        how: "pinned" (by `using`), "exact", "nearest" or "heuristic".
        preset: The preset it was taken from, where it was.
        place: The file or folder of that.
        stale: In which aspects it is of another version: see `autotune.presets.policy.staleness`.
        notice: What the user should know of it, in one line, or "".
    """

    config: dict[str, Any]
    how: str
    preset: Preset | None = None
    place: str | None = None
    stale: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notice: str = ""


def lookup(kernel: str | Kernel, problem: Problem | Mapping[str, Any], *, device_kind: str) -> dict[str, Any]:
    """The config to run `problem` with; warns once per problem unless it has a preset of its own.

    It reads files and the clock of none: no device is touched, and jax is not loaded.

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
    kernel, problem, chip = asked(kernel, problem, device_kind)
    match, on_miss = find(kernel, problem, chip), current_on_miss()
    if match.how in ("nearest", "heuristic") and on_miss.action == "tune":
        from autotune.presets.miss import tune_now

        if tune_now(kernel, problem, chip, on_miss.budget_s):
            match = find(kernel, problem, chip)
    if match.notice:
        warn_once(match.notice)
    return dict(match.config)


def asked(kernel: str | Kernel, problem: Problem | Mapping[str, Any], device_kind: str) -> tuple[Kernel, Problem, Chip]:
    """What a lookup is asked for, as objects."""
    kernel = get_kernel(kernel) if isinstance(kernel, str) else kernel
    problem = problem if isinstance(problem, Problem) else kernel.problem_type.from_dict(problem)
    return kernel, problem, _chip(device_kind)


_chip = functools.lru_cache(maxsize=64)(get_chip)


def find(kernel: Kernel, problem: Problem, chip: Chip) -> Match:
    """Like `lookup`, without a warning or tuning, and with where the config came from."""
    if (config := sources.pinned(kernel.name)) is not None:
        return Match(kernel.space(problem, chip).parse(config), "pinned")
    files = sources.stamps(kernel.name, chip.device_kind)
    return _found(kernel, problem, chip.device_kind, files, sources.given(), current_policy())


@functools.lru_cache(maxsize=16384)
def _found(
    kernel: Kernel,
    problem: Problem,
    device_kind: str,
    files: tuple[sources.Stamp, ...],
    given: tuple[sources.Given, ...],
    policy: Policy,
) -> Match:
    """Once for every state of the files."""
    chip = _chip(device_kind)
    space = kernel.space(problem, chip)
    for apart, candidate in indexed(kernel, device_kind, files, given).near(problem):
        if why_not(kernel, space, candidate.preset, policy):
            continue
        config = space.parse(candidate.preset.config)
        how = "nearest" if apart else "exact"
        stale = staleness(kernel, candidate.preset)
        match = Match(_roomy(space, config) if apart else config, how, candidate.preset, candidate.place, stale)
        break
    else:
        match = Match(dict(heuristic(kernel, problem, chip.name)), "heuristic")
    return dataclasses.replace(match, notice=_notice(kernel, problem, chip, match, policy))


@functools.lru_cache(maxsize=256)
def indexed(
    kernel: Kernel, device_kind: str, files: tuple[sources.Stamp, ...], given: tuple[sources.Given, ...]
) -> Index:
    """The presets of the kernel on that device kind, by problem."""
    return Index(kernel, sources.candidates(kernel.name, device_kind, files, given))


def why_not(kernel: Kernel, space: Space, preset: Preset, policy: Policy) -> str | None:
    """Why the preset cannot stand for the problem that `space` is of; None where it can."""
    try:
        config = space.parse(preset.config)
    except UsageError as error:
        return str(error)
    if reason := space.why_invalid(config):
        return f"{format_config(config)} is not valid here: {reason}"
    for aspect, words in staleness(kernel, preset).items():
        if getattr(policy, aspect) == "refuse":
            return f"it {words}, which the policy refuses"
    return None


def _roomy(space: Space, config: dict[str, Any]) -> dict[str, Any]:
    """`config` under the highest limit of VMEM: under its own it was compiled for another problem only."""
    if VMEM_LIMIT not in space.params:
        return config
    roomy = {**config, VMEM_LIMIT: max(space.params[VMEM_LIMIT].candidates)}
    return roomy if space.why_invalid(roomy) is None else config


@functools.lru_cache(maxsize=1024)
def heuristic(kernel: Kernel, problem: Problem, target: str) -> Mapping[str, Any]:
    """The kernel's own config for want of a preset."""
    return kernel.heuristic(problem, get_chip(target))


def tune_command(kernel: Kernel, problem: Problem, chip: Chip) -> str:
    """What would tune `problem`."""
    where = f"--target {chip.name}" if chip.known else "--engine device"  # Elsewhere nothing is predicted.
    return kernel.tune_command(problem, where)


def _notice(kernel: Kernel, problem: Problem, chip: Chip, match: Match, policy: Policy) -> str:
    miss, command = f"{kernel.name}: no preset for {problem} on {chip.name}", tune_command(kernel, problem, chip)
    if match.how == "nearest" and match.preset is not None:
        return f"{miss}, took the one for {problem_of(kernel, match.preset)}; tune it: {command}"
    if match.how == "heuristic":
        return f"{miss}, took an untuned config; tune it: {command}"
    assert match.preset is not None
    for aspect, words in match.stale.items():
        if getattr(policy, aspect) == "warn":
            return f"{kernel.name}: the preset for {problem} on {chip.name} {words}; renew it: {command}"
    machine = match.preset.versions.get("machine")
    if machine not in (None, versions.machine()):
        return (
            f"{kernel.name}: the preset for {problem} was measured on another machine, {machine}; renew it: {command}"
        )
    return ""


def usable_config(space: Space, preset: Preset) -> dict[str, Any] | None:
    """The preset's config where it is valid in `space`."""
    try:
        config = space.parse(preset.config)
    except UsageError:
        return None
    return config if space.why_invalid(config) is None else None
