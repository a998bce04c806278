"""Transfers between HBM and VMEM that Pallas' own pipeline has no time for, and other things both kernels need.

The pipeline starts each fetch one grid step ahead, and gives each write one. But visits are of unequal length: where a
boundary between groups cuts a tile, a large block would have to come in beside a few rows' products. Here all that
belongs to a tile or a group comes while the one before is worked on, into the other one of two buffers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.errors import UsageError
from kernels._precision import dot_precision
from kernels._tpu_model import sublanes

PIECES = 2  # of a written result
LONGEST_TILE = 16  # rows of a VMEM tile


def fetch_rows(sources, visit, tiles_ref, used) -> None:
    """Waits for the visit's row tile where it is the tile's first one, and starts fetching the next tile.

    Args:
        sources: For each operand: a function from a tile to where it is, two buffers (of tiles even and odd), and the
            semaphore of each.
        used: Row tiles in which there is any group.
    """
    tile = tiles_ref[visit]
    first = (visit == 0) | (tiles_ref[jnp.maximum(visit - 1, 0)] != tile)

    def copies(tile):
        slot = jax.lax.rem(tile, 2)
        return [pltpu.make_async_copy(at(tile), buffers.at[slot], here.at[slot]) for at, buffers, here in sources]

    def start(tile) -> None:
        for copy in copies(tile):
            copy.start()

    pl.when((visit == 0) & (tile < used))(lambda: start(tile))

    @pl.when(first & (tile < used))
    def _():
        for copy in copies(tile):
            copy.wait()
        pl.when(tile + 1 < used)(lambda: start(tile + 1))


def pieces_of(buffers_ref, written, number, to, block, size: int):
    """A result's way out, in pieces: on some chips a single write cannot use the whole bandwidth.

    Args:
        buffers_ref: Two results, of numbers even and odd.
        written: The semaphore of each.
        number: The result's.
        to: Where in HBM a part of the rows goes.
        block: Which block of rows the result is.
        size: All rows.
    """
    length, slot = buffers_ref.shape[1], jax.lax.rem(number, 2)
    count = PIECES if length % (PIECES * LONGEST_TILE) == 0 else 1
    length //= count
    for piece in range(count):
        part, source = part_of(block * count + piece, length, size), buffers_ref.at[slot, pl.ds(piece * length, length)]
        yield pltpu.make_async_copy(source, to(part), written.at[slot])


def _await(pieces) -> None:
    for piece in pieces:
        piece.wait()


def await_buffer(pieces, number, when) -> None:
    """Waits until the result before last, which has this one's buffer, is written."""
    pl.when(when & (number >= 2))(lambda: _await(pieces(number - 2)))


def send(pieces, number, complete, last) -> None:
    """Starts writing a result that is complete; waits for all where it is the last one."""

    @pl.when(complete)
    def _():
        for piece in pieces(number):
            piece.start()

    @pl.when(last)
    def _():
        pl.when(number >= 1)(lambda: _await(pieces(number - 1)))
        _await(pieces(number))


def rows_of(m: int, block: int, tile: int | None, dtype: Any) -> tuple[int, int]:
    """block_m as far as m goes, and how many of its rows are multiplied at a time.

    Raises:
        UsageError: Not all of them start where a slice in VMEM may: the compiler would take others without a word.
    """
    align, block = sublanes(str(dtype)), min(block, m)
    tile = min(tile or block, block)
    if block < 1 or (block < m and block % align):
        raise UsageError(f"block_m={block}: must be a positive multiple of {align}, or the whole m={m}")
    if tile < 1 or (tile < block and (tile % align or block % tile)):
        raise UsageError(
            f"block_m_compute={tile} with block_m={block}: must be the same, or a multiple of {align} that divides it"
        )
    return block, tile


def buffers_of(array: jax.Array, *block: int) -> list[Any]:
    """Scratch for two blocks of the array, and the semaphores of their transfers."""
    return [pltpu.VMEM((2, *block), array.dtype), pltpu.SemaphoreType.DMA((2,))]


def part_of(block, length: int, size: int):
    """The block's part of a dimension of `size`; the whole of one block need not be aligned."""
    return slice(None) if length == size else pl.ds(pl.multiple_of(block * length, length), length)


def div(x: jax.Array, y: int) -> jax.Array:
    """x // y of a scalar that is not negative, without the code for those that are."""
    return jax.lax.div(x, jnp.int32(y))


def product_of(x, y, x_side: int, y_side: int):
    """x and y contracted over a side of each, in float32."""
    if y_side == 1 and y.shape[0] == 1:  # Mosaic broadcasts no single row of 16 bits.
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jax.lax.dot_general(
        x,
        y,
        (((x_side,), (y_side,)), ((), ())),
        precision=dot_precision(x.dtype),
        preferred_element_type=jnp.float32,
    )
