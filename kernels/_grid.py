"""The blocks of a grid that walks the tiles of a matrix product: two outer dimensions in either order, k innermost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl

TileMap = Callable[[Any, Any, Any], tuple[Any, Any]]


def tile_specs(grid_order: str) -> Callable[..., pl.BlockSpec]:
    """What makes the `BlockSpec` of an operand or result, given the order of the outer two dimensions.

    Args:
        grid_order: ``mn`` walks n within m, ``nm`` m within n.
    """

    def spec(shape: tuple[int, int], index: TileMap, *, transpose: bool = False, held: int = 2) -> pl.BlockSpec:
        """A block of `shape`, at `index` of (tile row, tile column, k step) whatever the order of the grid.

        Args:
            transpose: The array is stored the other way round, and so is its block.
            held: Its VMEM buffers, 1 or 2.
        """

        def walked(outer: Any, inner: Any, step: Any) -> tuple[Any, Any]:
            i, j = (outer, inner) if grid_order == "mn" else (inner, outer)
            block = index(i, j, step)
            return block[::-1] if transpose else block

        mode = pl.Buffered(1) if held == 1 else None
        return pl.BlockSpec(shape[::-1] if transpose else shape, walked, pipeline_mode=mode)

    return spec
