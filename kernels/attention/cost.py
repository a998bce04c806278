"""What attention costs: its roofline, an analytic time per config, and a config to start with. Loads no jax."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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
CHAIN_CYCLES = 530.0  # product, maximum, exponential, product: what a sub-block waits for, however small it is


def cost(problem: AttentionProblem) -> Cost:
    """The roofline: two matmuls over the scores that the mask leaves; each array moved once."""
    pairs = problem.q_len * problem.kv_len
    if problem.causal:  # query i sees i + 1 + kv_len - q_len keys
        pairs -= problem.q_len * (problem.q_len - 1) // 2
    flops = 4.0 * problem.batch * problem.heads * pairs * problem.head_dim
    rows = 2 * problem.heads * problem.q_len + 2 * problem.kv_heads * problem.kv_len
    return Cost(flops, problem.batch * rows * problem.head_dim * DTYPE_BYTES[problem.dtype], problem.dtype)


def blocks_of(problem: AttentionProblem, config: Config) -> Blocks:
    return Blocks(
        problem.q_len, problem.kv_len, config["block_q"], config["block_kv"], config["block_kv_compute"],
        problem.causal,
    )  # fmt: skip


def estimate_ms(problem: AttentionProblem, config: Config, chip: Chip) -> float:
    """Time of one call in milliseconds: every block of one head by its kind, times the heads."""
    blocks = blocks_of(problem, config)
    item = DTYPE_BYTES[problem.dtype]
    kv_dma = dma_s(2 * blocks.block_kv * problem.head_dim * item, chip)
    q_dma = dma_s(2 * blocks.block_q * problem.head_dim * item, chip)  # fetched once, stored once

    work = functools.partial(_work_s, problem, blocks, chip, _ones(problem, config))
    full = work(blocks.block_q, blocks.block_kv, masked=False)
    head = 0.0
    cuts: dict[int, float] = {}
    for i in range(blocks.q_blocks):
        if not problem.causal:
            head += blocks.kv_blocks * step_s(full, kv_dma + q_dma / blocks.kv_blocks)
            continue
        last = min(blocks.kv_blocks - 1, blocks.last_key(i) // blocks.block_kv)
        clear = min(last + 1, max(0, (blocks.shift(i, 0) + 1) // blocks.block_kv))
        head += clear * step_s(full, kv_dma) + (blocks.kv_blocks - 1 - last) * step_s(0.0, 0.0)
        for j in range(clear, last + 1):
            shift = blocks.shift(i, j)
            if shift not in cuts:
                cuts[shift] = step_s(_cut_s(work, blocks, shift), kv_dma)
            head += cuts[shift]
        head += q_dma / 2
    heads = problem.batch * problem.heads
    return 1e3 * (cdiv(heads, chip.cores) * head + kv_dma + q_dma)


def _ones(problem: AttentionProblem, config: Config) -> int:
    """Columns of ones beside v that sum the weights on the MXU."""
    return LANES - problem.head_dim % LANES if config.get("row_sum", "vpu") == "mxu" else 0


def _work_s(
    problem: AttentionProblem, blocks: Blocks, chip: Chip, ones: int, rows: int, columns: int, *, masked: bool
) -> float:
    """Seconds of compute for `rows` × `columns` scores, in sub-blocks. MXU and vector unit overlap within them."""
    width = min(columns, blocks.block_kv_compute)
    pieces = columns / width
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
    return pieces * (max(mxu, vector) + chain) + EXPOSED * min(mxu, vector)


def _cut_s(work: Callable[..., float], blocks: Blocks, shift: int) -> float:
    """Compute of a block that the diagonal cuts; rows that see nothing of a sub-block are left out if unrolled."""
    unrolled, total = bool(blocks.diagonals()), 0.0
    for start in range(0, blocks.block_kv, blocks.block_kv_compute):
        first = max(0, start - shift)
        if first < blocks.block_q:
            rows = blocks.block_q - (first if unrolled else 0)
            total += work(rows, blocks.block_kv_compute, masked=True)
    return total


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
    """A good start on every chip: blocks that fit the smallest default VMEM limit (16 MiB)."""
    wide = 1024 if problem.head_dim <= 128 and problem.dtype == "bfloat16" else 512
    block_kv = _largest(problem.kv_len, LANES, wide)
    return {
        "block_q": _largest(problem.q_len, 16, wide),
        "block_kv": block_kv,
        "block_kv_compute": _largest(block_kv, LANES, 512),
    }


def _largest(size: int, align: int, cap: int) -> int:
    """The largest aligned divisor up to `cap` unless all are small: then `cap`, with an uneven last block."""
    if size <= cap:
        return size
    best = max((d for d in aligned_divisors(size, align) if d <= cap), default=0)
    return best if 2 * best >= cap else cap
