"""Configs to begin a search with, from other tuners' tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autotune.engines._base import Task
from autotune.errors import UsageError
from autotune.interop.rows import Row, read
from autotune.outcome import Config
from autotune.space import Param, Space, config_key

MOST = 8  # configs of a run: the search goes on from them


@dataclasses.dataclass(frozen=True)
class Start:
    """What tables gave for a task.

    Attributes:
        configs: Valid ones, those of the nearest problems first.
        rows: Rows of the kernel's kind that the tables have.
    """

    configs: tuple[Config, ...]
    rows: int


def starting_configs(task: Task, paths: Iterable[Path]) -> Start:
    """The blocks that were best elsewhere for problems near the task's, as far as its space takes them.

    A table's dtypes, masks and chips may be others: its configs are tried first, and believed in nothing.

    Raises:
        UsageError: A file is not there or of no known kind, or has no row of the kernel's kind.
        ResultsError: A file cannot be read.
    """
    relatives = task.kernel.relatives
    if not relatives:
        raise UsageError(f"--start-from: no other tuner's tables are known for {task.kernel.name}")
    space = task.kernel.space(task.problem, task.chip)
    found: list[Row] = []
    for path in paths:
        rows = [row for row in read(path) if row.op in relatives]
        if not rows:
            raise UsageError(f"{path}: has no row that {task.kernel.name} could use ({', '.join(relatives)})")
        found += rows
    sizes = task.problem.to_dict()
    configs: dict[Any, Config] = {}
    for row in sorted(found, key=lambda row: _distance(row.sizes, sizes)):
        config = _config(space, relatives[row.op], row.blocks)
        if config is not None and len(configs) < MOST:
            configs.setdefault(config_key(config), config)
    return Start(tuple(configs.values()), len(found))


def _distance(theirs: Mapping[str, int], ours: Mapping[str, Any]) -> float:
    """In octaves, over the sizes that both have."""
    shared = [name for name in theirs if isinstance(ours.get(name), int) and ours[name] > 0 and theirs[name] > 0]
    return sum(abs(math.log2(theirs[name] / ours[name])) for name in shared)


def _config(space: Space, names: Mapping[str, Any], blocks: Mapping[str, Any]) -> Config | None:
    """The row's blocks under this kernel's names; None where the space has no such config."""
    fields = {name: blocks.get(value) if isinstance(value, str) else value for name, value in names.items()}
    if any(value is None or name not in space.params for name, value in fields.items()):
        return None
    near = {name: _candidate(space.params[name], value) for name, value in fields.items()}
    if any(value is None for value in near.values()):
        return None
    config = space.parse(near)
    return config if space.why_invalid(config) is None else None


def _candidate(param: Param, value: Any) -> Any:
    """The candidate that a value is, or that is less than half an octave from a size; None where there is none."""
    if param.kind is not int or value in param.candidates:
        return value if value in param.candidates else None
    if type(value) is not int or value < 1:
        return None
    apart = {candidate: abs(math.log2(candidate / value)) for candidate in param.candidates}
    nearest = min(apart, key=lambda candidate: apart[candidate])
    return nearest if apart[nearest] < 0.5 else None
