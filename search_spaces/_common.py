"""What the spaces share: candidates for a block, and the constraints on one."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.chips import MIB, Chip
from autotune.problem import DTYPE_BYTES
from autotune.space import Constraint, Param, aligned_divisors

LANES = 128
FEW = 5  # so many divisors of a practical size, or blocks that do not divide are tried as well
PRACTICAL = 4096
MANY = 12  # candidates of one parameter; a length with more divisors gets these many, evenly spread


def sublanes(dtype: str) -> int:
    """Rows of one VMEM tile: 8 of 32 bits, 16 of 16 bits."""
    return 32 // DTYPE_BYTES[dtype]


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
                trimmed = max(smallest, _round_up(-(-size // -(-size // wish)), align))
                found |= {trimmed} if trimmed <= top else set()
    return spread(found) or (top,)


def spread(sizes: Iterable[int], most: int = MANY) -> tuple[int, ...]:
    """At most `most` of the sizes, ascending: the ends, and between them those that are far apart as ratios."""
    kept = sorted(sizes)
    while len(kept) > most:
        kept.pop(min(range(1, len(kept) - 1), key=lambda i: kept[i + 1] / kept[i - 1]))
    return tuple(kept)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def block_constraint(name: str, dimension: str, size: int, align: int) -> Constraint:
    """The block shape rule of a TPU: an aligned length or the whole dimension."""
    return Constraint(
        f"{name} must be a positive multiple of {align} up to {dimension}={size}, or the whole {size}",
        lambda config: config[name] == size or (0 < config[name] <= size and config[name] % align == 0),
    )


def vmem_limits(chip: Chip) -> tuple[int, ...]:
    """The compiler's default, then what a kernel may take of the physical VMEM, in MiB."""
    default, physical = chip.scoped_vmem_bytes // MIB, chip.vmem_bytes // MIB
    return tuple(sorted({default} | {size for size in (32, 64, 96) if default < size <= 0.8 * physical}))


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
    blocks = min(most, max(2, -(-size // block)))
    return (blocks - 1) * block + (size % block or block)


def uneven(block: int) -> int:
    """A part of a block, a multiple of no tile where there is room for such a part."""
    return max(1, min(block - 1, block // 4 + 3, 259))
