"""The grouped matmul for a TPU, and the gradient of its right-hand sides.

The grid walks visits (see `visits`): one group's rows of one row tile. Both kernels fetch whole tiles, but compute only
the rows of the visit's group, in tiles of `block_m_compute` that start at the group's first row (rounded to what a
slice in VMEM may start at). Groups shorter than a block therefore cost about their own rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels._compiler import compiler_params
from kernels._precision import dot_precision
from kernels._tpu_model import sublanes
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
        vmem_limit_mib: VMEM the compiler may use for the kernel, MiB; None is its default.
        interpret: Passed to `pallas_call`.

    Returns:
        ``[m, n]`` in lhs' dtype, zeros where a row has no group; sums are float32.
    """
    (m, k), groups = lhs.shape, rhs.shape[0]
    n = rhs.shape[1 if transpose_rhs else 2]
    block_m, block_n, block_k = min(block_m, m), min(block_n, n), min(block_k, k)
    tile, steps = min(block_m_compute or block_m, block_m), pl.cdiv(k, block_k)
    # Rows without a group are one more group, whose result is zeros.
    rest = jnp.maximum(m - jnp.sum(group_sizes, dtype=jnp.int32), 0)
    visits = plan_visits(jnp.append(group_sizes.astype(jnp.int32), rest), m, block_m, empty_too=False)

    def lhs_map(j, visit, step, group, row_tile, bounds):
        # The rest's visits repeat the last block: nothing is fetched for them.
        last = lax_div(jnp.maximum(bounds[groups] - 1, 0), block_m)
        return jnp.minimum(row_tile[visit], last), jnp.where(group[visit] == groups, steps - 1, step)

    def rhs_map(j, visit, step, group, row_tile, bounds):
        at = jnp.minimum(group[visit], groups - 1)
        step = jnp.where(group[visit] == groups, steps - 1, step)
        return (at, j, step) if transpose_rhs else (at, step, j)

    rhs_block = (None, block_n, block_k) if transpose_rhs else (None, block_k, block_n)
    kernel = functools.partial(
        _grouped_matmul_kernel,
        rest=groups,
        tile=tile,
        steps=steps,
        tail=k % block_k or block_k,
        transpose_rhs=transpose_rhs,
    )
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), lhs.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(n, block_n), visits.count, steps),
            in_specs=[pl.BlockSpec((block_m, block_k), lhs_map), pl.BlockSpec(rhs_block, rhs_map)],
            out_specs=pl.BlockSpec((block_m, block_n), lambda j, visit, step, group, tiles, _: (tiles[visit], j)),
            scratch_shapes=[pltpu.VMEM((block_m, block_n), jnp.float32)] if steps > 1 else [],
        ),
        compiler_params=compiler_params("parallel", "arbitrary", "arbitrary", vmem_limit_mib=vmem_limit_mib),
        interpret=interpret,
        name="grouped_matmul",
    )(visits.groups, visits.tiles, visits.bounds, lhs, rhs)


def lax_div(x, y):
    return jax.lax.div(x, jnp.int32(y))


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
        first = lax_div(start, align) * align

        def one(i, _):
            row = pl.multiple_of(jnp.minimum(first + i * tile, block - tile), align)
            body(pl.ds(row, tile), pl.ds(pl.multiple_of(i * tile, tile), tile), row)

        jax.lax.fori_loop(0, lax_div(end - first + tile - 1, tile), one, None)

    def store(rows, row, value) -> None:
        index = row + jax.lax.broadcasted_iota(jnp.int32, (tile, out_ref.shape[1]), 0)
        mine = (index >= start) & (index < end)
        kept = out_ref[rows, :].astype(jnp.float32)
        out_ref[rows, :] = jnp.where(mine, value, kept).astype(out_ref.dtype)

    def product(rows, length):
        x = lhs_ref[rows, :length]
        y = rhs_ref[:, :length] if transpose_rhs else rhs_ref[:length, :]
        return _product(x, y, 1, 1 if transpose_rhs else 0)

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


def grouped_matmul_drhs_pallas(
    lhs: jax.Array,
    grad: jax.Array,
    group_sizes: jax.Array,
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    block_m_compute: int | None = None,
    vmem_limit_mib: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """``out[g] = lhs[rows of g]ᵀ @ grad[rows of g]``, in blocks; the lengths need not be multiples of the blocks.

    Args:
        lhs: ``[m, k]``, bfloat16 or float32, its rows sorted by group.
        grad: ``[m, n]``, of lhs' dtype.
        group_sizes: ``[groups]``, integers; as `grouped_matmul_pallas`'.
        block_m: Rows fetched per grid step: the whole m or a multiple of 8 (float32) or 16 (bfloat16).
        block_n: Columns of a result's tile: the whole n or a multiple of 128.
        block_k: Rows of a result's tile: the whole k or a multiple of 128.
        block_m_compute: Rows contracted at a time: a part of block_m and a multiple of 8 or 16; None is block_m.
        vmem_limit_mib: VMEM the compiler may use for the kernel, MiB; None is its default.
        interpret: Passed to `pallas_call`.

    Returns:
        ``[groups, k, n]`` in lhs' dtype, zeros for a group without rows; sums are float32.
    """
    (m, k), n, groups = lhs.shape, grad.shape[1], group_sizes.shape[0]
    block_m, block_n, block_k = min(block_m, m), min(block_n, n), min(block_k, k)
    tile = min(block_m_compute or block_m, block_m)
    visits = plan_visits(group_sizes, m, block_m, empty_too=True)
    return pl.pallas_call(
        functools.partial(_drhs_kernel, tile=tile),
        out_shape=jax.ShapeDtypeStruct((groups, k, n), lhs.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(k, block_k), pl.cdiv(n, block_n), visits.count),
            in_specs=[
                pl.BlockSpec((block_m, block_k), lambda i, j, visit, group, tiles, _: (tiles[visit], i)),
                pl.BlockSpec((block_m, block_n), lambda i, j, visit, group, tiles, _: (tiles[visit], j)),
            ],
            out_specs=pl.BlockSpec((None, block_k, block_n), lambda i, j, visit, group, *_: (group[visit], i, j)),
            scratch_shapes=[pltpu.VMEM((block_k, block_n), jnp.float32)],
        ),
        compiler_params=compiler_params("parallel", "parallel", "arbitrary", vmem_limit_mib=vmem_limit_mib),
        interpret=interpret,
        name="grouped_matmul_drhs",
    )(visits.groups, visits.tiles, visits.bounds, lhs, grad)


def _drhs_kernel(groups_ref, tiles_ref, bounds_ref, lhs_ref, grad_ref, out_ref, sum_ref, *, tile: int) -> None:
    visit = pl.program_id(2)
    group, block = groups_ref[visit], lhs_ref.shape[0]
    offset = tiles_ref[visit] * block
    group_start, group_end = bounds_ref[group] - offset, bounds_ref[group + 1] - offset
    start, end = jnp.maximum(group_start, 0), jnp.minimum(group_end, block)
    align = sublanes(str(lhs_ref.dtype))

    @pl.when(group_start >= 0)  # its first visit
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def add(rows, row, start) -> None:
        """The tile's rows from `start` to the group's end; what else lies there may be NaN."""

        def mine(ref):
            index = row + jax.lax.broadcasted_iota(jnp.int32, (tile, ref.shape[1]), 0)
            return jnp.where((index >= start) & (index < end), ref[rows, :].astype(jnp.float32), 0.0).astype(ref.dtype)

        sum_ref[...] += _product(mine(lhs_ref), mine(grad_ref), 0, 0)

    if tile == block:
        pl.when(end > start)(lambda: add(slice(None), 0, start))
    else:
        first = lax_div(start, align) * align

        def one(i, _):
            low = first + i * tile
            row = pl.multiple_of(jnp.minimum(low, block - tile), align)
            add(pl.ds(row, tile), row, jnp.maximum(low, start))

        jax.lax.fori_loop(0, lax_div(jnp.maximum(end - first, 0) + tile - 1, tile), one, None)

    @pl.when(group_end <= block)  # its last visit
    def _():
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def _product(x, y, x_side: int, y_side: int):
    """x and y contracted over a side of each, in float32."""
    return jax.lax.dot_general(
        x,
        y,
        (((x_side,), (y_side,)), ((), ())),
        precision=dot_precision(x.dtype),
        preferred_element_type=jnp.float32,
    )
