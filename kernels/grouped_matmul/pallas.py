"""The grouped matmul for a TPU.

The grid walks visits (see `visits`): one group's rows of one row tile. Whole tiles are fetched, but only the rows of
the visit's group are computed, in tiles of `block_m_compute` that start at the group's first row (rounded to what a
slice in VMEM may start at). Groups shorter than a block therefore cost about their own rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.errors import UsageError
from kernels._compiler import compiler_params, output_like
from kernels._tpu_model import sublanes
from kernels.grouped_matmul.transfers import (
    await_buffer,
    buffers_of,
    div,
    fetch_rows,
    part_of,
    pieces_of,
    product_of,
    rows_of,
    send,
)
from kernels.grouped_matmul.visits import plan_visits


def grouped_matmul_pallas(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool = False,
    block_m: int,
    block_n: int,
    block_k: int,
    block_m_compute: int | None = None,
    transfers: str = "step",
    vmem_limit_mib: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """``out[i] = lhs[i] @ rhs[group of i]``, in blocks; the lengths need not be multiples of the blocks.

    Args:
        lhs: ``[m, k]``, bfloat16 or float32: first the rows of group 0, then those of group 1 and so on.
        rhs: ``[groups, k, n]`` of lhs' dtype, or ``[groups, n, k]`` with transpose_rhs.
        group_sizes: ``[groups]``, integers: rows of each group, zeros allowed. Rows past their sum belong to none.
        transpose_rhs: Whether each right-hand side is used transposed (it is not copied for that).
        block_m: Rows of a tile: the whole m or a multiple of 8 (float32) or 16 (bfloat16).
        block_n: Columns of an output tile: the whole n or a multiple of 128.
        block_k: Contracted length per grid step: the whole k or a multiple of 128. The whole k fetches a group's
            right-hand side once for all of its row tiles.
        block_m_compute: Rows multiplied at a time: a part of block_m and a multiple of 8 or 16; None is block_m.
        transfers: When rows and right-hand sides are fetched, and results written: beside one grid ``step``, as
            Pallas does it, or ``early``: beside all of the tile or group before (results: after). That takes a
            block_k of the whole k, and a block_m and a block_n that divide m and n.
        vmem_limit_mib: VMEM the compiler may use for the kernel, MiB; None is its default.
        interpret: Passed to `pallas_call`.

    Returns:
        ``[m, n]`` in lhs' dtype, zeros where a row has no group; sums are float32.

    Raises:
        UsageError: block_m or block_m_compute is no such length, or ``early`` gets blocks that leave a part over.
    """
    (m, k), groups = lhs.shape, rhs.shape[0]
    n = rhs.shape[1 if transpose_rhs else 2]
    block_m, tile = rows_of(m, block_m, block_m_compute, lhs.dtype)
    block_n, block_k = min(block_n, n), min(block_k, k)
    steps = pl.cdiv(k, block_k)
    # Rows without a group are one more group, whose result is zeros.
    rest = jnp.maximum(m - jnp.sum(group_sizes, dtype=jnp.int32), 0)
    visits = plan_visits(jnp.append(group_sizes.astype(jnp.int32), rest), m, block_m, empty_too=False)

    def lhs_map(j, visit, step, group, row_tile, bounds):
        # The rest's visits repeat the last block: nothing is fetched for them.
        last = div(jnp.maximum(bounds[groups] - 1, 0), block_m)
        return jnp.minimum(row_tile[visit], last), jnp.where(group[visit] == groups, steps - 1, step)

    def rhs_map(j, visit, step, group, row_tile, bounds):
        at = jnp.minimum(group[visit], groups - 1)
        step = jnp.where(group[visit] == groups, steps - 1, step)
        return (at, j, step) if transpose_rhs else (at, step, j)

    rhs_block = (block_n, block_k) if transpose_rhs else (block_k, block_n)
    kernel = functools.partial(
        _grouped_matmul_kernel,
        rest=groups,
        tile=tile,
        steps=steps,
        tail=k % block_k or block_k,
        transpose_rhs=transpose_rhs,
    )
    scratch = [pltpu.VMEM((block_m, block_n), jnp.float32)] if steps > 1 else []
    out_spec = pl.BlockSpec((block_m, block_n), lambda j, visit, step, group, tiles, _: (tiles[visit], j))
    in_specs = [pl.BlockSpec((block_m, block_k), lhs_map), pl.BlockSpec((None, *rhs_block), rhs_map)]
    if transfers == "early":
        if block_k < k or m % block_m or n % block_n:
            raise UsageError(f"transfers=early with {(m, n, k)} in {(block_m, block_n, block_k)}: must be whole blocks")
        kernel = functools.partial(_fetched_early, kernel=kernel, rest=groups, transpose_rhs=transpose_rhs)
        *in_specs, out_spec = [pl.BlockSpec(memory_space=pl.ANY)] * 3
        scratch = [
            buffer
            for block in ((block_m, block_k), rhs_block, (block_m, block_n))
            for buffer in buffers_of(lhs, *block)
        ]
        scratch.append(pltpu.SMEM((1,), jnp.int32))
    return pl.pallas_call(
        kernel,
        out_shape=output_like((m, n), lhs.dtype, lhs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(n, block_n), visits.count, steps),
            in_specs=in_specs,
            out_specs=out_spec,
            scratch_shapes=scratch,
        ),
        compiler_params=compiler_params("parallel", "arbitrary", "arbitrary", vmem_limit_mib=vmem_limit_mib),
        interpret=interpret,
        name="grouped_matmul",
    )(visits.groups, visits.tiles, visits.bounds, lhs, rhs)


def _grouped_matmul_kernel(
    groups_ref, tiles_ref, bounds_ref, lhs_ref, rhs_ref, out_ref, *sums,
    rest: int, tile: int, steps: int, tail: int, transpose_rhs: bool,
) -> None:  # fmt: skip
    visit, step = pl.program_id(1), pl.program_id(2)
    group = groups_ref[visit]
    block = out_ref.shape[0]
    offset = tiles_ref[visit] * block
    start = jnp.maximum(bounds_ref[group] - offset, 0)
    end = jnp.minimum(bounds_ref[group + 1] - offset, block)
    align = sublanes(str(lhs_ref.dtype))

    def each_tile(body) -> None:
        if tile == block:
            body(slice(None), slice(None), 0)
            return
        first = div(start, align) * align

        def one(i, _):
            row = pl.multiple_of(jnp.minimum(first + i * tile, block - tile), align)
            body(pl.ds(row, tile), pl.ds(pl.multiple_of(i * tile, tile), tile), row)

        jax.lax.fori_loop(0, div(end - first + tile - 1, tile), one, None)

    def store(rows, row, value) -> None:
        """Keeps what earlier groups have in the tile. Rows past the group's end are left to the next visit."""
        index = row + jax.lax.broadcasted_iota(jnp.int32, (tile, out_ref.shape[1]), 0)
        kept = out_ref[rows, :].astype(jnp.float32)
        out_ref[rows, :] = jnp.where(index >= start, value, kept).astype(out_ref.dtype)

    def product(rows, length):
        x = lhs_ref[rows, :length]
        y = rhs_ref[:, :length] if transpose_rhs else rhs_ref[:length, :]
        return product_of(x, y, 1, 1 if transpose_rhs else 0)

    if steps > 1:

        @pl.when((step < steps - 1) & (group != rest))
        def _():
            def add(rows, at, _):
                so_far = jnp.where(step == 0, 0.0, sums[0][at, :])
                sums[0][at, :] = so_far + product(rows, lhs_ref.shape[1])

            each_tile(add)

    @pl.when((step == steps - 1) & (group != rest))
    def _():
        def finish(rows, at, row):
            value = product(rows, tail)
            store(rows, row, sums[0][at, :] + value if sums else value)

        each_tile(finish)

    @pl.when((step == steps - 1) & (group == rest))
    def _():
        each_tile(lambda rows, at, row: store(rows, row, 0.0))


def _fetched_early(
    groups_ref, tiles_ref, bounds_ref, lhs_ref, rhs_ref, out_ref, rows_ref, rows_here, matrices_ref, matrices_here,
    results_ref, written, slot_ref, *, kernel, rest: int, transpose_rhs: bool,
) -> None:  # fmt: skip
    """`kernel` with its row tile and its group's matrix, while those that follow are fetched into the other buffers.

    Args:
        rows_ref: Two row tiles, and their semaphores.
        matrices_ref: Two right-hand sides, and their semaphores.
        results_ref: Two tiles of the result, and their semaphores.
        slot_ref: Which buffer is the present group's.
    """
    visit, visits = pl.program_id(1), pl.num_programs(1)
    group, tile, (_, block_m, block_n) = groups_ref[visit], tiles_ref[visit], results_ref.shape
    columns = part_of(pl.program_id(0), block_n, out_ref.shape[1])

    def fetch(group, slot):
        at = rhs_ref.at[group, columns, :] if transpose_rhs else rhs_ref.at[group, :, columns]
        return pltpu.make_async_copy(at, matrices_ref.at[slot], matrices_here.at[slot])

    @pl.when((visit == 0) & (group != rest))
    def _():
        slot_ref[0] = 1
        fetch(group, 0).start()

    used = div(bounds_ref[rest] + block_m - 1, block_m)
    fetch_rows(
        [(lambda tile: lhs_ref.at[part_of(tile, block_m, lhs_ref.shape[0])], rows_ref, rows_here)],
        visit,
        tiles_ref,
        used,
    )

    # Its first visit: the group before, if any, is another one.
    @pl.when(((visit == 0) | (groups_ref[jnp.maximum(visit - 1, 0)] != group)) & (group != rest))
    def _():
        slot = 1 - slot_ref[0]
        slot_ref[0] = slot
        fetch(group, slot).wait()
        further = visit + div(bounds_ref[group + 1] - 1, block_m) - tiles_ref[visit] + 1
        following = groups_ref[jnp.minimum(further, visits - 1)]
        pl.when((further < visits) & (following != rest))(lambda: fetch(following, 1 - slot).start())

    def pieces(tile):
        return pieces_of(results_ref, written, tile, lambda part: out_ref.at[part, columns], tile, out_ref.shape[0])

    begins = (visit == 0) | (tiles_ref[jnp.maximum(visit - 1, 0)] != tile)
    await_buffer(pieces, tile, begins)
    rows, result = rows_ref.at[jax.lax.rem(tile, 2)], results_ref.at[jax.lax.rem(tile, 2)]
    kernel(groups_ref, tiles_ref, bounds_ref, rows, matrices_ref.at[slot_ref[0]], result)
    last = visit == visits - 1
    send(pieces, tile, last | (tiles_ref[jnp.minimum(visit + 1, visits - 1)] != tile), last)
