"""Flash attention, forward, for a TPU.

The online softmax of Milakov and Gimelshein (arXiv:1805.02867) over blocks of keys, as in FlashAttention
(Dao et al., arXiv:2205.14135): the score matrix exists one sub-block at a time, in registers and VMEM. The
grid walks (batch, heads, q blocks, kv blocks), the last one innermost. Exponentials are base 2, their factor
log2(e) folded into q together with the scale.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.attention.blocks import Blocks

MIB = 1024**2
LANES = 128
# Finite, so that the difference of two masked scores is no NaN; 2 to that power is exactly 0.
MASKED = -0.5 * float(jnp.finfo(jnp.float32).max)


def attention_pallas(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    block_q: int,
    block_kv: int,
    block_kv_compute: int,
    row_sum: str = "vpu",
    vmem_limit_mib: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Softmax attention; lengths need not be multiples of the blocks.

    Args:
        q: ``[batch, heads, q_len, head_dim]``, bfloat16 or float32.
        k: ``[batch, kv_heads, kv_len, head_dim]`` of q's dtype; kv_heads divides heads.
        v: As k.
        causal: Query i sees the keys j ≤ i + kv_len - q_len.
        block_q: Queries per block: the whole q_len or a multiple of 8 (float32) or 16 (bfloat16).
        block_kv: Keys fetched per grid step: the whole kv_len or a multiple of 128.
        block_kv_compute: Keys per softmax step: block_kv itself or a multiple of 128 that divides it.
        row_sum: Where the softmax's denominators are summed: ``vpu``, by vector adds, or ``mxu``, as another 128
            columns of ones beside v. The latter is free where the array is wider than head_dim.
        vmem_limit_mib: VMEM the compiler may use for the kernel, MiB; None is its default.
        interpret: Passed to `pallas_call`.

    Returns:
        ``[batch, heads, q_len, head_dim]`` in q's dtype; the softmax and the sums are float32.
    """
    (batch, heads, q_len, head_dim), (kv_heads, kv_len) = q.shape, k.shape[1:3]
    blocks = Blocks(q_len, kv_len, block_q, block_kv, block_kv_compute, causal)
    group = heads // kv_heads

    def kv_index(b, h, i, j):
        j = jnp.minimum(j, _last_kv(blocks, i))  # Above the diagonal it stays where it was: no fetch.
        return b, jax.lax.div(h, group), j, 0

    ones = LANES - head_dim % LANES if row_sum == "mxu" else 0
    kv_spec = pl.BlockSpec((None, None, block_kv, head_dim), kv_index)
    q_spec = pl.BlockSpec((None, None, block_q, head_dim), lambda b, h, i, j: (b, h, i, 0))
    return pl.pallas_call(
        functools.partial(_attention_kernel, blocks=blocks, ones=ones, scale=head_dim**-0.5 * math.log2(math.e)),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(batch, heads, blocks.q_blocks, blocks.kv_blocks),
        in_specs=[q_spec, kv_spec, kv_spec],
        out_specs=q_spec,
        scratch_shapes=[
            pltpu.VMEM((block_q, head_dim), q.dtype),  # q times the scale
            pltpu.VMEM((block_q, LANES), jnp.float32),  # each row's maximum so far, in every lane
            pltpu.VMEM((block_q, head_dim + ones), jnp.float32),  # the weighted values so far, then their weight
            *([] if ones else [pltpu.VMEM((block_q, LANES), jnp.float32)]),  # their weight, spread over the lanes
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit_mib * MIB if vmem_limit_mib else None,
        ),
        interpret=interpret,
        name="attention",
    )(q, k, v)


def _last_kv(blocks: Blocks, i):
    """The last kv block that q block `i` needs. (`lax.div`, as ``//`` asks Mosaic for the sign, and the chip.)"""
    last = blocks.kv_blocks - 1
    return jnp.minimum(jax.lax.div(blocks.last_key(i), blocks.block_kv), last) if blocks.causal else last


def _attention_kernel(q_ref, k_ref, v_ref, out_ref, *state, blocks: Blocks, ones: int, scale: float) -> None:
    """One grid step: all rows of a q block against one kv block."""
    q_scaled, row_max, acc, *row_sum = state
    head_dim = out_ref.shape[1]
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _():
        q_scaled[...] = (q_ref[...].astype(jnp.float32) * scale).astype(q_scaled.dtype)
        row_max[...] = jnp.full_like(row_max, MASKED)
        for sums in (acc, *row_sum):
            sums[...] = jnp.zeros_like(sums)

    update = functools.partial(_update, k_ref, v_ref, state, ones)
    if blocks.causal:
        _causal_step(update, blocks, i, j)
    else:
        _full_step(update, blocks, j)

    @pl.when(j == _last_kv(blocks, i))
    def _():
        total = acc[:, head_dim : head_dim + 1] if ones else jnp.sum(row_sum[0][...], axis=1, keepdims=True)
        out_ref[...] = (acc[:, :head_dim] / total).astype(out_ref.dtype)


def _full_step(update, blocks: Blocks, j) -> None:
    """Every row sees every key; the last block is as long as its keys."""

    def work(length: int) -> None:
        for start in range(0, length, blocks.block_kv_compute):
            update(start, min(blocks.block_kv_compute, length - start))

    if blocks.tail:
        pl.when(j < blocks.kv_blocks - 1)(lambda: work(blocks.block_kv))
        pl.when(j == blocks.kv_blocks - 1)(lambda: work(blocks.tail))
    else:
        work(blocks.block_kv)


def _causal_step(update, blocks: Blocks, i, j) -> None:
    """Blocks below the diagonal run without a mask, those above not at all.

    Where the diagonal cuts a block at one of few places, each place gets a branch of its own in which rows
    that see nothing of a sub-block are left out, statically. The last kv block's missing keys are seen by no
    query (the last one sees key kv_len - 1), but their values must be zeros: 0 times a NaN is a NaN.
    """
    shift, compute = blocks.shift(i, j), blocks.block_kv_compute
    starts = range(0, blocks.block_kv, compute)

    def valid(start: int):
        may_be_cut = blocks.tail and start + compute > blocks.tail
        return blocks.kv_len - j * blocks.block_kv - start if may_be_cut else None

    @pl.when(shift >= blocks.block_kv - 1)
    def _():
        for start in starts:
            update(start, compute)

    def cut(at: int) -> None:
        for start in starts:
            if start - at < blocks.block_q:
                update(start, compute, shift=at, valid=valid(start))

    for at in blocks.diagonals():
        pl.when(shift == at)(functools.partial(cut, at))
    if not blocks.diagonals():
        for start in starts:
            seen = (shift < blocks.block_kv - 1) & (start - shift < blocks.block_q)
            pl.when(seen)(functools.partial(update, start, compute, shift=shift, valid=valid(start)))


def _update(k_ref, v_ref, state, ones: int, start: int, width: int, *, shift=None, valid=None) -> None:
    """Takes the keys ``start … start + width`` of the kv block into the running softmax.

    Args:
        shift: Row r sees the block's columns c ≤ r + shift; None for all. A Python int also leaves out the
            rows that see none of these keys.
        valid: How many of these keys exist (traced), or None for all.
    """
    q_scaled, row_max, acc, *row_sum = state
    first, clear = _row_range(q_scaled.shape[0], start, width, shift)
    rows = slice(first, None)
    precision = jax.lax.Precision.HIGHEST if q_scaled.dtype == jnp.float32 else None

    scores = jax.lax.dot_general(
        q_scaled[rows, :],
        k_ref[start : start + width, :],
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    if shift is not None:
        scores = _mask(scores, clear - first, shift + first - start)

    old_max = row_max[rows, :]
    new_max = jnp.maximum(old_max, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp2(scores - _across(new_max, width))
    fade = jnp.exp2(old_max - new_max)
    row_max[rows, :] = new_max
    for sums in row_sum:
        sums[rows, :] = sums[rows, :] * fade + _lane_sums(weights)

    values = v_ref[start : start + width, :]
    if valid is not None:
        values = jnp.where(jax.lax.broadcasted_iota(jnp.int32, values.shape, 0) < valid, values, 0)
    if ones:
        values = jnp.concatenate([values, jnp.ones((width, ones), values.dtype)], axis=1)
    weighted = jnp.dot(weights.astype(values.dtype), values, precision=precision, preferred_element_type=jnp.float32)
    acc[rows, :] = acc[rows, :] * _across(fade, acc.shape[1]) + weighted


def _row_range(rows: int, start: int, width: int, shift) -> tuple[int, int]:
    """(first row that sees any of these columns, first row that sees them all), on tile borders.

    Where the shift is not known before the run, every row is taken, and every row masked.
    """
    if shift is None:
        return 0, 0
    if not isinstance(shift, int):
        return 0, rows
    tile = 16
    first = max(0, (start - shift) // tile * tile)
    clear = -(-(start + width - 1 - shift) // tile) * tile
    return first, max(first, min(rows, clear))


def _mask(scores: jax.Array, rows: int, shift) -> jax.Array:
    """Hides the columns c > r + shift of each row r; from row `rows` on there are none."""
    if rows == 0:
        return scores
    top = scores[:rows, :]
    column = jax.lax.broadcasted_iota(jnp.int32, top.shape, 1)
    row = jax.lax.broadcasted_iota(jnp.int32, top.shape, 0)
    top = jnp.where(column - row <= shift, top, MASKED)
    return top if rows == scores.shape[0] else jnp.concatenate([top, scores[rows:, :]], axis=0)


def _across(statistic: jax.Array, width: int) -> jax.Array:
    """``[rows, 128]`` of equal lanes, as ``[rows, width]``: the same registers again, no work."""
    copies = -(-width // LANES)
    wide = jnp.concatenate([statistic] * copies, axis=1) if copies > 1 else statistic
    return wide if wide.shape[1] == width else wide[:, :width]


def _lane_sums(weights: jax.Array) -> jax.Array:
    """Sums of each row as ``[rows, 128]`` parts, one per lane: the sum across lanes waits until the end."""
    rows, width = weights.shape
    if width % LANES:
        lane = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
        return jnp.where(lane == 0, jnp.sum(weights, axis=1, keepdims=True), 0.0)
    return sum(weights[:, lane : lane + LANES] for lane in range(0, width, LANES))
