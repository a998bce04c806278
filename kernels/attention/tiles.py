"""What attention's kernels, forward and backward, share: which blocks and tiles they walk, and the masks of these.

Grids walk as many blocks as the busiest row (or column) of blocks needs. The others idle first: so the block that
they begin with is fetched while the row before is still at work.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels._precision import dot_precision
from kernels.attention.blocks import Blocks

LANES = 128
LOG2E = math.log2(math.e)
TileRange = tuple[Any, Any, Any, Any]


@dataclasses.dataclass(frozen=True)
class Scores:
    """What becomes of the products of queries and keys before the softmax, which is to base 2.

    Attributes:
        scale: Of the products.
        soft_cap: Scaled products s become soft_cap · tanh(s / soft_cap); None leaves them.
    """

    scale: float
    soft_cap: float | None

    @classmethod
    def of(cls, q: jax.Array, scale: float | None, soft_cap: float | None) -> Self:
        """With the scale of 1 / sqrt(head_dim) for None."""
        return cls(q.shape[-1] ** -0.5 if scale is None else scale, soft_cap)

    @property
    def factor(self) -> float:
        """What one of the operands is multiplied by, so that the least is left to do to the products."""
        return self.scale / self.soft_cap if self.soft_cap else self.scale * LOG2E

    def scaled(self, operand: jax.Array) -> jax.Array:
        return (operand.astype(jnp.float32) * self.factor).astype(operand.dtype)

    def of_products(self, products: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The scores to base 2, from products of a scaled operand; and their slope where it is not one."""
        if not self.soft_cap:
            return products, None
        bent = jnp.tanh(products)
        return bent * (self.soft_cap * LOG2E), 1.0 - bent * bent


def dot(x: jax.Array, y: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """x and y multiplied over one dimension of each, in float32."""
    if 1 in (x.shape[0], y.shape[0]) and x.dtype == jnp.bfloat16:  # Mosaic broadcasts no single row of 16 bits.
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    dimensions = (((contracted[0],), (contracted[1],)), ((), ()))
    return lax.dot_general(x, y, dimensions, precision=dot_precision(x.dtype), preferred_element_type=jnp.float32)


def aligned(index, size: int, count: int):
    """The start of one of `count` pieces of `size`. A size that is no multiple of a tile is that of the only piece."""
    return 0 if count == 1 else pl.multiple_of(index * size, size)


def existing(x: jax.Array, count) -> jax.Array:
    """x with all rows from `count` on as zeros: what lies there is whatever was in VMEM, and 0 times NaN is NaN."""
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 0) < count, x, 0)


def kv_block(blocks: Blocks, i, step):
    """(kv block at this step of q block `i`, the first that it needs): the step idles where it comes before that.

    (`lax.div`, as ``//`` asks Mosaic for the sign, and the chip.)
    """
    first, last = 0, blocks.kv_blocks - 1
    if blocks.causal:
        last = jnp.minimum(lax.div(blocks.last_key(i), blocks.block_kv), last)
    if blocks.window is not None:
        first = lax.div(jnp.maximum(blocks.first_key(i), 0), blocks.block_kv)
    return last - (blocks.kv_steps - 1) + step, first


def q_block(blocks: Blocks, j, step):
    """(q block at this step of kv block `j`, the first that needs it): the step idles where it comes before that."""
    first, last = 0, blocks.q_blocks - 1
    query = j * blocks.block_kv - (blocks.kv_len - blocks.q_len)  # that sees the block's first key as its last
    if blocks.causal:
        first = jnp.minimum(lax.div(jnp.maximum(query, 0), blocks.block_q), last)
    if blocks.window is not None:
        last_query = query + blocks.block_kv - 1 + blocks.window - 1
        last = jnp.minimum(lax.div(jnp.maximum(last_query, 0), blocks.block_q), last)
    return last - (blocks.q_steps - 1) + step, first


def row_tiles(blocks: Blocks, i):
    """Row tiles of q block `i` that hold queries."""
    if not blocks.uneven_q:
        return blocks.row_tiles
    left = blocks.queries_left(i)
    return jnp.minimum(blocks.row_tiles, lax.div(left + blocks.block_q_compute - 1, blocks.block_q_compute))


def key_tiles(blocks: Blocks, i, j, first_row) -> TileRange:
    """Tiles of kv block `j` for a tile of queries: (first, first without a mask, first cut one after these, end).

    Args:
        first_row: The tile of queries' first one in q block `i`.
    """
    rows, width = blocks.block_q_compute, blocks.block_kv_compute
    first = clear = 0
    cut = end = blocks.column_tiles
    if blocks.uneven_kv:
        valid = jnp.clip(blocks.keys_left(j), 0, blocks.block_kv)
        cut, end = lax.div(valid, width), lax.div(valid + width - 1, width)
    if blocks.causal:
        shift = blocks.shift(i, j) + first_row
        # Below zero, `lax.div` rounds up: to zero at the most, which is what is wanted.
        cut = jnp.clip(lax.div(shift + 1, width), 0, cut)
        end = jnp.clip(lax.div(shift + rows - 1 + width, width), 0, end)
        if blocks.window is not None:  # row r sees the columns c > r + shift - window
            first = lax.div(jnp.maximum(shift + 1 - blocks.window, 0), width)
            clear = lax.div(jnp.maximum(shift + rows - blocks.window, 0) + width - 1, width)
    return first, clear, cut, end


def query_tiles(blocks: Blocks, i, j, first_column) -> TileRange:
    """Tiles of q block `i` for a tile of keys: (first, first without a mask, first cut one after these, end).

    Args:
        first_column: The tile of keys' first one in kv block `j`.
    """
    height, width = blocks.block_q_compute, blocks.block_kv_compute
    first = clear = 0
    cut = end = blocks.row_tiles
    if blocks.uneven_q:
        left = blocks.queries_left(i)
        cut, end = jnp.minimum(lax.div(left, height), cut), jnp.minimum(lax.div(left + height - 1, height), end)
    if blocks.causal:  # row r sees the columns c ≤ r + shift
        first_row = first_column - blocks.shift(i, j)
        first = lax.div(jnp.maximum(first_row, 0), height)
        clear = lax.div(jnp.maximum(first_row + width - 1, 0) + height - 1, height)
        if blocks.window is not None:  # and is blind to them from its row c - shift + window on
            cut = jnp.clip(lax.div(first_row + blocks.window, height), 0, cut)
            end = jnp.clip(lax.div(first_row + width + blocks.window - 2 + height, height), 0, end)
    return first, clear, cut, end


def for_each_tile(
    blocks: Blocks, tiles: TileRange, update: Callable[..., None], *, masked: bool, unroll: int = 1
) -> None:
    """Calls ``update(tile, masked=…)`` for all tiles of the range, those without a mask first.

    Args:
        masked: Whether any tile may need a mask.
        unroll: Unmasked tiles in one pass of the loop.
    """
    first, clear, cut, end = tiles
    if blocks.packed:
        lax.fori_loop(first, end, lambda tile, _: update(tile, masked=True), None)
        return

    def several(group, _) -> None:
        for index in range(unroll):
            update(clear + group * unroll + index, masked=False)

    count = cut - clear
    groups = count // unroll if isinstance(count, int) else lax.div(count, unroll)
    lax.fori_loop(0, groups, several, None)
    if unroll > 1:
        lax.fori_loop(clear + groups * unroll, cut, lambda tile, _: update(tile, masked=False), None)
    if not masked:
        return
    right = jnp.maximum(clear, cut)
    if isinstance(clear, int):  # None on the left of the clear ones.
        lax.fori_loop(right, end, lambda tile, _: update(tile, masked=True), None)
        return
    left = jnp.maximum(jnp.minimum(clear, end) - first, 0)

    def either(index, _) -> None:
        update(jnp.where(index < left, first + index, right + index - left), masked=True)

    lax.fori_loop(0, left + jnp.maximum(end - right, 0), either, None)


def seen(
    blocks: Blocks,
    place: tuple[Any, Any, Any, Any],
    shape: tuple[int, int],
    *,
    query_axis: int,
    keys: bool,
    segments: Any,
) -> jax.Array:
    """Which of a tile's scores count.

    Args:
        place: Of the tile: q block and kv block, its first row and column in them.
        shape: Of the tile.
        query_axis: 0 where the queries lie down and the keys along the lanes; 1 the other way round.
        keys: Whether it matters that some keys do not exist; that some queries do not matters with the axis of 1.
        segments: The ids of its queries and of its keys, each broadcastable to `shape`; None where there are none.
    """
    i, j, first_row, first_column = place
    query, key = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (query_axis, 1 - query_axis))
    conditions = []
    if blocks.causal:
        shift = blocks.shift(i, j) + first_row - first_column
        conditions.append(key - query <= shift)
        if blocks.window is not None:
            conditions.append(key - query > shift - blocks.window)
    if query_axis == 1 and blocks.uneven_q:
        conditions.append(query < blocks.queries_left(i) - first_row)
    # The last query sees the last key: if causal, no query sees one that does not exist.
    if keys and blocks.uneven_kv and not blocks.causal:
        conditions.append(key < blocks.keys_left(j) - first_column)
    if segments is not None:
        conditions.append(segments[0] == segments[1])
    return functools.reduce(jnp.logical_and, conditions)


def across(statistic: jax.Array, width: int) -> jax.Array:
    """``[rows, 128]`` of equal lanes, as ``[rows, width]``: the same registers again, no work."""
    copies = -(-width // LANES)
    wide = jnp.concatenate([statistic] * copies, axis=1) if copies > 1 else statistic
    return wide if wide.shape[1] == width else wide[:, :width]


def to_column(column_ref, row_ref, change: Callable[[jax.Array], jax.Array] = lambda row: row) -> None:
    """Turns ``[1, n]`` into ``[n, 128]`` of equal lanes, a square at a time, by what stands on its diagonal."""
    length = column_ref.shape[0]
    for first in range(0, length, LANES):
        size = min(LANES, length - first)
        row = jnp.broadcast_to(change(row_ref[:, first : first + size]), (size, size))
        on_diagonal = lax.broadcasted_iota(jnp.int32, row.shape, 0) == lax.broadcasted_iota(jnp.int32, row.shape, 1)
        column = jnp.sum(jnp.where(on_diagonal, row, 0), axis=1, keepdims=True)
        column_ref[first : first + size, :] = jnp.broadcast_to(column, (size, LANES)).astype(column_ref.dtype)
