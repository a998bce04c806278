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
        groups: ``[visits]``: the group of each visit. Visits past `count` repeat the last group.
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
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), m)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    tiles, groups = -(-m // block_m), group_sizes.shape[0]
    first_tile = jnp.minimum(starts // block_m, tiles - 1)
    number = jnp.where(ends > starts, (ends - 1) // block_m - first_tile + 1, int(empty_too))
    last_visit = jnp.cumsum(number)
    # Every tile has one visit, and one more for each boundary in it. Sums over a one-hot, not gathers: these are slow.
    visit = jnp.arange(tiles + groups - 1, dtype=jnp.int32)[:, None]
    here = (visit < last_visit) & (visit >= last_visit - number)
    here = here.at[:, -1].set(here[:, -1] | (visit[:, 0] >= last_visit[-1]))
    group = jnp.sum(jnp.where(here, jnp.arange(groups, dtype=jnp.int32), 0), axis=1)
    tile = jnp.sum(jnp.where(here, visit - (last_visit - number) + first_tile, 0), axis=1)
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    return Visits(group, jnp.minimum(tile, tiles - 1), bounds, last_visit[-1])
