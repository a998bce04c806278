"""What the spaces share: candidates for a block, the constraints on one, and all of it for a matmul's tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from autotune.chips import MIB, Chip
from autotune.outcome import Config
from autotune.problem import DTYPE_BYTES
from autotune.space import Constraint, Param, aligned_divisors
from kernels._tpu_model import LANES, cdiv, round_up, vmem_limits
from kernels.matmul.problem import TiledProblem

Tiled = TypeVar("Tiled", bound=TiledProblem)  # matrices of m, n and k that the blocks cut into tiles

FEW = 5  # so many divisors of a practical size, or blocks that do not divide are tried as well
PRACTICAL = 4096
MANY = 12  # candidates of one parameter; a length with more divisors gets these many, evenly spread


def block_candidates(size: int, align: int, *, smallest: int = LANES, largest: int | None = None) -> tuple[int, ...]:
    """Blocks worth trying along a dimension of `size`, ascending.

    Aligned divisors and the whole dimension, as far as `largest`. A length with few of them (a vocabulary, an
    odd sequence) gets aligned blocks that do not divide it as well: about 1, 2, 3, 4, 6, 8… times `smallest`,
    each trimmed to leave the least of its last block empty.
    """
    top = min(size, largest or size)
    found = {block for block in aligned_divisors(size, align, smallest=smallest) if block <= top}
    if sum(block <= PRACTICAL for block in found) < FEW:
        wished = [smallest, *(smallest * factor << doubling for doubling in range(8) for factor in (2, 3))]
        for wish in wished:
            if wish <= min(top, PRACTICAL):
                trimmed = max(smallest, round_up(cdiv(size, cdiv(size, wish)), align))
                found |= {trimmed} if trimmed <= top else set()
    return spread(found) or (top,)


def spread(sizes: Iterable[int], most: int = MANY) -> tuple[int, ...]:
    """At most `most` of the sizes, ascending: the ends, and between them those that are far apart as ratios."""
    kept = sorted(sizes)
    while len(kept) > most:
        kept.pop(min(range(1, len(kept) - 1), key=lambda i: kept[i + 1] / kept[i - 1]))
    return tuple(kept)


def block_constraint(name: str, dimension: str, size: int, align: int) -> Constraint:
    """The block shape rule of a TPU: an aligned length or the whole dimension."""
    return Constraint(
        f"{name} must be a positive multiple of {align} up to {dimension}={size}, or the whole {size}",
        lambda config: config[name] == size or (0 < config[name] <= size and config[name] % align == 0),
    )


def vmem_param(chip: Chip) -> Param:
    """The limit as a parameter. Ascending, and the last: no estimate knows it, and a ranking keeps equals in order."""
    return Param(
        "vmem_limit_mib",
        vmem_limits(chip),
        "VMEM the compiler may use for the kernel, MiB (the first is its default)",
        default=chip.scoped_vmem_bytes // MIB,
    )


def vmem_limit_constraint(chip: Chip) -> Constraint:
    physical = chip.vmem_bytes // MIB
    return Constraint(
        f"vmem_limit_mib must be between 1 and the {physical} MiB of VMEM that {chip.name} has",
        lambda config: 1 <= config["vmem_limit_mib"] <= physical,
    )


def few_blocks(size: int, block: int, most: int = 3) -> int:
    """A length of two to `most` blocks, no more than `size` has where it has two; the last as long as its last."""
    blocks = min(most, max(2, cdiv(size, block)))
    return (blocks - 1) * block + (size % block or block)


def uneven(block: int) -> int:
    """A part of a block, a multiple of no tile where there is room for such a part."""
    return max(1, min(block - 1, block // 4 + 3, 259))


def tile_params(problem: TiledProblem, chip: Chip) -> list[Param]:
    """The blocks of a matmul, the order of their tiles, and the buffers of the operand held still.

    Raises:
        UsageError: The chip does not multiply that dtype.
    """
    chip.peak_tflops(problem.dtype)  # Refuses a dtype that the chip's MXU does not take.
    # Two buffers of a longer block fill the VMEM even if it is only 128 wide.
    most = chip.vmem_bytes // (2 * LANES * DTYPE_BYTES[problem.dtype])
    return [
        Param("block_m", block_candidates(problem.m, problem.row_tile, largest=most), "rows of an output tile"),
        Param("block_n", block_candidates(problem.n, LANES, largest=most), "columns of an output tile"),
        Param("block_k", block_candidates(problem.k, LANES, largest=most), "contracted length per grid step"),
        Param("grid_order", ("mn", "nm"), "order of the outer two grid dimensions, the inner one last", "mn"),
        Param("held_buffers", (2, 1), "VMEM buffers of the operand that the inner tile loop holds still", 2),
    ]


def tile_constraints(
    problem: TiledProblem, chip: Chip, vmem_lower_bound: Callable[[TiledProblem, Config], int]
) -> list[Constraint]:
    """What must hold between `tile_params` and the VMEM limit."""
    return [
        block_constraint("block_m", "m", problem.m, problem.row_tile),
        block_constraint("block_n", "n", problem.n, LANES),
        block_constraint("block_k", "k", problem.k, LANES),
        Constraint("held_buffers must be 1 or 2", lambda config: config["held_buffers"] in (1, 2)),
        Constraint(
            f"held_buffers=1 needs block_k to be the whole k={problem.k}: with several k steps no operand is held",
            lambda config: config["held_buffers"] == 2 or config["block_k"] == problem.k,
        ),
        vmem_limit_constraint(chip),
        Constraint(
            "the blocks alone need more VMEM than vmem_limit_mib: take smaller blocks or a higher limit",
            lambda config: vmem_lower_bound(problem, config) <= config["vmem_limit_mib"] * MIB,
        ),
    ]


def small_tiles(problem: TiledProblem) -> dict[str, int]:
    """The 128-wide blocks that libraries ship with."""
    return {f"block_{field}": min(getattr(problem, field), LANES) for field in ("m", "n", "k")}


def tile_validation_problems(problem: Tiled, config: Config) -> list[Tiled]:
    """The problem's own path over a few blocks (over one of a k that is whole), and three with uneven edges.

    Blocks too large for three each way have two, and three along one dimension at a time.
    """
    sizes = {"m": problem.m, "n": problem.n, "k": problem.k}
    blocks = {field: min(size, config[f"block_{field}"]) for field, size in sizes.items()}

    def own(most: int) -> Tiled:
        lengths = {field: few_blocks(size, blocks[field], most) for field, size in sizes.items()}
        return problem.replace({**lengths, "k": problem.k if blocks["k"] == problem.k else lengths["k"]})

    def ragged(**full: int) -> Tiled:
        """So many full blocks along each dimension, and part of one."""
        return problem.replace({f: full[f] * block + uneven(block) for f, block in blocks.items()})

    exact = own(3) if _cheap(own(3)) else own(2)
    if _cheap(three := ragged(m=2, n=2, k=2)):
        return [exact, three]
    thin = {"m": 0, "n": 0, "k": 0}
    return [*(ragged(**{**thin, field: 2}) for field in blocks), ragged(m=1, n=1, k=1), exact]


def _cheap(problem: TiledProblem) -> bool:
    """Whether a CPU runs it in some seconds and little memory."""
    m, n, k = problem.m, problem.n, problem.k
    return m * n * k <= 1 << 36 and max(m * k, k * n, m * n) <= 1 << 26
