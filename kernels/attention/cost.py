"""What attention costs: its roofline, an analytic time per config, and a config to start with. Loads no jax."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from autotune.chips import Chip
from autotune.kernel import Cost
from autotune.outcome import Config
from autotune.problem import DTYPE_BYTES
from autotune.space import aligned_divisors
from kernels._tpu_model import LANES, cdiv, dma_s, mxu_s, round_up, step_s, vpu_s
from kernels.attention.blocks import Blocks
from kernels.attention.problem import AttentionProblem

# Fitted to the TPU compiler's own cycle counts of 22 block shapes (4096 causal, head_dim 128, v5e and v6e;
# mean error 7% over a range of 18×). They are what is left after the compiler's overlapping, not operation counts.
SOFTMAX_OPERATIONS = 1.0  # vector operations per score
MASK_OPERATIONS = 0.2  # and per score of a block that the diagonal cuts
STATISTIC_OPERATIONS = 7.5  # per row, sub-block and lane: maximum across lanes, fade, updates
EXPOSED = 0.1  # of the lesser of the two units' times in a block, not hidden behind the other's
CHAIN_CYCLES = 530.0  # product, maximum, exponential, product: what a tile waits for, however small it is
TILE = 512  # side of a heuristic tile
SAMPLED = 4096  # rows of tiles that are summed one by one
LOOP_CYCLES = 60.0  # of a pass of the loop over tiles


def cost(problem: AttentionProblem) -> Cost:
    """The roofline: two matmuls over the scores that the mask leaves; each array moved once."""
    pairs = problem.q_len * problem.kv_len
    if problem.causal:  # query i sees i + 1 + kv_len - q_len keys
        pairs -= problem.q_len * (problem.q_len - 1) // 2
    flops = 4.0 * problem.batch * problem.heads * pairs * problem.head_dim
    rows = 2 * problem.heads * problem.q_len + 2 * problem.kv_heads * problem.kv_len
    return Cost(flops, problem.batch * rows * problem.head_dim * DTYPE_BYTES[problem.dtype], problem.dtype)


def blocks_of(problem: AttentionProblem, config: Config) -> Blocks:
    block_q, block_kv = config["block_q"], config["block_kv"]
    tile = config.get("block_q_compute") or block_q, config.get("block_kv_compute") or block_kv
    return Blocks(problem.q_len, problem.kv_len, block_q, block_kv, *tile, problem.causal)


def estimate_ms(problem: AttentionProblem, config: Config, chip: Chip) -> float:
    """Time of one call in milliseconds: the tiles of one head by their kind, and its grid steps, times the heads."""
    blocks = blocks_of(problem, config)
    item = DTYPE_BYTES[problem.dtype]
    kv_dma = dma_s(2 * blocks.block_kv * problem.head_dim * item, chip)
    q_dma = dma_s(2 * blocks.block_q * problem.head_dim * item, chip)  # fetched once, stored once

    clear, cut = _tiles(blocks)
    tile = functools.partial(_tile_s, problem, blocks, chip, _ones(problem, config))
    compute = clear * tile(masked=False) + cut * tile(masked=True)
    compute += (clear / config.get("unroll", 1) + cut) * LOOP_CYCLES / (chip.clock_ghz * 1e9)

    needed, all_steps = _steps(blocks), blocks.q_blocks * blocks.kv_blocks
    fetched = 0 if blocks.kv_blocks == 1 else kv_dma  # a single kv block stays for the heads that share it
    head = needed * step_s(compute / needed, fetched) + (all_steps - needed) * step_s(0.0, 0.0)
    head += blocks.q_blocks * q_dma / 2
    heads = problem.batch * problem.heads
    return 1e3 * (cdiv(heads, chip.cores) * head + kv_dma + q_dma)


def _evenly(count: int) -> tuple[np.ndarray, float]:
    """The numbers below `count`, or as many as are quickly summed, evenly spread; and how many each stands for."""
    taken = min(count, SAMPLED)
    return np.arange(taken) * count // taken, count / taken


def _tiles(blocks: Blocks) -> tuple[float, float]:
    """Tiles of one head that need no mask, and those that do."""
    rows, width = blocks.block_q_compute, blocks.block_kv_compute
    index, weight = _evenly(cdiv(blocks.q_len, rows))
    first = index * rows
    if blocks.causal:
        shift = first + blocks.kv_len - blocks.q_len
        clear = (shift + 1) // width
        seen = np.minimum(shift + rows - 1, blocks.kv_len - 1) // width + 1
    else:
        clear = np.full_like(first, blocks.kv_len // width)
        seen = np.full_like(first, cdiv(blocks.kv_len, width))
    return weight * float(clear.sum()), weight * float((seen - clear).sum())


def _steps(blocks: Blocks) -> float:
    """Grid steps of one head that have anything to do."""
    if not blocks.causal:
        return blocks.q_blocks * blocks.kv_blocks
    index, weight = _evenly(blocks.q_blocks)
    last = blocks.last_key(index) // blocks.block_kv
    return weight * float((np.minimum(last, blocks.kv_blocks - 1) + 1).sum())


def _ones(problem: AttentionProblem, config: Config) -> int:
    """Columns of ones beside v that sum the weights on the MXU."""
    return LANES - problem.head_dim % LANES if config.get("row_sum", "vpu") == "mxu" else 0


def _tile_s(problem: AttentionProblem, blocks: Blocks, chip: Chip, ones: int, *, masked: bool) -> float:
    """Seconds of compute for one tile of scores. MXU and vector unit overlap within it."""
    rows, width = blocks.block_q_compute, blocks.block_kv_compute
    dim = round_up(problem.head_dim, LANES)
    mxu = mxu_s(rows, width, problem.head_dim, problem.dtype, chip)
    mxu += mxu_s(rows, problem.head_dim + ones, width, problem.dtype, chip)
    scores = rows * round_up(width, LANES)
    operations = SOFTMAX_OPERATIONS * (0.8 if ones else 1.0) + (MASK_OPERATIONS if masked else 0.0)
    vpu = vpu_s(operations * scores, chip)
    vpu += vpu_s(rows * (STATISTIC_OPERATIONS * LANES + 2 * dim), chip)
    exponent = vpu_s(scores + rows * LANES, chip, slots=1)
    vector = max(vpu, exponent)
    chain = CHAIN_CYCLES / (chip.clock_ghz * 1e9)
    return max(mxu, vector) + chain + EXPOSED * min(mxu, vector)


def vmem_lower_bound(problem: AttentionProblem, config: Config) -> int:
    """Bytes of VMEM that the blocks cannot do without; what the compiler adds comes on top."""
    blocks, dim = blocks_of(problem, config), problem.head_dim
    item = DTYPE_BYTES[problem.dtype]
    heads = problem.batch * problem.heads
    q_buffers = 1 if heads == 1 and blocks.q_blocks == 1 else 2
    kv_buffers = 1 if problem.batch * problem.kv_heads == 1 and blocks.kv_blocks == 1 else 2
    pipelined = 2 * q_buffers * blocks.block_q * dim + 2 * kv_buffers * blocks.block_kv * dim
    ones = _ones(problem, config)
    scratch = blocks.block_q * (dim * item + 4 * (dim + ones) + 4 * LANES * (1 if ones else 2))
    return pipelined * item + scratch


def heuristic_config(problem: AttentionProblem) -> dict[str, Any]:
    """A good start on every chip: long blocks in small tiles that fit the smallest default VMEM limit (16 MiB)."""
    # A row of a block takes VMEM by its width: as many rows as 128 wide ones of bfloat16 would be.
    wide = cdiv(problem.head_dim, LANES) * DTYPE_BYTES[problem.dtype] // 2
    block_q, block_kv = _block(problem.q_len, 16, 2048 // wide), _block(problem.kv_len, LANES, 4096 // wide)
    return {
        "block_q": block_q,
        "block_kv": block_kv,
        "block_q_compute": tile_part(block_q, 16, TILE),
        "block_kv_compute": tile_part(block_kv, LANES, TILE),
        "unroll": 2,
    }


def backward_cost(problem: AttentionProblem, *, products: int, of_keys: bool) -> Cost:
    """The roofline of a backward kernel: so many matmuls over the scores that the mask leaves.

    Args:
        products: Matmuls; the forward pass has two.
        of_keys: Whether it writes the gradients of k and v; else that of q.
    """
    forward = cost(problem)
    queries = problem.batch * problem.heads * problem.q_len
    keys = problem.batch * problem.kv_heads * problem.kv_len
    item, dim = DTYPE_BYTES[problem.dtype], problem.head_dim
    rows = 2 * queries + 2 * keys + (2 * keys if of_keys else queries)
    statistics = 2 * 4 * queries
    return Cost(forward.flops * products / 2, rows * dim * item + statistics, forward.dtype)


def backward_estimate_ms(problem: AttentionProblem, config: Config, chip: Chip, *, products: int) -> float:
    """Time of a backward kernel in milliseconds: of the forward one with these blocks, by the number of matmuls."""
    return estimate_ms(problem, config, chip) * products / 2


def backward_vmem_lower_bound(problem: AttentionProblem, config: Config) -> int:
    """Bytes of VMEM that a backward kernel's blocks cannot do without: two buffers of each, and the float32 sums."""
    block_q, block_kv, dim = config["block_q"], config["block_kv"], problem.head_dim
    item = DTYPE_BYTES[problem.dtype]
    return 2 * 2 * (block_q + block_kv) * dim * item + 4 * min(block_q, block_kv) * dim


def backward_heuristic_config(problem: AttentionProblem) -> dict[str, Any]:
    """A good start on every chip for both backward kernels: as `heuristic_config`, in blocks half as long.

    Queries lie along the lanes there, so that their blocks and tiles are multiples of 128, or all of them.
    """
    wide = cdiv(problem.head_dim, LANES) * DTYPE_BYTES[problem.dtype] // 2
    block_q, block_kv = (_block(length, LANES, 1024 // wide) for length in (problem.q_len, problem.kv_len))
    return {
        "block_q": block_q,
        "block_kv": block_kv,
        "block_q_compute": tile_part(block_q, LANES, TILE),
        "block_kv_compute": tile_part(block_kv, LANES, TILE),
    }


def tile_part(block: int, align: int, cap: int) -> int:
    """The largest aligned part up to `cap` that divides `block`; the whole of a block that has none."""
    return max((part for part in aligned_divisors(block, align) if part <= cap), default=block)


def _block(size: int, align: int, cap: int) -> int:
    """The largest divisor up to `cap` that goes into tiles; where all are small, tiles and an uneven last block."""
    if size <= TILE:
        return size
    cap = max(cap // TILE, 1) * TILE
    fits = [d for d in aligned_divisors(size, align) if d <= cap and TILE // 2 <= tile_part(d, align, TILE) <= TILE]
    if 2 * max(fits, default=0) >= min(cap, size):
        return max(fits)
    even = round_up(cdiv(size, cdiv(size, cap)), TILE)
    return min(even, size // TILE * TILE)
