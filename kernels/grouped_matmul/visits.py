"""Which group a kernel works on when, and on which rows: the tables that steer the grouped matmuls.

Rows are cut into tiles of `block_m`. A *visit* is one group's share of one tile: a tile that a boundary between groups
falls into is visited once by each group it holds rows of. The kernels' grids run over visits in the order of the rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Visits(NamedTuple):
    """Tables for scalar prefetch, int32.

    Attributes:
        groups: ``[visits]``: the group of each visit. Those past `count` mean nothing.
        tiles: ``[visits]``: the row tile of each visit.
        bounds: ``[groups + 1]``: first row of each group, and the end of the last.
        count: How many visits there are, a scalar.
    """

    groups: jax.Array
    tiles: jax.Array
    bounds: jax.Array
    count: jax.Array


def plan_visits(group_sizes: jax.Array, m: int, block_m: int, *, empty_too: bool) -> Visits:
    """The visits of groups that follow each other from row 0.

    Args:
        group_sizes: ``[groups]``, not negative; rows past m are cut off.
        m: Rows.
        block_m: Rows of a tile.
        empty_too: Whether a group without rows is visited once, for what has to be stored for it.
    """
    groups, tiles = group_sizes.shape[0], -(-m // block_m)
    sizes = group_sizes.astype(jnp.int32)
    ends = jnp.minimum(_running_sum(sizes), m)
    starts = jnp.minimum(_running_sum(sizes, before=True), m)
    first_tile = jnp.minimum(starts // block_m, tiles - 1)
    number = jnp.where(ends > starts, (ends - 1) // block_m - first_tile + 1, int(empty_too))
    visits_before, visits_then = _running_sum(number, before=True), _running_sum(number)
    # Every tile has one visit, and one more for each boundary in it.
    visit = jnp.arange(tiles + groups - 1, dtype=jnp.int32)
    here = (visit[:, None] >= visits_before) & (visit[:, None] < visits_then)
    group = _sum_where(here, jnp.arange(groups, dtype=jnp.int32))
    tile = visit + _sum_where(here, first_tile - visits_before)
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    return Visits(group, jnp.minimum(tile, tiles - 1), bounds, jnp.sum(number, dtype=jnp.int32))


def _running_sum(values: jax.Array, *, before: bool = False) -> jax.Array:
    """``[groups]``: of all up to each one, or of those before it."""
    number = jnp.arange(values.shape[0], dtype=jnp.int32)
    return _sum_where(number < number[:, None] if before else number <= number[:, None], values)


def _sum_where(here: jax.Array, values: jax.Array) -> jax.Array:
    """``[rows]``: the sum of the values that are here, ``[rows, groups]``. On a TPU cheaper than scans and gathers."""
    return jnp.sum(jnp.where(here, values, 0), axis=1, dtype=jnp.int32)
