"""What a norm costs: its roofline, an analytic time per config, and a config to start with. Loads no jax."""

from __future__ import annotations

from typing import Any

from autotune.chips import MIB, Chip
from autotune.kernel import Cost
from autotune.outcome import Config
from autotune.problem import DTYPE_BYTES
from autotune.space import aligned_divisors
from kernels._tpu_model import LANES, SUBLANES, cdiv, dma_s, round_up, step_s, sublanes
from kernels.norm.problem import Kind, NormProblem

# Read off the TPU compiler's own cycle counts (d 128 and 4096, v5e and v7x, tiles of 16 to 2048 rows).
FORWARD_CYCLES, BACKWARD_CYCLES = 2.2, 5.5  # per register of 8x128 elements
MEAN_CYCLES = 0.8  # and per register for a layernorm's mean
ROW_CYCLES = 2.5  # per eight rows: sums across lanes, and what becomes of them
CHAIN_CYCLES = 40.0  # that a pass of the loop waits for its last row
SUM_OF_PARTS_S = 2e-6  # an operation more, of XLA's

VMEM = 14 * MIB  # of the 16 MiB that are the smallest default limit: the compiler adds its own
FORWARD_TILE, BACKWARD_TILE = 128 * 1024, 64 * 1024  # elements: more rows hide the waits, fewer spare the registers
TEMPORARIES = 3  # tiles of float32 that find no room in the registers
LONGEST = 2 * MIB  # block of one array: a longer one makes the first fetch and the last write longer, and no more


def parameters(kind: Kind) -> int:
    return 2 if kind == "layernorm" else 1


def moved(problem: NormProblem, backward: bool) -> int:
    """Arrays of x's shape that are read or written."""
    if backward:  # x, the gradients of its norm and perhaps of the sum, dx
        return 3 + problem.residual
    return 2 + 2 * problem.residual


def width(problem: NormProblem) -> int:
    """A row's length in VMEM, where it fills whole lanes."""
    return round_up(problem.d, LANES)


def cost(problem: NormProblem, kind: Kind, backward: bool) -> Cost:
    """The roofline: no matmul; each array moved once."""
    params = parameters(kind) * (2 if backward else 1)
    nbytes = (moved(problem, backward) * problem.rows + params) * problem.d * DTYPE_BYTES[problem.dtype]
    return Cost(0.0, nbytes, problem.dtype)


def estimate_ms(problem: NormProblem, config: Config, chip: Chip, kind: Kind, backward: bool) -> float:
    """Time of one call in milliseconds, from a block's registers, tiles and bytes."""
    block, tile, unroll = config["block_rows"], config["block_rows_compute"], config.get("unroll", 1)
    per_register = (BACKWARD_CYCLES if backward else FORWARD_CYCLES) + MEAN_CYCLES * (kind == "layernorm")
    groups = block / SUBLANES
    cycles = groups * (width(problem) // LANES * per_register + ROW_CYCLES)
    cycles += block / (tile * unroll) * CHAIN_CYCLES
    dma = dma_s(moved(problem, backward) * min(block, problem.rows) * problem.d * DTYPE_BYTES[problem.dtype], chip)
    dma *= 0.9 if config.get("write_pieces", 1) > 1 else 1.0  # on v5e; to the others it makes no difference

    blocks = cdiv(problem.rows, block)
    parts = min(config["parts"], blocks) if backward else min(chip.cores, blocks)
    steps = cdiv(parts, chip.cores) * cdiv(blocks, parts)
    total = steps * step_s(cycles / (chip.clock_ghz * 1e9), dma)
    total += dma  # the first block is read, and the last one written, with nothing to hide behind
    return 1e3 * (total + (SUM_OF_PARTS_S if backward and parts > 1 else 0.0))


def vmem_lower_bound(problem: NormProblem, config: Config, kind: Kind, backward: bool) -> int:
    """Bytes of VMEM that the blocks cannot do without; what the compiler adds comes on top."""
    block = config["block_rows"]
    buffers = 1 if problem.rows <= block else 2
    return buffers * block * _row_bytes(problem, backward) + _sum_bytes(problem, kind, backward)


def _row_bytes(problem: NormProblem, backward: bool) -> int:
    """A row of every array that is read or written."""
    return moved(problem, backward) * width(problem) * DTYPE_BYTES[problem.dtype]


def _sum_bytes(problem: NormProblem, kind: Kind, backward: bool) -> int:
    """The float32 sums over rows."""
    return parameters(kind) * SUBLANES * width(problem) * 4 if backward else 0


def heuristic_config(problem: NormProblem, kind: Kind, backward: bool, cores: int = 1) -> dict[str, Any]:
    """A good start on every chip: tiles about as large as the registers, blocks that fit the smallest VMEM limit.

    Rows too long for that limit raise it as far as one tile of them needs.

    Args:
        cores: Those that act as one device.
    """
    align, wide = sublanes(problem.dtype), width(problem)
    temporaries = TEMPORARIES * wide * 4 * _tile(problem, align, backward, problem.rows)
    room = VMEM - temporaries - _sum_bytes(problem, kind, backward)
    longest = LONGEST // (wide * DTYPE_BYTES[problem.dtype])
    # Four blocks at least, so that something is fetched while something else is computed, on each of two cores.
    most = max(min(room // (2 * _row_bytes(problem, backward)), longest, cdiv(problem.rows, 4)), align)
    tile = _tile(problem, align, backward, most)
    block = _block(problem.rows, tile, most)
    need = 2 * block * _row_bytes(problem, backward) + VMEM - room
    config = {"block_rows": block, "block_rows_compute": tile}
    if backward:
        config["parts"] = min(cores, cdiv(problem.rows, block))
    return config if need <= VMEM else {**config, "vmem_limit_mib": cdiv(5 * need // 4, MIB)}


def _tile(problem: NormProblem, align: int, backward: bool, most: int) -> int:
    """Rows of a tile: the largest power of two that the registers and `most` allow."""
    tile = align
    while 2 * tile <= most and 2 * tile * width(problem) <= (BACKWARD_TILE if backward else FORWARD_TILE):
        tile *= 2
    return tile


def _block(rows: int, tile: int, most: int) -> int:
    """The largest multiple of `tile` up to `most` that divides the rows; where all are small, an uneven last block."""
    most = most // tile * tile
    best = max((d for d in aligned_divisors(rows, tile) if d <= most and d % tile == 0), default=0)
    return best if 2 * best >= most else min(round_up(cdiv(rows, cdiv(rows, most)), tile), most)


def plain_config(problem: NormProblem, kind: Kind, backward: bool) -> dict[str, Any]:
    """Blocks of up to 256 rows, each computed at once, as far as that fits the smallest VMEM limit."""
    block, wide = sublanes(problem.dtype), width(problem)
    at_once = 2 * _row_bytes(problem, backward) + TEMPORARIES * wide * 4
    most = min(256, problem.rows, (VMEM - _sum_bytes(problem, kind, backward)) // at_once)
    while 2 * block <= most:
        block *= 2
    return {"block_rows": block, "block_rows_compute": block}
