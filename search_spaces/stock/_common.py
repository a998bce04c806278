"""What the kernels that JAX ships have in common for the tuner: no VMEM limit and no interpreter of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from autotune.chips import MIB, Chip
from autotune.kernel import Kernel
from autotune.outcome import Config
from autotune.space import Constraint, aligned_divisors
from kernels._tpu_model import LANES
from kernels.stock.problem import StockProblem

OPS = "jax.experimental.pallas.ops.tpu"
MAXTEXT = 512  # every block of its base configuration
LARGEST_BLOCK = 4096
LARGEST_TILE = 4 * 1024 * 1024  # scores of a tile, each of which the compiler writes out


class StockKernel(Kernel):
    """A kernel as JAX ships it.

    Attributes:
        library: Its module, under ``jax.experimental.pallas.ops.tpu``; a new text of it makes a new version.
    """

    library: ClassVar[str]

    @functools.cached_property
    def sources(self) -> tuple[str, ...]:  # type: ignore[override]
        return (f"{OPS}.{self.library}",)

    def options(self, problem: StockProblem) -> Mapping[str, Any]:
        limit = problem.scoped_vmem_mib
        return {} if limit is None else {"xla_tpu_scoped_vmem_limit_kib": limit * 1024}


def interpreted(function: Callable[..., Any], interpret: Any) -> Callable[..., Any]:
    """`function`, whose kernels take no `interpret`, in the interpreter where one is asked for."""
    if not interpret:
        return function

    @functools.wraps(function)
    def inside(*arrays: Any) -> Any:
        from jax.experimental.pallas import tpu as pltpu

        with pltpu.force_tpu_interpret_mode(interpret):
            return function(*arrays)

    return inside


def block_sizes(length: int, align: int = LANES) -> tuple[int, ...]:
    """Blocks that divide a length."""
    return tuple(size for size in aligned_divisors(length, align) if size <= LARGEST_BLOCK and size % align == 0)


def tile_sizes(length: int) -> tuple[int, ...]:
    """Parts of these blocks: which divides which, a constraint says."""
    return tuple(sorted({part for block in block_sizes(length) for part in block_sizes(block)}))


def longest(length: int, cap: int, align: int = LANES) -> int:
    """The longest block up to `cap`."""
    return max((size for size in block_sizes(length, align) if size <= cap), default=align)


def divides(name: str, dimension: str, size: int, align: int) -> Constraint:
    """These kernels have no uneven last block."""
    return Constraint(
        f"{name} must be a multiple of {align} that divides {dimension}={size}",
        lambda config: 0 < config[name] <= size and config[name] % align == 0 and size % config[name] == 0,
    )


def part_of(part: str, block: str, align: int) -> Constraint:
    return Constraint(
        f"{part} must be a multiple of {align} that divides {block}",
        lambda config: config[part] > 0 and config[part] % align == 0 and config[block] % config[part] == 0,
    )


def small_tile(rows: str, columns: str) -> Constraint:
    return Constraint(
        f"{rows} x {columns} must be at most {LARGEST_TILE} scores: the compiler writes out every one",
        lambda config: config[rows] * config[columns] <= LARGEST_TILE,
    )


def fits(problem: StockProblem, chip: Chip, needed: Callable[[Config], int]) -> Constraint:
    """The blocks alone fit: what the compiler adds it says itself."""
    limit = problem.scoped_vmem_mib or chip.scoped_vmem_bytes // MIB
    return Constraint(
        f"the blocks alone need more than the {limit} MiB of VMEM that programs are compiled with (scoped_vmem_mib)",
        lambda config: needed(config) <= limit * MIB,
    )


def as_python(call: str, fields: Mapping[str, Any]) -> str:
    """Source text that makes an object."""
    return f"{call}({', '.join(f'{name}={value!r}' for name, value in fields.items())})"
