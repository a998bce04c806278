"""Flash attention, forward, for a TPU.

The online softmax of Milakov and Gimelshein (arXiv:1805.02867) over blocks of keys, as in FlashAttention
(Dao et al., arXiv:2205.14135): the score matrix exists one tile at a time, in registers and VMEM. The grid
walks (batch, heads, q blocks, kv blocks), the last one innermost; within a step, loops walk the block's tiles
from a window's edge up to the diagonal and no further. So the blocks decide what is fetched, the tiles how much
code there is and how much of it the units can overlap. Exponentials are base 2, their factor log2(e) folded
into q together with the scale.
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

from kernels._compiler import compiler_params, output_like
from kernels.attention.blocks import Blocks
from kernels.attention.tiles import (
    LANES,
    Scores,
    across,
    aligned,
    dot,
    existing,
    for_each_tile,
    key_tiles,
    kv_block,
    row_tiles,
    seen,
    to_column,
)

# Finite, so that the difference of two masked scores is no NaN; 2 to that power is exactly 0.
MASKED = -0.5 * float(jnp.finfo(jnp.float32).max)


def attention_pallas(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_segments: jax.Array | None = None,
    kv_segments: jax.Array | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
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
        v: ``[batch, kv_heads, kv_len, v_head_dim]`` of q's dtype.
        q_segments: ``[batch, q_len]`` int32, given together with kv_segments: a query sees the keys of its own id.
        kv_segments: ``[batch, kv_len]`` int32.
        causal: Query i sees the keys j ≤ i + kv_len - q_len.
        window: And of these the last so many, itself included; None for all.
        soft_cap: Scores s become soft_cap · tanh(s / soft_cap).
        scale: Of the scores; None is 1 / sqrt(head_dim).
        block_q: Queries per block: the whole q_len or a multiple of 8 (float32) or 16 (bfloat16); with segments of 128.
        block_kv: Keys fetched per grid step: the whole kv_len or a multiple of 128.
        block_q_compute: Queries per tile: block_q itself (None) or a multiple of 8 or 16 that divides it.
        block_kv_compute: Keys per tile: block_kv itself (None) or a multiple of 128 that divides it.
        unroll: Unmasked tiles in one pass of the loop over keys.
        row_sum: What sums the softmax's denominators: "vpu", or "mxu" by a column of ones beside v.
        vmem_limit_mib: VMEM the compiler may use for the kernel, MiB; None is its default.
        save_lse: Whether to return what the backward pass needs as well.
        interpret: Passed to `pallas_call`.

    Returns:
        ``[batch, heads, q_len, v_head_dim]`` in q's dtype; the softmax and the sums are float32. Zeros for a query that
        sees no key. With `save_lse` also ``[batch, heads, q_len]`` float32: the log-sum-exp of each query's scores.
    """
    (batch, heads, q_len, head_dim), (kv_heads, kv_len), v_dim = q.shape, k.shape[1:3], v.shape[3]
    packed = q_segments is not None
    config = {"block_q": block_q, "block_kv": block_kv}
    config |= {"block_q_compute": block_q_compute, "block_kv_compute": block_kv_compute}
    blocks = Blocks.of(q_len, kv_len, config, causal=causal, window=window, packed=packed)
    group = heads // kv_heads
    # Columns of ones beside v fill its last register's lanes: the matmul then leaves the sums of the weights there.
    ones = LANES - v_dim % LANES if row_sum == "mxu" else 0

    def kv_index(b, h, i, step):
        j, first = kv_block(blocks, i, step)
        return b, lax.div(h, group), jnp.maximum(j, first), 0  # No fetch where the block stays the same.

    def q_spec(dim: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, block_q, dim), lambda b, h, i, step: (b, h, i, 0))

    in_specs = [q_spec(head_dim), *(pl.BlockSpec((None, None, block_kv, dim), kv_index) for dim in (head_dim, v_dim))]
    operands = [q, k, v]
    scratch = [
        pltpu.VMEM((block_q, head_dim), q.dtype),  # q times the scale
        pltpu.VMEM((block_q, LANES), jnp.float32),  # each row's maximum so far, in every lane
        pltpu.VMEM((block_q, v_dim + ones), jnp.float32),  # the weighted values so far
    ]
    if not ones:
        scratch.append(pltpu.VMEM((block_q, LANES), jnp.float32))  # each row's sum so far, spread over the lanes
    if packed:
        operands += [q_segments[:, None, :], kv_segments[:, None, :]]
        in_specs += [
            pl.BlockSpec((None, 1, block_q), lambda b, h, i, step: (b, 0, i)),
            pl.BlockSpec((None, 1, block_kv), lambda b, h, i, step: (b, 0, kv_index(b, h, i, step)[2])),
        ]
        scratch.append(pltpu.VMEM((block_q, LANES), jnp.int32))  # each row's segment, in every lane
    out_shape, out_specs = [output_like((*q.shape[:3], v_dim), q.dtype, q)], [q_spec(v_dim)]
    if save_lse:  # in every lane, as a block has at least as many
        out_shape.append(output_like((*q.shape[:3], LANES), jnp.float32, q))
        out_specs.append(q_spec(LANES))
    out, *lse = pl.pallas_call(
        functools.partial(
            _attention_kernel,
            blocks=blocks,
            scores=Scores.of(q, scale, soft_cap),
            ones=ones,
            unroll=unroll,
            save_lse=save_lse,
        ),
        out_shape=out_shape,
        grid=(batch, heads, blocks.q_blocks, blocks.kv_steps),
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=scratch,
        compiler_params=compiler_params("parallel", "parallel", "parallel", "arbitrary", vmem_limit_mib=vmem_limit_mib),
        interpret=interpret,
        name="attention",
    )(*operands)
    return (out, lse[0][..., 0]) if save_lse else out


def _attention_kernel(
    q_ref,
    k_ref,
    v_ref,
    *refs,
    blocks: Blocks,
    scores: Scores,
    ones: int,
    unroll: int,
    save_lse: bool,
) -> None:
    """One grid step: all rows of a q block against one kv block."""
    (q_ids_ref, kv_ids_ref), refs = (refs[:2], refs[2:]) if blocks.packed else ((None, None), refs)
    out_ref, *lse_refs = refs[: 1 + save_lse]
    q_scaled, row_max, acc, *rest = refs[1 + save_lse :]
    row_sum, q_ids = (rest[:-1], rest[-1]) if blocks.packed else (rest, None)
    i, step = pl.program_id(2), pl.program_id(3)
    j, first_j = kv_block(blocks, i, step)
    v_dim = v_ref.shape[1]

    @pl.when(step == 0)
    def _():
        q_scaled[...] = scores.scaled(q_ref[...])
        row_max[...] = jnp.full_like(row_max, MASKED)
        acc[...] = jnp.zeros_like(acc)
        for sums in row_sum:
            sums[...] = jnp.zeros_like(sums)
        if blocks.packed:
            to_column(q_ids, q_ids_ref)

    def row_tile(r, _) -> None:
        first_row = aligned(r, blocks.block_q_compute, blocks.row_tiles)
        rows = pl.ds(first_row, blocks.block_q_compute)

        def update(tile, *, masked: bool) -> None:
            first_column = aligned(tile, blocks.block_kv_compute, blocks.column_tiles)
            columns = pl.ds(first_column, blocks.block_kv_compute)
            tile_scores, _ = scores.of_products(dot(q_scaled[rows, :], k_ref[columns, :], (1, 1)))
            values = v_ref[columns, :]
            if masked:
                shape = tile_scores.shape
                ids = (across(q_ids[rows, :], shape[1]), kv_ids_ref[:, columns]) if blocks.packed else None
                mask = seen(blocks, (i, j, first_row, first_column), shape, query_axis=0, keys=True, segments=ids)
                tile_scores = jnp.where(mask, tile_scores, MASKED)
                if blocks.uneven_kv:
                    values = existing(values, blocks.keys_left(j) - first_column)
            _update(rows, tile_scores, values, row_max, acc, row_sum, ones)

        for_each_tile(blocks, key_tiles(blocks, i, j, first_row), update, masked=blocks.masked, unroll=unroll)

    @pl.when(j >= first_j)
    def _():
        lax.fori_loop(0, row_tiles(blocks, i), row_tile, None)

    @pl.when(step == blocks.kv_steps - 1)
    def _():
        total = jnp.sum(row_sum[0][...], axis=1, keepdims=True) if row_sum else acc[:, v_dim : v_dim + 1]
        out = acc[:, :v_dim] / total
        if blocks.packed:
            out = jnp.where(row_max[:, :1] == MASKED, 0.0, out)
        out_ref[...] = out.astype(out_ref.dtype)
        for lse_ref in lse_refs:
            lse_ref[...] = (row_max[...] + jnp.log2(total)) * math.log(2)


def _update(rows, scores: jax.Array, values: jax.Array, row_max, acc, row_sum, ones: int) -> None:
    """Takes one tile of scores, and the values of its keys, into the running softmax of its rows."""
    old_max = row_max[rows, :]
    new_max = jnp.maximum(old_max, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp2(scores - across(new_max, scores.shape[1]))
    fade = jnp.exp2(old_max - new_max)
    row_max[rows, :] = new_max
    for sums in row_sum:
        sums[rows, :] = sums[rows, :] * fade + _lane_sums(weights)
    if ones:
        values = jnp.concatenate([values, jnp.ones((values.shape[0], ones), values.dtype)], axis=1)
    acc[rows, :] = acc[rows, :] * across(fade, acc.shape[1]) + dot(weights.astype(values.dtype), values, (1, 0))


def _lane_sums(weights: jax.Array) -> jax.Array:
    """Sums of each row as ``[rows, 128]`` parts, one per lane: the sum across lanes waits until the end."""
    rows, width = weights.shape
    if width % LANES:
        lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
        return jnp.where(lane == 0, jnp.sum(weights, axis=1, keepdims=True), 0.0)
    return sum(weights[:, lane : lane + LANES] for lane in range(0, width, LANES))
