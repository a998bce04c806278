"""What attention costs: its roofline, an analytic time per config, and a config to start with. Loads no jax."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from autotune.chips import MIB, Chip
from autotune.kernel import Cost
from autotune.outcome import Config
from autotune.problem import DTYPE_BYTES
from autotune.space import aligned_divisors
from kernels._tpu_model import LANES, cdiv, dma_s, mxu_s, round_up, step_s, sublanes, vmem_limits, vpu_s
from kernels.attention.blocks import Blocks
from kernels.attention.problem import AttentionProblem

# Fitted to the TPU compiler's own cycle counts of 22 block shapes (4096 causal, head_dim 128, v5e and v6e;
# mean error 7% over a range of 18×). They are what is left after the compiler's overlapping, not operation counts.
SOFTMAX_OPERATIONS = 1.0  # vector operations per score
MASK_OPERATIONS = 0.2  # and per score of a block that the diagonal cuts
CAP_OPERATIONS = 0.5  # and per score under a soft cap; not fitted, and its tanh is a second exponential
STATISTIC_OPERATIONS = 7.5  # per row, sub-block and lane: maximum across lanes, fade, updates
EXPOSED = 0.1  # of the lesser of the two units' times in a block, not hidden behind the other's
CHAIN_CYCLES = 530.0  # product, maximum, exponential, product: what a tile waits for, however small it is
TILE = 512  # side of a heuristic tile
SAMPLED = 4096  # rows of tiles that are summed one by one
ROOM = 8 * MIB  # VMEM that the fused backward kernel takes beside its blocks and sums: tiles of scores, mostly
LOOP_CYCLES = 60.0  # of a pass of the loop over tiles


def cost(problem: AttentionProblem) -> Cost:
    """The roofline: two matmuls over the scores that the mask leaves; each array moved once.

    Segments leave what their ids say, which is not known here: they count as one.
    """
    flops = 2.0 * _pairs(problem) * (problem.head_dim + problem.value_dim)
    return Cost(flops, _row_bytes(problem), problem.dtype)


def _pairs(problem: AttentionProblem) -> int:
    """Scores that the mask leaves."""
    q_len, kv_len = problem.q_len, problem.kv_len
    pairs = q_len * kv_len
    if problem.causal:  # query i sees i + 1 + kv_len - q_len keys
        pairs -= q_len * (q_len - 1) // 2
    if problem.window is not None:  # and is blind to the first i + 1 + kv_len - q_len - window of them
        most = kv_len - problem.window
        fewest = max(most - q_len, 0)
        pairs -= (most * (most + 1) - fewest * (fewest + 1)) // 2
    return problem.batch * problem.heads * pairs


def _row_bytes(problem: AttentionProblem) -> int:
    """Bytes of queries, keys, values and results (or the gradients of these), and of segment ids."""
    rows = problem.heads * problem.q_len + problem.kv_heads * problem.kv_len
    ids = 4 * (problem.q_len + problem.kv_len) if problem.packed else 0
    dims = problem.head_dim + problem.value_dim
    return problem.batch * (rows * dims * DTYPE_BYTES[problem.dtype] + ids)


def blocks_of(problem: AttentionProblem, config: Config) -> Blocks:
    mask = {"causal": problem.causal, "window": problem.window, "packed": problem.packed}
    return Blocks.of(problem.q_len, problem.kv_len, config, **mask)


def estimate_ms(problem: AttentionProblem, config: Config, chip: Chip) -> float:
    """Time of one call in milliseconds: the tiles of one head by their kind, and its grid steps, times the heads."""
    blocks = blocks_of(problem, config)
    item = DTYPE_BYTES[problem.dtype]
    dims = problem.head_dim + problem.value_dim
    kv_dma = dma_s(blocks.block_kv * dims * item, chip)
    q_dma = dma_s(blocks.block_q * dims * item, chip)  # fetched once, stored once

    clear, cut = _tiles(blocks)
    tile = functools.partial(_tile_s, problem, blocks, chip, _ones(problem, config))
    compute = clear * tile(masked=False) + cut * tile(masked=True)
    compute += (clear / config.get("unroll", 1) + cut) * LOOP_CYCLES / (chip.clock_ghz * 1e9)

    needed, all_steps = _steps(blocks), blocks.q_blocks * blocks.kv_steps
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
        if blocks.window is not None:
            blind = np.maximum(shift + 1 - blocks.window, 0) // width
            clear = np.maximum(clear + (-np.maximum(shift + rows - blocks.window, 0) // width), 0)
            seen = seen - blind
    else:
        clear = np.full_like(first, blocks.kv_len // width)
        seen = np.full_like(first, cdiv(blocks.kv_len, width))
    if blocks.packed:
        clear = np.zeros_like(clear)
    return weight * float(clear.sum()), weight * float((seen - clear).sum())


def _steps(blocks: Blocks) -> float:
    """Grid steps of one head that have anything to do."""
    if not blocks.causal:
        return blocks.q_blocks * blocks.kv_blocks
    index, weight = _evenly(blocks.q_blocks)
    last = np.minimum(blocks.last_key(index) // blocks.block_kv, blocks.kv_blocks - 1)
    first = 0 if blocks.window is None else np.maximum(blocks.first_key(index), 0) // blocks.block_kv
    return weight * float((last - first + 1).sum())


def _ones(problem: AttentionProblem, config: Config) -> int:
    """Columns of ones beside v that sum the weights on the MXU."""
    return LANES - problem.value_dim % LANES if config.get("row_sum", "vpu") == "mxu" else 0


def _tile_s(problem: AttentionProblem, blocks: Blocks, chip: Chip, ones: int, *, masked: bool) -> float:
    """Seconds of compute for one tile of scores. MXU and vector unit overlap within it."""
    rows, width = blocks.block_q_compute, blocks.block_kv_compute
    dim = round_up(problem.value_dim, LANES)
    mxu = mxu_s(rows, width, problem.head_dim, problem.dtype, chip)
    mxu += mxu_s(rows, problem.value_dim + ones, width, problem.dtype, chip)
    scores = rows * round_up(width, LANES)
    operations = SOFTMAX_OPERATIONS * (0.8 if ones else 1.0) + (MASK_OPERATIONS if masked else 0.0)
    operations += CAP_OPERATIONS if problem.soft_cap else 0.0
    vpu = vpu_s(operations * scores, chip)
    vpu += vpu_s(rows * (STATISTIC_OPERATIONS * LANES + 2 * dim), chip)
    exponent = vpu_s(scores * (2 if problem.soft_cap else 1) + rows * LANES, chip, slots=1)
    vector = max(vpu, exponent)
    chain = CHAIN_CYCLES / (chip.clock_ghz * 1e9)
    return max(mxu, vector) + chain + EXPOSED * min(mxu, vector)


def vmem_lower_bound(problem: AttentionProblem, config: Config) -> int:
    """Bytes of VMEM that the blocks cannot do without; what the compiler adds comes on top."""
    blocks = blocks_of(problem, config)
    dim, v_dim = problem.head_dim, problem.value_dim
    item = DTYPE_BYTES[problem.dtype]
    heads = problem.batch * problem.heads
    q_buffers = 1 if heads == 1 and blocks.q_blocks == 1 else 2
    kv_buffers = 1 if problem.batch * problem.kv_heads == 1 and blocks.kv_blocks == 1 else 2
    pipelined = (q_buffers * blocks.block_q + kv_buffers * blocks.block_kv) * (dim + v_dim)
    ones = _ones(problem, config)
    scratch = blocks.block_q * (dim * item + 4 * (v_dim + ones) + 4 * LANES * (1 if ones else 2))
    return pipelined * item + scratch


def heuristic_config(problem: AttentionProblem) -> dict[str, Any]:
    """A good start on every chip: long blocks in small tiles that fit the smallest default VMEM limit (16 MiB)."""
    wide = _wide(problem)
    rows = query_rows(problem)
    block_q, block_kv = _block(problem.q_len, rows, 2048 // wide), _block(problem.kv_len, LANES, 4096 // wide)
    return {
        "block_q": block_q,
        "block_kv": block_kv,
        "block_q_compute": tile_part(block_q, rows, TILE),
        "block_kv_compute": tile_part(block_kv, LANES, TILE),
        "unroll": 2,
    }


def _wide(problem: AttentionProblem) -> int:
    """A row of a block takes VMEM by its width: how many 128 wide ones of bfloat16 it is worth."""
    return max(cdiv(max(problem.head_dim, problem.value_dim), LANES) * DTYPE_BYTES[problem.dtype] // 2, 1)


def query_rows(problem: AttentionProblem) -> int:
    """What a block of queries is a multiple of, in the forward pass: segment ids lie along the lanes."""
    return LANES if problem.packed else sublanes(problem.dtype)


def backward_cost(problem: AttentionProblem, *, of_queries: bool, of_keys: bool) -> Cost:
    """The roofline of a backward kernel: its matmuls over the scores that the mask leaves.

    Args:
        of_queries: Whether it gives the gradient of q.
        of_keys: Whether it gives those of k and v.
    """
    queries = problem.batch * problem.heads * problem.q_len
    keys = problem.batch * problem.kv_heads * problem.kv_len
    item, dims = DTYPE_BYTES[problem.dtype], problem.head_dim + problem.value_dim
    written = queries * problem.head_dim * of_queries + keys * dims * of_keys
    statistics = 2 * 4 * queries
    flops = 2.0 * _pairs(problem) * (dims + problem.head_dim * of_queries + dims * of_keys)
    return Cost(flops, _row_bytes(problem) + written * item + statistics, problem.dtype)


def backward_estimate_ms(
    problem: AttentionProblem, config: Config, chip: Chip, *, of_queries: bool, of_keys: bool
) -> float:
    """Time of a backward kernel in milliseconds: of the forward one with these blocks, by the number of matmuls."""
    return estimate_ms(problem, config, chip) * (2 + of_queries + 2 * of_keys) / 2


def backward_vmem_lower_bound(problem: AttentionProblem, config: Config, *, of_queries: bool, of_keys: bool) -> int:
    """Bytes of VMEM that a backward kernel's blocks cannot do without: two buffers of each, and the float32 sums."""
    block_q, block_kv, item = config["block_q"], config["block_kv"], DTYPE_BYTES[problem.dtype]
    dim, v_dim = (round_up(width, LANES) for width in (problem.head_dim, problem.value_dim))
    dims = dim + v_dim
    blocks = 2 * (block_q + block_kv) * dims * item
    if not (of_queries and of_keys):
        return blocks + 4 * (block_q * dim if of_queries else block_kv * dims)
    keys = cdiv(problem.kv_len, block_kv) * block_kv
    buffers = 1 if problem.batch * problem.kv_heads == 1 else 2
    return blocks + 4 * block_q * dim + keys * dims * 4 + buffers * problem.kv_len * dims * item


def backward_heuristic_config(problem: AttentionProblem) -> dict[str, Any]:
    """A good start on every chip for all backward kernels: as `heuristic_config`, in blocks half as long.

    Queries lie along the lanes there, so that their blocks and tiles are multiples of 128, or all of them.
    """
    wide = _wide(problem)
    block_q, block_kv = (_block(length, LANES, 1024 // wide) for length in (problem.q_len, problem.kv_len))
    return {
        "block_q": block_q,
        "block_kv": block_kv,
        "block_q_compute": tile_part(block_q, LANES, TILE),
        "block_kv_compute": tile_part(block_kv, LANES, TILE),
    }


def fused_heuristic_config(problem: AttentionProblem, chip: Chip) -> dict[str, Any] | None:
    """`backward_heuristic_config` under a limit that leaves room for the sums of a whole kv head; None if none does."""
    blocks = backward_heuristic_config(problem)
    need = ROOM + backward_vmem_lower_bound(problem, blocks, of_queries=True, of_keys=True)
    limits = [limit for limit in vmem_limits(chip) if need <= limit * MIB]
    return {**blocks, "vmem_limit_mib": limits[0]} if limits else None


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
