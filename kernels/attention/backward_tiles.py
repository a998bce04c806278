"""The bodies of attention's backward kernels: one grid step each, tile by tile."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels.attention.blocks import Blocks
from kernels.attention.tiles import (
    LOG2E,
    Scores,
    across,
    aligned,
    dot,
    existing,
    for_each_tile,
    key_tiles,
    kv_block,
    q_block,
    query_tiles,
    row_tiles,
    seen,
    to_column,
)


def dq_kernel(q_ref, k_ref, v_ref, grad_ref, lse_ref, delta_ref, *refs, blocks: Blocks, scores: Scores) -> None:
    """One grid step of dq: all rows of a q block against one kv block."""
    (q_ids_ref, kv_ids_ref), refs = _ids(blocks, refs)
    dq_ref, q_scaled, lse, delta, acc, *q_ids = refs
    i, step = pl.program_id(2), pl.program_id(3)
    j, first_j = kv_block(blocks, i, step)

    @pl.when(step == 0)
    def _():
        q_scaled[...] = scores.scaled(q_ref[...])
        to_column(lse, lse_ref, lambda row: row * LOG2E)
        to_column(delta, delta_ref)
        acc[...] = jnp.zeros_like(acc)
        for column in q_ids:
            to_column(column, q_ids_ref)

    def row_tile(r, _) -> None:
        first_row = aligned(r, blocks.block_q_compute)
        rows = pl.ds(first_row, blocks.block_q_compute)

        def update(tile, *, masked: bool) -> None:
            first_column = aligned(tile, blocks.block_kv_compute)
            columns = pl.ds(first_column, blocks.block_kv_compute)
            keys = k_ref[columns, :]
            products, grad_products = (
                dot(q_scaled[rows, :], keys, (1, 1)),
                dot(grad_ref[rows, :], v_ref[columns, :], (1, 1)),
            )
            _, change = _recomputed(scores, products, grad_products, lse[rows, :1], delta[rows, :1])
            if masked:
                valid = blocks.kv_len - j * blocks.block_kv - first_column
                mask = seen(
                    blocks,
                    change.shape,
                    query_axis=0,
                    shift=blocks.shift(i, j) + first_row - first_column,
                    # The last query sees the last key: if causal, no query sees one that does not exist.
                    keys=valid if blocks.uneven_kv and not blocks.causal else None,
                    segments=(across(q_ids[0][rows, :], change.shape[1]), kv_ids_ref[:, columns]) if q_ids else None,
                )
                change = jnp.where(mask, change, 0.0)
                if blocks.uneven_kv:
                    keys = existing(keys, valid)
            acc[rows, :] += dot(change.astype(keys.dtype), keys, (1, 0))

        for_each_tile(blocks, key_tiles(blocks, i, j, first_row), update, masked=blocks.masked)

    @pl.when(j >= first_j)
    def _():
        lax.fori_loop(0, row_tiles(blocks, i), row_tile, None)

    @pl.when(step == blocks.kv_steps - 1)
    def _():
        dq_ref[...] = (acc[...] * scores.scale).astype(dq_ref.dtype)


def dkv_kernel(
    q_ref, k_ref, v_ref, grad_ref, lse_ref, delta_ref, *refs, blocks: Blocks, scores: Scores, with_dq: bool
) -> None:
    """One grid step of dk and dv: all keys of a kv block against one q block of one of the heads that share them.

    The grid walks the heads and q blocks inside, for one kv block's sums at a time, and k is what is scaled. With dq it
    walks the kv blocks inside, for one q block's sum at a time, and q is; the sums of dk and dv are those of all keys.
    """
    (q_ids_ref, kv_ids_ref), refs = _ids(blocks, refs)
    dq_ref, refs = (refs[0], refs[1:]) if with_dq else (None, refs)
    dk_ref, dv_ref, scaled, dk, dv, *refs = refs
    dq, kv_ids = refs[0] if with_dq else None, refs[with_dq:]
    outer, middle, step = (pl.program_id(axis) for axis in (2, 3, 4))
    if with_dq:
        i = middle
        j, first = kv_block(blocks, i, step)
        idle, first_key = j < first, aligned(j, blocks.block_kv)
    else:
        j, first_key = outer, 0
        i, first = q_block(blocks, j, step)
        idle = i < first
    starts = (middle == 0) & (step == 0) & ((outer == 0) if with_dq else True)
    ends = (middle == pl.num_programs(3) - 1) & (step == pl.num_programs(4) - 1)
    ends &= (outer == pl.num_programs(2) - 1) if with_dq else True
    left = blocks.q_len - i * blocks.block_q  # queries that exist, from the block's first

    @pl.when(starts)
    def _():
        dk[...] = jnp.zeros_like(dk)
        dv[...] = jnp.zeros_like(dv)

    @pl.when((step == 0) if with_dq else starts)
    def _():
        scaled[...] = scores.scaled(q_ref[...] if with_dq else k_ref[...])
        if with_dq:
            dq[...] = jnp.zeros_like(dq)

    def update(first_column, tile, *, masked: bool) -> None:
        first_row = aligned(tile, blocks.block_q_compute)
        queries, columns = pl.ds(first_row, blocks.block_q_compute), pl.ds(first_column, blocks.block_kv_compute)
        q, k, grad = q_ref[queries, :], k_ref[columns, :], grad_ref[queries, :]
        q_scaled, k_scaled = (scaled[queries, :], k) if with_dq else (q, scaled[columns, :])
        products, grad_products = dot(k_scaled, q_scaled, (1, 1)), dot(v_ref[columns, :], grad, (1, 1))
        weights, change = _recomputed(
            scores, products, grad_products, lse_ref[:, queries] * LOG2E, delta_ref[:, queries]
        )
        if masked:
            valid = blocks.kv_len - j * blocks.block_kv - first_column
            mask = seen(
                blocks,
                change.shape,
                query_axis=1,
                shift=blocks.shift(i, j) + first_row - first_column,
                queries=left - first_row if blocks.uneven_q else None,
                # What becomes of a key that does not exist nobody asks; but a query must not meet one.
                keys=valid if with_dq and blocks.uneven_kv and not blocks.causal else None,
                segments=(q_ids_ref[:, queries], across(kv_ids[0][columns, :], change.shape[1])) if kv_ids else None,
            )
            weights, change = (jnp.where(mask, x, 0.0) for x in (weights, change))
            if blocks.uneven_q:
                q, grad = (existing(x, left - first_row) for x in (q, grad))
            if with_dq and blocks.uneven_kv:
                k = existing(k, valid)
        change = change.astype(q.dtype)
        keys = pl.ds(first_key + first_column, blocks.block_kv_compute)
        dv[keys, :] += dot(weights.astype(grad.dtype), grad, (1, 0))
        dk[keys, :] += dot(change, q, (1, 0))
        if with_dq:
            dq[queries, :] += dot(change, k, (0, 0))

    def column_tile(c, _) -> None:
        first_column = aligned(c, blocks.block_kv_compute)
        first, clear, cut, end = query_tiles(blocks, i, j, first_column)
        masked = blocks.causal or blocks.uneven_q
        if with_dq and blocks.uneven_kv and not blocks.causal:
            masked, exists = True, first_column + blocks.block_kv_compute <= blocks.kv_len - j * blocks.block_kv
            cut = jnp.where(exists, cut, 0)
        for_each_tile(blocks, (first, clear, cut, end), functools.partial(update, first_column), masked=masked)

    @pl.when(jnp.logical_not(idle))
    def _():
        for column in kv_ids:
            to_column(column, kv_ids_ref)
        lax.fori_loop(0, blocks.column_tiles, column_tile, None)

    if with_dq:

        @pl.when(step == pl.num_programs(4) - 1)
        def _():
            dq_ref[...] = (dq[...] * scores.scale).astype(dq_ref.dtype)

    @pl.when(ends)
    def _():
        kv_len = dk_ref.shape[0]
        dk_ref[...] = (dk[:kv_len, :] * scores.scale).astype(dk_ref.dtype)
        dv_ref[...] = dv[:kv_len, :].astype(dv_ref.dtype)


def _ids(blocks: Blocks, refs: tuple) -> tuple[tuple, tuple]:
    """The references to the segment ids, of queries and of keys, and the other ones."""
    return (refs[:2], refs[2:]) if blocks.packed else ((None, None), refs)


def _recomputed(
    scores: Scores, products: jax.Array, grad_products: jax.Array, lse: jax.Array, delta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The softmax's weights, and the loss's gradient with respect to the scaled products.

    Args:
        products: Of a tile's queries and keys, one of them scaled.
        grad_products: Of the result's gradient and the values.
        lse: The log-sum-exp to base 2, and delta: of each query, broadcastable.
    """
    to_base_2, slope = scores.of_products(products)
    weights = jnp.exp2(to_base_2 - lse)
    change = weights * (grad_products - delta)
    return weights, change if slope is None else change * slope
