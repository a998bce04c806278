"""The bodies of attention's backward kernels: one grid step each, tile by tile."""

from __future__ import annotations

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
        first_row = aligned(r, blocks.block_q_compute, blocks.row_tiles)
        rows = pl.ds(first_row, blocks.block_q_compute)

        def update(tile, *, masked: bool) -> None:
            first_column = aligned(tile, blocks.block_kv_compute, blocks.column_tiles)
            columns = pl.ds(first_column, blocks.block_kv_compute)
            keys = k_ref[columns, :]
            products = dot(q_scaled[rows, :], keys, (1, 1))
            grad_products = dot(grad_ref[rows, :], v_ref[columns, :], (1, 1))
            _, change = _recomputed(scores, products, grad_products, lse[rows, :1], delta[rows, :1])
            if masked:
                shape = change.shape
                ids = (across(q_ids[0][rows, :], shape[1]), kv_ids_ref[:, columns]) if q_ids else None
                mask = seen(blocks, (i, j, first_row, first_column), shape, query_axis=0, keys=True, segments=ids)
                change = jnp.where(mask, change, 0.0)
                if blocks.uneven_kv:
                    keys = existing(keys, blocks.keys_left(j) - first_column)
            acc[rows, :] += dot(change.astype(keys.dtype), keys, (1, 0))

        for_each_tile(blocks, key_tiles(blocks, i, j, first_row), update, masked=blocks.masked)

    @pl.when(j >= first_j)
    def _():
        lax.fori_loop(0, row_tiles(blocks, i), row_tile, None)

    @pl.when(step == blocks.kv_steps - 1)
    def _():
        dq_ref[...] = (acc[...] * scores.scale).astype(dq_ref.dtype)


def dkv_kernel(q_ref, k_ref, v_ref, grad_ref, lse_ref, delta_ref, *refs, blocks: Blocks, scores: Scores) -> None:
    """One grid step of dk and dv: all keys of a kv block against one q block of one of the heads that share them."""
    (q_ids_ref, kv_ids_ref), refs = _ids(blocks, refs)
    dk_ref, dv_ref, k_scaled, dk, dv, *kv_ids = refs
    j, head, step = (pl.program_id(axis) for axis in (2, 3, 4))
    i, first_i = q_block(blocks, j, step)
    inputs = (q_ref, k_ref, v_ref, grad_ref, lse_ref, delta_ref, q_ids_ref, kv_ids)

    @pl.when((head == 0) & (step == 0))
    def _():
        k_scaled[...] = scores.scaled(k_ref[...])
        dk[...] = jnp.zeros_like(dk)
        dv[...] = jnp.zeros_like(dv)
        for column in kv_ids:
            to_column(column, kv_ids_ref)

    def column_tile(c, _) -> None:
        first_column = aligned(c, blocks.block_kv_compute, blocks.column_tiles)
        columns = pl.ds(first_column, blocks.block_kv_compute)

        def update(tile, *, masked: bool) -> None:
            def products(q, k, queries):
                return dot(k_scaled[columns, :], q, (1, 1))

            place = i, j, _query_tile(blocks, tile), first_column
            q, _, grad, weights, change = _turned_tile(
                inputs, blocks, scores, place, products, masked=masked, keys=False
            )
            dv[columns, :] += dot(weights, grad, (1, 0))
            dk[columns, :] += dot(change, q, (1, 0))

        masked = blocks.causal or blocks.uneven_q
        for_each_tile(blocks, query_tiles(blocks, i, j, first_column), update, masked=masked)

    @pl.when(i >= first_i)
    def _():
        lax.fori_loop(0, blocks.column_tiles, column_tile, None)

    @pl.when((head == pl.num_programs(3) - 1) & (step == blocks.q_steps - 1))
    def _():
        dk_ref[...] = (dk[...] * scores.scale).astype(dk_ref.dtype)
        dv_ref[...] = dv[...].astype(dv_ref.dtype)


def bwd_kernel(q_ref, k_ref, v_ref, grad_ref, lse_ref, delta_ref, *refs, blocks: Blocks, scores: Scores) -> None:
    """One grid step of all gradients: one q block of a head against one kv block; dk and dv are those of all keys."""
    (q_ids_ref, kv_ids_ref), refs = _ids(blocks, refs)
    dq_ref, dk_ref, dv_ref, q_scaled, dk, dv, dq, *kv_ids = refs
    head, i, step = (pl.program_id(axis) for axis in (2, 3, 4))
    j, first_j = kv_block(blocks, i, step)
    first_key = aligned(j, blocks.block_kv, blocks.kv_blocks)
    inputs = (q_ref, k_ref, v_ref, grad_ref, lse_ref, delta_ref, q_ids_ref, kv_ids)

    @pl.when((head == 0) & (i == 0) & (step == 0))
    def _():
        dk[...] = jnp.zeros_like(dk)
        dv[...] = jnp.zeros_like(dv)

    @pl.when(step == 0)
    def _():
        q_scaled[...] = scores.scaled(q_ref[...])
        dq[...] = jnp.zeros_like(dq)

    def column_tile(c, _) -> None:
        first_column = aligned(c, blocks.block_kv_compute, blocks.column_tiles)
        columns = pl.ds(first_column, blocks.block_kv_compute)
        keys = pl.ds(first_key + first_column, blocks.block_kv_compute)

        def update(tile, *, masked: bool) -> None:
            first_row = _query_tile(blocks, tile)

            def products(q, k, queries):
                return dot(k_ref[columns, :], q_scaled[queries, :], (1, 1))

            place = i, j, first_row, first_column
            q, k, grad, weights, change = _turned_tile(
                inputs, blocks, scores, place, products, masked=masked, keys=True
            )
            dv[keys, :] += dot(weights, grad, (1, 0))
            dk[keys, :] += dot(change, q, (1, 0))
            dq[pl.ds(first_row, blocks.block_q_compute), :] += dot(change, k, (0, 0))

        first, clear, cut, end = query_tiles(blocks, i, j, first_column)
        masked = blocks.causal or blocks.uneven_q or blocks.uneven_kv
        if blocks.uneven_kv and not blocks.causal:  # A tile with keys that do not exist has none without a mask.
            cut = jnp.where(first_column + blocks.block_kv_compute <= blocks.keys_left(j), cut, 0)
        for_each_tile(blocks, (first, clear, cut, end), update, masked=masked)

    @pl.when(j >= first_j)
    def _():
        for column in kv_ids:
            to_column(column, kv_ids_ref)
        lax.fori_loop(0, blocks.column_tiles, column_tile, None)

    @pl.when(step == blocks.kv_steps - 1)
    def _():
        dq_ref[...] = (dq[...] * scores.scale).astype(dq_ref.dtype)

    @pl.when((head == pl.num_programs(2) - 1) & (i == blocks.q_blocks - 1) & (step == blocks.kv_steps - 1))
    def _():
        dk_ref[...] = (dk[: blocks.kv_len, :] * scores.scale).astype(dk_ref.dtype)
        dv_ref[...] = dv[: blocks.kv_len, :].astype(dv_ref.dtype)


def _query_tile(blocks: Blocks, tile):
    """The first row of a tile of queries."""
    return aligned(tile, blocks.block_q_compute, blocks.row_tiles)


def _turned_tile(
    inputs: tuple, blocks: Blocks, scores: Scores, place: tuple, products, *, masked: bool, keys: bool
) -> tuple[jax.Array, ...]:
    """A tile with the keys down and the queries along the lanes: (q, k, grad, weights, change of the scores).

    Args:
        place: Of the tile, as `seen` takes it.
        products: Gives those of the tile's keys and queries, one of them scaled.
        keys: Whether it matters that some keys do not exist.
    """
    q_ref, k_ref, v_ref, grad_ref, lse_ref, delta_ref, q_ids_ref, kv_ids = inputs
    i, j, first_row, first_column = place
    queries, columns = pl.ds(first_row, blocks.block_q_compute), pl.ds(first_column, blocks.block_kv_compute)
    q, k, grad = q_ref[queries, :], k_ref[columns, :], grad_ref[queries, :]
    grad_products = dot(v_ref[columns, :], grad, (1, 1))
    lse, delta = lse_ref[:, queries] * LOG2E, delta_ref[:, queries]
    weights, change = _recomputed(scores, products(q, k, queries), grad_products, lse, delta)
    if masked:
        ids = (q_ids_ref[:, queries], across(kv_ids[0][columns, :], change.shape[1])) if kv_ids else None
        mask = seen(blocks, place, change.shape, query_axis=1, keys=keys, segments=ids)
        weights, change = (jnp.where(mask, x, 0.0) for x in (weights, change))
        if blocks.uneven_q:
            q, grad = (existing(x, blocks.queries_left(i) - first_row) for x in (q, grad))
        if keys and blocks.uneven_kv:
            k = existing(k, blocks.keys_left(j) - first_column)
    return q, k, grad, weights.astype(grad.dtype), change.astype(q.dtype)


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
