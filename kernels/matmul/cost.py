"""What a matmul costs: its roofline, an analytic time per config, and a config to start with. Loads no jax."""

from __future__ import annotations

import dataclasses
from typing import Any

from autotune.chips import Chip
from autotune.kernel import Cost
from autotune.outcome import Config
from autotune.problem import DTYPE_BYTES
from autotune.space import aligned_divisors
from kernels._tpu_model import LANES, cdiv, dma_s, mxu_s, step_s, vpu_s
from kernels.matmul.problem import TiledProblem


@dataclasses.dataclass(frozen=True)
class Form:
    """How many arrays one pass over the tiles works on: a matmul's, or of a kernel that is blocked like it.

    Attributes:
        lefts: Arrays ``[m, k]``; one alone goes with every right.
        rights: Arrays ``[k, n]``, one to a product.
        sums: Accumulators.
        tiles: Arrays ``[m, n]``, read or written.
    """

    lefts: int = 1
    rights: int = 1
    sums: int = 1
    tiles: int = 1


MATMUL = Form()


def cost(problem: TiledProblem, form: Form = MATMUL) -> Cost:
    """The roofline: 2·m·n·k operations a product; each operand read once, each result written once."""
    m, n, k = problem.m, problem.n, problem.k
    item, out_item = DTYPE_BYTES[problem.dtype], DTYPE_BYTES[problem.result_dtype]
    nbytes = (form.lefts * m * k + form.rights * k * n) * item + form.tiles * m * n * out_item
    return Cost(2.0 * form.rights * m * n * k, nbytes, problem.dtype)


def estimate_ms(problem: TiledProblem, config: Config, chip: Chip, form: Form = MATMUL) -> float:
    """Time of one call in milliseconds, from the blocks' MXU passes, fetches and steps."""
    block_m, block_n, block_k = _blocks(problem, config)
    item, out_item = DTYPE_BYTES[problem.dtype], DTYPE_BYTES[problem.result_dtype]
    tiles_m, tiles_n, steps_k = cdiv(problem.m, block_m), cdiv(problem.n, block_n), cdiv(problem.k, block_k)
    outer, inner = (tiles_m, tiles_n) if config.get("grid_order", "mn") == "mn" else (tiles_n, tiles_m)

    # The accumulator is loaded, added to and stored every step, beside the MXU but not for free.
    accumulate = vpu_s(2 * block_m * block_n, chip, slots=1) if steps_k > 1 else 0.0
    compute = form.rights * mxu_s(block_m, block_n, block_k, problem.dtype, chip) + 0.2 * form.sums * accumulate
    compute += vpu_s(form.tiles * block_m * block_n, chip, slots=1) / steps_k  # tiles are converted and stored once

    # With the whole k in one block, the outer loop's operand stays put while the inner loop runs.
    x_bytes, y_bytes = form.lefts * block_m * block_k * item, form.rights * block_k * block_n * item
    held, moving = (x_bytes, y_bytes) if config.get("grid_order", "mn") == "mn" else (y_bytes, x_bytes)
    held_fetches = 1 / inner if steps_k == 1 else 1.0
    moving_fetches = 1 / (outer * inner) if steps_k == 1 and inner == 1 else 1.0
    nbytes = held * held_fetches + moving * moving_fetches
    nbytes += form.tiles * block_m * block_n * out_item / steps_k

    # "parallel" tiles are dealt out to the cores that act as one device.
    steps = cdiv(outer, chip.cores) * inner * steps_k if outer >= chip.cores else outer * inner * steps_k
    total = steps * step_s(compute, dma_s(nbytes, chip))
    if config.get("held_buffers", 2) == 1:  # nothing overlaps the held operand's fetch
        total += cdiv(outer, chip.cores) * dma_s(held, chip)
    return 1e3 * (total + dma_s(x_bytes + y_bytes, chip))  # the first fetch has nothing to hide behind


def vmem_lower_bound(problem: TiledProblem, config: Config, form: Form = MATMUL) -> int:
    """Bytes of VMEM that the blocks cannot do without; what the compiler adds comes on top.

    A block that changes along the grid has two buffers; one that never does may get away with one.
    """
    block_m, block_n, block_k = _blocks(problem, config)
    item, out_item = DTYPE_BYTES[problem.dtype], DTYPE_BYTES[problem.result_dtype]
    one_m, one_n, one_k = block_m >= problem.m, block_n >= problem.n, block_k >= problem.k
    held = config.get("held_buffers", 2)
    x_buffers, y_buffers = (held, 2) if config.get("grid_order", "mn") == "mn" else (2, held)
    x = form.lefts * block_m * block_k * item * (1 if one_m and one_k else x_buffers)
    y = form.rights * block_k * block_n * item * (1 if one_k and one_n else y_buffers)
    tiles = form.tiles * block_m * block_n * out_item * (1 if one_m and one_n else 2)
    return x + y + tiles + (0 if one_k else 4 * form.sums * block_m * block_n)


def clipped(size: int, block: int) -> int:
    """`block`, or the whole dimension where that is smaller: always a legal block."""
    return min(size, block)


def heuristic_config(problem: TiledProblem) -> dict[str, Any]:
    """A good start on every chip: tiles that fit the smallest default VMEM limit (16 MiB)."""
    wide = 512 if problem.dtype == "float32" else 1024
    return {
        "block_m": largest_divisor(problem.m, problem.row_tile, wide),
        "block_n": largest_divisor(problem.n, LANES, wide),
        "block_k": largest_divisor(problem.k, LANES, 512),
    }


def largest_divisor(size: int, align: int, cap: int) -> int:
    """The largest aligned divisor up to `cap` unless all are small: then `cap`, with an uneven last block."""
    if size <= cap:
        return size
    best = max((d for d in aligned_divisors(size, align) if d <= cap), default=0)
    return best if 2 * best >= cap else cap


def _blocks(problem: TiledProblem, config: Config) -> tuple[int, int, int]:
    return tuple(
        clipped(size, config[name])
        for size, name in ((problem.m, "block_m"), (problem.n, "block_n"), (problem.k, "block_k"))
    )
