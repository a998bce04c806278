"""Flash attention, forward, for a TPU.

The online softmax of Milakov and Gimelshein (arXiv:1805.02867) over blocks of keys, as in FlashAttention
(Dao et al., arXiv:2205.14135): the score matrix exists one tile at a time, in registers and VMEM. The grid
walks (batch, heads, q blocks, kv blocks), the last one innermost; within a step, loops walk the block's tiles
up to the diagonal and no further. So the blocks decide what is fetched, the tiles how much code there is and
how much of it the units can overlap. Exponentials are base 2, their factor log2(e) folded into q together
with the scale.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels._compiler import compiler_params
from kernels._precision import dot_precision
from kernels.attention.blocks import Blocks

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
    block_q_compute: int | None = None,
    block_kv_compute: int | None = None,
    unroll: int = 1,
    row_sum: str = "vpu",
    vmem_limit_mib: int | None = None,
    save_lse: bool = False,
    interpret: Any = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention; lengths need not be multiples of the blocks.

    Args:
        q: ``[batch, heads, q_len, head_dim]``, bfloat16 or float32.
        k: ``[batch, kv_heads, kv_len, head_dim]`` of q's dtype; kv_heads divides heads.
        v: As k.
        causal: Query i sees the keys j ≤ i + kv_len - q_len.
        block_q: Queries per block: the whole q_len or a multiple of 8 (float32) or 16 (bfloat16).
        block_kv: Keys fetched per grid step: the whole kv_len or a multiple of 128.
        block_q_compute: Queries per tile: block_q itself (None) or a multiple of 8 or 16 that divides it.
        block_kv_compute: Keys per tile: block_kv itself (None) or a multiple of 128 that divides it.
        unroll: Unmasked tiles in one pass of the loop over keys.
        row_sum: What sums the softmax's denominators: "vpu", or "mxu" by a column of ones beside v.
        vmem_limit_mib: VMEM the compiler may use for the kernel, MiB; None is its default.
        save_lse: Whether to return what the backward pass needs as well.
        interpret: Passed to `pallas_call`.

    Returns:
        ``[batch, heads, q_len, head_dim]`` in q's dtype; the softmax and the sums are float32. With `save_lse` also
        ``[batch, heads, q_len]`` float32: the log-sum-exp of each query's scaled scores.
    """
    (batch, heads, q_len, head_dim), (kv_heads, kv_len) = q.shape, k.shape[1:3]
    tile = block_q_compute or block_q, block_kv_compute or block_kv
    blocks = Blocks(q_len, kv_len, block_q, block_kv, *tile, causal)
    group = heads // kv_heads
    # Columns of ones beside v fill its last register's lanes: the matmul then leaves the sums of the weights there.
    ones = LANES - head_dim % LANES if row_sum == "mxu" else 0

    def kv_index(b, h, i, j):
        j = jnp.minimum(j, last_kv(blocks, i))  # Above the diagonal it stays where it was: no fetch.
        return b, lax.div(h, group), j, 0

    kv_spec = pl.BlockSpec((None, None, block_kv, head_dim), kv_index)
    q_spec = pl.BlockSpec((None, None, block_q, head_dim), lambda b, h, i, j: (b, h, i, 0))
    scratch = [
        pltpu.VMEM((block_q, head_dim), q.dtype),  # q times the scale
        pltpu.VMEM((block_q, LANES), jnp.float32),  # each row's maximum so far, in every lane
        pltpu.VMEM((block_q, head_dim + ones), jnp.float32),  # the weighted values so far
    ]
    if not ones:
        scratch.append(pltpu.VMEM((block_q, LANES), jnp.float32))  # each row's sum so far, spread over the lanes
    kernel = functools.partial(
        _attention_kernel,
        blocks=blocks,
        scale=head_dim**-0.5 * math.log2(math.e),
        ones=ones,
        unroll=unroll,
        save_lse=save_lse,
    )
    out_shape, out_specs = [jax.ShapeDtypeStruct(q.shape, q.dtype)], [q_spec]
    if save_lse:  # in every lane, as a block has at least as many
        out_shape.append(jax.ShapeDtypeStruct((*q.shape[:3], LANES), jnp.float32))
        out_specs.append(pl.BlockSpec((None, None, block_q, LANES), q_spec.index_map))
    out, *lse = pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=(batch, heads, blocks.q_blocks, blocks.kv_blocks),
        in_specs=[q_spec, kv_spec, kv_spec],
        out_specs=out_specs,
        scratch_shapes=scratch,
        compiler_params=compiler_params("parallel", "parallel", "parallel", "arbitrary", vmem_limit_mib=vmem_limit_mib),
        interpret=interpret,
        name="attention",
    )(q, k, v)
    return (out, lse[0][..., 0]) if save_lse else out


def last_kv(blocks: Blocks, i):
    """The last kv block that q block `i` needs. (`lax.div`, as ``//`` asks Mosaic for the sign, and the chip.)"""
    last = blocks.kv_blocks - 1
    return jnp.minimum(lax.div(blocks.last_key(i), blocks.block_kv), last) if blocks.causal else last


def _attention_kernel(
    q_ref, k_ref, v_ref, out_ref, *refs, blocks: Blocks, scale: float, ones: int, unroll: int, save_lse: bool
) -> None:
    """One grid step: all rows of a q block against one kv block."""
    lse_refs, (q_scaled, row_max, acc, *row_sum) = refs[:save_lse], refs[save_lse:]
    i, j = pl.program_id(2), pl.program_id(3)
    head_dim = q_scaled.shape[1]

    @pl.when(j == 0)
    def _():
        q_scaled[...] = (q_ref[...].astype(jnp.float32) * scale).astype(q_scaled.dtype)
        row_max[...] = jnp.full_like(row_max, MASKED)
        acc[...] = jnp.zeros_like(acc)
        for sums in row_sum:
            sums[...] = jnp.zeros_like(sums)

    update = functools.partial(_update, k_ref, v_ref, (q_scaled, row_max, acc, *row_sum), blocks, ones)

    def row_tile(r, _) -> None:
        first_row = aligned(r, blocks.block_q_compute)
        clear, seen = visible(blocks, i, j, first_row)

        def several(group, _) -> None:
            for index in range(unroll):
                update(first_row, group * unroll + index)

        groups = clear // unroll if isinstance(clear, int) else lax.div(clear, unroll)
        lax.fori_loop(0, groups, several, None)
        if unroll > 1:
            lax.fori_loop(groups * unroll, clear, lambda c, _: update(first_row, c), None)
        if blocks.masked:
            shift, valid = blocks.shift(i, j) + first_row, blocks.kv_len - j * blocks.block_kv
            lax.fori_loop(clear, seen, lambda c, _: update(first_row, c, shift=shift, valid=valid), None)

    lax.fori_loop(0, tile_rows(blocks, i), row_tile, None)

    @pl.when(j == last_kv(blocks, i))
    def _():
        sums = row_sum[0][...] if row_sum else acc[:, head_dim : head_dim + 1]
        total = jnp.sum(sums, axis=1, keepdims=True) if row_sum else sums
        out_ref[...] = (acc[:, :head_dim] / total).astype(out_ref.dtype)
        for lse_ref in lse_refs:
            lse_ref[...] = (row_max[...] + jnp.log2(total)) * math.log(2)


def tile_rows(blocks: Blocks, i):
    """Row tiles of q block `i` that hold queries."""
    if not blocks.uneven_q:
        return blocks.row_tiles
    left = blocks.q_len - i * blocks.block_q
    return jnp.minimum(blocks.row_tiles, lax.div(left + blocks.block_q_compute - 1, blocks.block_q_compute))


def visible(blocks: Blocks, i, j, first_row):
    """(tiles of a row of tiles that need no mask, those that are needed at all), from the left; the rest is skipped."""
    clear = seen = blocks.column_tiles
    width = blocks.block_kv_compute
    if blocks.uneven_kv:
        valid = jnp.minimum(blocks.kv_len - j * blocks.block_kv, blocks.block_kv)
        clear, seen = lax.div(valid, width), lax.div(valid + width - 1, width)
    if blocks.causal:
        shift = blocks.shift(i, j) + first_row
        # Below zero, `lax.div` rounds up: to zero at the most, which is what is wanted.
        clear = jnp.clip(lax.div(shift + 1, width), 0, clear)
        seen = jnp.clip(lax.div(shift + blocks.block_q_compute - 1 + width, width), 0, seen)
    return clear, seen


def aligned(index, size: int):
    return pl.multiple_of(index * size, size)


def _update(k_ref, v_ref, state, blocks: Blocks, ones: int, first_row, tile, *, shift=None, valid=None) -> None:
    """Takes one tile of scores into the running softmax.

    Args:
        first_row: The tile's first row in the block.
        tile: Its number from the left.
        shift: The tile's row r sees the block's columns c ≤ r + shift; None for all.
        valid: The block's keys that exist; None for all.
    """
    q_scaled, row_max, acc, *row_sum = state
    width = blocks.block_kv_compute
    first_column = aligned(tile, width)
    rows, columns = pl.ds(first_row, blocks.block_q_compute), pl.ds(first_column, width)
    masked = shift is not None
    precision = dot_precision(q_scaled.dtype)

    scores = lax.dot_general(
        q_scaled[rows, :],
        k_ref[columns, :],
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    if masked and blocks.causal:  # The last query sees the last key: no query sees one that does not exist.
        scores = _mask(scores, shift - first_column)
    elif masked:
        column = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = jnp.where(column < valid - first_column, scores, MASKED)

    old_max = row_max[rows, :]
    new_max = jnp.maximum(old_max, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp2(scores - _across(new_max, width))
    fade = jnp.exp2(old_max - new_max)
    row_max[rows, :] = new_max
    for sums in row_sum:
        sums[rows, :] = sums[rows, :] * fade + _lane_sums(weights)

    values = v_ref[columns, :]
    if masked and blocks.uneven_kv:  # 0 times the NaN that may lie there is a NaN
        key = lax.broadcasted_iota(jnp.int32, values.shape, 0)
        values = jnp.where(key < valid - first_column, values, 0)
    if ones:
        values = jnp.concatenate([values, jnp.ones((width, ones), values.dtype)], axis=1)
    weighted = jnp.dot(weights.astype(values.dtype), values, precision=precision, preferred_element_type=jnp.float32)
    acc[rows, :] = acc[rows, :] * _across(fade, acc.shape[1]) + weighted


def _mask(scores: jax.Array, shift) -> jax.Array:
    """Hides the columns c > r + shift of each row r."""
    column, row = (lax.broadcasted_iota(jnp.int32, scores.shape, axis) for axis in (1, 0))
    return jnp.where(column - row <= shift, scores, MASKED)


def _across(statistic: jax.Array, width: int) -> jax.Array:
    """``[rows, 128]`` of equal lanes, as ``[rows, width]``: the same registers again, no work."""
    copies = -(-width // LANES)
    wide = jnp.concatenate([statistic] * copies, axis=1) if copies > 1 else statistic
    return wide if wide.shape[1] == width else wide[:, :width]


def _lane_sums(weights: jax.Array) -> jax.Array:
    """Sums of each row as ``[rows, 128]`` parts, one per lane: the sum across lanes waits until the end."""
    rows, width = weights.shape
    if width % LANES:
        lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
        return jnp.where(lane == 0, jnp.sum(weights, axis=1, keepdims=True), 0.0)
    return sum(weights[:, lane : lane + LANES] for lane in range(0, width, LANES))
