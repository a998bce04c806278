"""Flash attention, backward, for a TPU: dq in one kernel, dk and dv in another.

As in FlashAttention-2 (Dao, arXiv:2307.08691), the weights are computed again from the scores and the forward
pass's log-sum-exp, tile by tile. `dq` walks keys for a block of queries, as the forward pass does. `dk` and `dv`
walk the queries of all heads that share a kv head for a block of keys, on transposed tiles: so both of their
products, and the statistics along the lanes, come as they are.
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
from kernels.attention.pallas import LANES, MASKED, aligned, last_kv, tile_rows, visible

LOG2E = math.log2(math.e)


def attention_dq_pallas(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    grad: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    *,
    causal: bool = True,
    block_q: int,
    block_kv: int,
    block_q_compute: int | None = None,
    block_kv_compute: int | None = None,
    vmem_limit_mib: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """The gradient of attention with respect to q.

    Args:
        q: ``[batch, heads, q_len, head_dim]``, bfloat16 or float32.
        k: ``[batch, kv_heads, kv_len, head_dim]`` of q's dtype; so is v.
        v: As k.
        grad: Of the result; as q.
        lse: ``[batch, heads, q_len]`` float32: the log-sum-exp of each query's scaled scores.
        delta: As lse: the sum of grad times the result over head_dim.
        causal: Query i sees the keys j ≤ i + kv_len - q_len.
        block_q: Queries per block: the whole q_len or a multiple of 128.
        block_kv: Keys fetched per grid step: the whole kv_len or a multiple of 128.
        block_q_compute: Queries per tile, a part of block_q (None: all of it); block_kv_compute: the same of keys.
        vmem_limit_mib: VMEM the compiler may use for the kernel, MiB; None is its default.
        interpret: Passed to `pallas_call`.

    Returns:
        As q; the sums are float32.
    """
    blocks = _blocks(q, k, causal, block_q, block_kv, block_q_compute, block_kv_compute)
    batch, heads, _, head_dim = q.shape
    group = heads // k.shape[1]

    def kv_index(b, h, i, j):
        return b, lax.div(h, group), jnp.minimum(j, last_kv(blocks, i)), 0

    kv_spec = pl.BlockSpec((None, None, block_kv, head_dim), kv_index)
    q_spec = pl.BlockSpec((None, None, block_q, head_dim), lambda b, h, i, j: (b, h, i, 0))
    row_spec = pl.BlockSpec((None, None, 1, block_q), lambda b, h, i, j: (b, h, 0, i))
    return pl.pallas_call(
        functools.partial(_dq_kernel, blocks=blocks, scale=head_dim**-0.5),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(batch, heads, blocks.q_blocks, blocks.kv_blocks),
        in_specs=[q_spec, kv_spec, kv_spec, q_spec, row_spec, row_spec],
        out_specs=q_spec,
        scratch_shapes=[
            pltpu.VMEM((block_q, head_dim), q.dtype),  # q times the scale
            pltpu.VMEM((block_q, LANES), jnp.float32),  # the log-sum-exp to base 2, of each row in every lane
            pltpu.VMEM((block_q, LANES), jnp.float32),  # delta, the same way
            pltpu.VMEM((block_q, head_dim), jnp.float32),
        ],
        compiler_params=compiler_params("parallel", "parallel", "parallel", "arbitrary", vmem_limit_mib=vmem_limit_mib),
        interpret=interpret,
        name="attention_dq",
    )(q, k, v, grad, _as_rows(lse), _as_rows(delta))


def attention_dkv_pallas(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    grad: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    *,
    causal: bool = True,
    block_q: int,
    block_kv: int,
    block_q_compute: int | None = None,
    block_kv_compute: int | None = None,
    vmem_limit_mib: int | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The gradients of attention with respect to k and v; arguments as of `attention_dq_pallas`.

    Here block_kv is what a kernel instance works for, block_q what is fetched per grid step.

    Returns:
        As k and v; the sums, over the heads that share a kv head as well, are float32.
    """
    blocks = _blocks(q, k, causal, block_q, block_kv, block_q_compute, block_kv_compute)
    batch, heads, _, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads

    def q_index(b, h, j, g, i):
        return b, h * group + g, jnp.maximum(i, _first_q(blocks, j)), 0

    def row_index(b, h, j, g, i):
        b, h, i, _ = q_index(b, h, j, g, i)
        return b, h, 0, i

    q_spec = pl.BlockSpec((None, None, block_q, head_dim), q_index)
    kv_spec = pl.BlockSpec((None, None, block_kv, head_dim), lambda b, h, j, g, i: (b, h, j, 0))
    row_spec = pl.BlockSpec((None, None, 1, block_q), row_index)
    return pl.pallas_call(
        functools.partial(_dkv_kernel, blocks=blocks, scale=head_dim**-0.5),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        grid=(batch, kv_heads, blocks.kv_blocks, group, blocks.q_blocks),
        in_specs=[q_spec, kv_spec, kv_spec, q_spec, row_spec, row_spec],
        out_specs=[kv_spec, kv_spec],
        scratch_shapes=[
            pltpu.VMEM((block_kv, head_dim), k.dtype),  # k times the scale
            pltpu.VMEM((block_kv, head_dim), jnp.float32),
            pltpu.VMEM((block_kv, head_dim), jnp.float32),
        ],
        compiler_params=compiler_params(
            "parallel", "parallel", "parallel", "arbitrary", "arbitrary", vmem_limit_mib=vmem_limit_mib
        ),
        interpret=interpret,
        name="attention_dkv",
    )(q, k, v, grad, _as_rows(lse), _as_rows(delta))


def _blocks(q: jax.Array, k: jax.Array, causal: bool, *sizes: int | None) -> Blocks:
    block_q, block_kv, block_q_compute, block_kv_compute = sizes
    tile = block_q_compute or block_q, block_kv_compute or block_kv
    return Blocks(q.shape[2], k.shape[2], block_q, block_kv, *tile, causal)


def _as_rows(statistic: jax.Array) -> jax.Array:
    """``[batch, heads, q_len]`` with the queries along the lanes: ``[batch, heads, 1, q_len]``."""
    return statistic[:, :, None, :]


def _dot(x: jax.Array, y: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """x and y multiplied over one dimension of each, in float32."""
    dimensions = (((contracted[0],), (contracted[1],)), ((), ()))
    return lax.dot_general(x, y, dimensions, precision=dot_precision(x.dtype), preferred_element_type=jnp.float32)


def _existing(x: jax.Array, count) -> jax.Array:
    """x with all rows from `count` on as zeros: what lies there is whatever was in VMEM."""
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 0) < count, x, 0)


def _dq_kernel(
    q_ref,
    k_ref,
    v_ref,
    grad_ref,
    lse_ref,
    delta_ref,
    dq_ref,
    q_scaled,
    lse,
    delta,
    acc,
    *,
    blocks: Blocks,
    scale: float,
) -> None:
    """One grid step: all rows of a q block against one kv block."""
    i, j = pl.program_id(2), pl.program_id(3)
    rows_per_tile, width = blocks.block_q_compute, blocks.block_kv_compute

    @pl.when(j == 0)
    def _():
        q_scaled[...] = (q_ref[...].astype(jnp.float32) * (scale * LOG2E)).astype(q_scaled.dtype)
        _to_column(lse, lse_ref, LOG2E)
        _to_column(delta, delta_ref, 1.0)
        acc[...] = jnp.zeros_like(acc)

    def update(first_row, tile, *, shift=None, valid=None) -> None:
        first_column = aligned(tile, width)
        rows, columns = pl.ds(first_row, rows_per_tile), pl.ds(first_column, width)
        keys, values = k_ref[columns, :], v_ref[columns, :]
        scores = _dot(q_scaled[rows, :], keys, (1, 1))
        if shift is not None:
            column, row = (lax.broadcasted_iota(jnp.int32, scores.shape, axis) for axis in (1, 0))
            hidden = column - row > shift - first_column if blocks.causal else column >= valid - first_column
            scores = jnp.where(hidden, MASKED, scores)
            if blocks.uneven_kv:
                keys, values = (_existing(x, valid - first_column) for x in (keys, values))
        weights = jnp.exp2(scores - lse[rows, :1])
        change = weights * (_dot(grad_ref[rows, :], values, (1, 1)) - delta[rows, :1])
        acc[rows, :] += _dot(change.astype(keys.dtype), keys, (1, 0))

    def row_tile(r, _) -> None:
        first_row = aligned(r, rows_per_tile)
        clear, seen = visible(blocks, i, j, first_row)
        lax.fori_loop(0, clear, lambda c, _: update(first_row, c), None)
        if blocks.masked:
            shift, valid = blocks.shift(i, j) + first_row, blocks.kv_len - j * blocks.block_kv
            lax.fori_loop(clear, seen, lambda c, _: update(first_row, c, shift=shift, valid=valid), None)

    lax.fori_loop(0, tile_rows(blocks, i), row_tile, None)

    @pl.when(j == last_kv(blocks, i))
    def _():
        dq_ref[...] = (acc[...] * scale).astype(dq_ref.dtype)


def _to_column(column_ref, row_ref, factor: float) -> None:
    """Turns ``[1, n]`` into ``[n, 128]`` of equal lanes, a square at a time, by what stands on its diagonal."""
    length = column_ref.shape[0]
    for first in range(0, length, LANES):
        size = min(LANES, length - first)
        row = jnp.broadcast_to(row_ref[:, first : first + size] * factor, (size, size))
        across, down = (lax.broadcasted_iota(jnp.int32, row.shape, axis) for axis in (1, 0))
        column = jnp.sum(jnp.where(across == down, row, 0.0), axis=1, keepdims=True)
        column_ref[first : first + size, :] = jnp.broadcast_to(column, (size, LANES))


def _dkv_kernel(
    q_ref, k_ref, v_ref, grad_ref, lse_ref, delta_ref, dk_ref, dv_ref, k_scaled, dk, dv, *, blocks: Blocks, scale: float
) -> None:
    """One grid step: all keys of a kv block against one q block of one of the heads that share them."""
    j, g, step = (pl.program_id(axis) for axis in (2, 3, 4))
    height, width = blocks.block_q_compute, blocks.block_kv_compute
    first_i = _first_q(blocks, j)
    i = jnp.maximum(step, first_i)
    left = blocks.q_len - i * blocks.block_q  # queries that exist, from the block's first

    @pl.when((g == 0) & (step == 0))
    def _():
        k_scaled[...] = (k_ref[...].astype(jnp.float32) * (scale * LOG2E)).astype(k_scaled.dtype)
        dk[...] = jnp.zeros_like(dk)
        dv[...] = jnp.zeros_like(dv)

    def update(first_column, tile, *, masked: bool) -> None:
        first_row = aligned(tile, height)
        keys, queries = pl.ds(first_column, width), pl.ds(first_row, height)
        q, grad = q_ref[queries, :], grad_ref[queries, :]
        if masked and blocks.uneven_q:
            q, grad = (_existing(x, left - first_row) for x in (q, grad))
        scores = _dot(k_scaled[keys, :], q, (1, 1))  # [keys, queries]
        weights = jnp.exp2(scores - lse_ref[:, queries] * LOG2E)
        change = weights * (_dot(v_ref[keys, :], grad, (1, 1)) - delta_ref[:, queries])
        if masked:
            key, query = (lax.broadcasted_iota(jnp.int32, scores.shape, axis) for axis in (0, 1))
            seen = key - query <= blocks.shift(i, j) + first_row - first_column if blocks.causal else True
            if blocks.uneven_q:
                seen &= query < left - first_row
            weights, change = (jnp.where(seen, x, 0.0) for x in (weights, change))
        dv[keys, :] += _dot(weights.astype(grad.dtype), grad, (1, 0))
        dk[keys, :] += _dot(change.astype(q.dtype), q, (1, 0))

    def column_tile(c, _) -> None:
        first_column = aligned(c, width)
        needed, clear, full, end = _query_tiles(blocks, i, j, first_column, left)
        if blocks.causal:
            lax.fori_loop(needed, jnp.minimum(clear, end), lambda t, _: update(first_column, t, masked=True), None)
        lax.fori_loop(clear, full, lambda t, _: update(first_column, t, masked=False), None)
        if blocks.uneven_q:
            first = jnp.maximum(clear, full)
            lax.fori_loop(first, end, lambda t, _: update(first_column, t, masked=True), None)

    @pl.when(step >= first_i)
    def _():
        lax.fori_loop(0, blocks.column_tiles, column_tile, None)

    @pl.when((g == pl.num_programs(3) - 1) & (step == blocks.q_blocks - 1))
    def _():
        dk_ref[...] = (dk[...] * scale).astype(dk_ref.dtype)
        dv_ref[...] = dv[...].astype(dv_ref.dtype)


def _first_q(blocks: Blocks, j):
    """The first q block that sees a key of kv block `j`; the last one where none does."""
    if not blocks.causal:
        return 0
    first_query = jnp.maximum(j * blocks.block_kv - (blocks.kv_len - blocks.q_len), 0)
    return jnp.minimum(lax.div(first_query, blocks.block_q), blocks.q_blocks - 1)


def _query_tiles(blocks: Blocks, i, j, first_column, left):
    """Tiles of q block `i` for a tile of keys: (first needed, first without a mask, first uneven one, end).

    Args:
        first_column: The tile of keys' first one in its block.
        left: Queries of the block that exist.
    """
    height = blocks.block_q_compute
    needed = clear = 0
    full = end = blocks.row_tiles
    if blocks.uneven_q:
        full = jnp.minimum(lax.div(left, height), full)
        end = jnp.minimum(lax.div(left + height - 1, height), end)
    if blocks.causal:  # row r sees the columns c ≤ r + shift
        first_row = first_column - blocks.shift(i, j)
        needed = lax.div(jnp.maximum(first_row, 0), height)
        clear = lax.div(jnp.maximum(first_row + blocks.block_kv_compute - 1, 0) + height - 1, height)
    return needed, clear, full, end
