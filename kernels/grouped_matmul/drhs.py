"""The grouped matmul's gradient with respect to its right-hand sides, for a TPU: see `pallas`, also for its visits."""

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


def grouped_matmul_drhs_pallas(
    lhs: jax.Array,
    grad: jax.Array,
    group_sizes: jax.Array,
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    block_m_compute: int | None = None,
    transfers: str = "step",
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
        transfers: As `grouped_matmul_pallas`'; ``early`` takes blocks that divide m, n and k.
        vmem_limit_mib: VMEM the compiler may use for the kernel, MiB; None is its default.
        interpret: Passed to `pallas_call`.

    Returns:
        ``[groups, k, n]`` in lhs' dtype, zeros for a group without rows; sums are float32.

    Raises:
        UsageError: block_m or block_m_compute is no such length, or ``early`` gets blocks that leave a part over.
    """
    (m, k), n, groups = lhs.shape, grad.shape[1], group_sizes.shape[0]
    block_m, tile = rows_of(m, block_m, block_m_compute, lhs.dtype)
    block_n, block_k = min(block_n, n), min(block_k, k)
    visits = plan_visits(group_sizes, m, block_m, empty_too=True)
    kernel = functools.partial(_drhs_kernel, tile=tile)
    scratch = [pltpu.VMEM((block_k, block_n), jnp.float32)]
    out_spec = pl.BlockSpec((None, block_k, block_n), lambda i, j, visit, group, *_: (group[visit], i, j))
    in_specs = [
        pl.BlockSpec((block_m, block_k), lambda i, j, visit, group, tiles, _: (tiles[visit], i)),
        pl.BlockSpec((block_m, block_n), lambda i, j, visit, group, tiles, _: (tiles[visit], j)),
    ]
    if transfers == "early":
        if m % block_m or n % block_n or k % block_k:
            raise UsageError(f"transfers=early with {(m, n, k)} in {(block_m, block_n, block_k)}: must be whole blocks")
        kernel = functools.partial(_drhs_early, kernel=kernel, groups=groups)
        *in_specs, out_spec = [pl.BlockSpec(memory_space=pl.ANY)] * 3
        for block in ((block_m, block_k), (block_m, block_n), (block_k, block_n)):
            scratch += buffers_of(lhs, *block)
    return pl.pallas_call(
        kernel,
        out_shape=output_like((groups, k, n), lhs.dtype, lhs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(k, block_k), pl.cdiv(n, block_n), visits.count),
            in_specs=in_specs,
            out_specs=out_spec,
            scratch_shapes=scratch,
        ),
        compiler_params=compiler_params("parallel", "parallel", "arbitrary", vmem_limit_mib=vmem_limit_mib),
        interpret=interpret,
        name="grouped_matmul_drhs",
    )(visits.groups, visits.tiles, visits.bounds, lhs, grad)


def _drhs_kernel(groups_ref, tiles_ref, bounds_ref, lhs_ref, grad_ref, out_ref, sum_ref, *, tile: int) -> None:
    """One visit: adds its rows' products to the group's sum; the group's last tile of rows stores the result."""
    visit = pl.program_id(2)
    group, block = groups_ref[visit], lhs_ref.shape[0]
    offset = tiles_ref[visit] * block
    group_start, group_end = bounds_ref[group] - offset, bounds_ref[group + 1] - offset
    start, end = jnp.maximum(group_start, 0), jnp.minimum(group_end, block)
    align = sublanes(str(lhs_ref.dtype))
    first = 0 if tile == block else div(start, align) * align
    count = jnp.where(end > start, div(end - first + tile - 1, tile), 0)
    last = (group_end <= block).astype(jnp.int32)  # whether it is the group's last visit

    def so_far(i):
        low = first + i * tile
        row = 0 if tile == block else pl.multiple_of(jnp.minimum(low, block - tile), align)
        rows = slice(None) if tile == block else pl.ds(row, tile)

        def mine(ref):
            """The tile's rows of the group that no tile before had; what else lies there may be NaN."""
            index = row + jax.lax.broadcasted_iota(jnp.int32, (tile, ref.shape[1]), 0)
            mask = (index >= jnp.maximum(low, start)) & (index < end)
            return jnp.where(mask, ref[rows, :].astype(jnp.float32), 0.0).astype(ref.dtype)

        # A select beside the MXU costs nothing; a pass that stores zeros costs as much as one that adds.
        before = jnp.where((group_start >= 0) & (i == 0), 0.0, sum_ref[...])
        return before + product_of(mine(lhs_ref), mine(grad_ref), 0, 0)

    def add(i, _) -> None:
        sum_ref[...] = so_far(i)

    jax.lax.fori_loop(0, count - last, add, None)

    @pl.when((last == 1) & (count > 0))
    def _():
        out_ref[...] = so_far(count - 1).astype(out_ref.dtype)

    @pl.when(group_start == group_end)
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)


def _drhs_early(
    groups_ref, tiles_ref, bounds_ref, lhs_ref, grad_ref, out_ref, sum_ref, lhs_tiles_ref, lhs_here, grad_tiles_ref,
    grad_here, results_ref, written, *, kernel, groups: int,
) -> None:  # fmt: skip
    """`kernel` with its row tiles while the next ones are fetched, and the last group's result is written.

    Args:
        lhs_tiles_ref: Two row tiles, and their semaphores; so with grad's.
        results_ref: Two results, and their semaphores.
    """
    tile_k, tile_n, visit = (pl.program_id(axis) for axis in range(3))
    (_, block_k, block_n), block_m, group = results_ref.shape, lhs_tiles_ref.shape[1], groups_ref[visit]
    (m, k), n = lhs_ref.shape, grad_ref.shape[1]
    rows, columns = part_of(tile_k, block_k, k), part_of(tile_n, block_n, n)
    sources = [
        (lambda tile: lhs_ref.at[part_of(tile, block_m, m), rows], lhs_tiles_ref, lhs_here),
        (lambda tile: grad_ref.at[part_of(tile, block_m, m), columns], grad_tiles_ref, grad_here),
    ]
    fetch_rows(sources, visit, tiles_ref, div(bounds_ref[groups] + block_m - 1, block_m))

    def pieces(group):
        return pieces_of(results_ref, written, group, lambda part: out_ref.at[group, part, columns], tile_k, k)

    ends = bounds_ref[group + 1] <= (tiles_ref[visit] + 1) * block_m
    await_buffer(pieces, group, ends)
    tile, result = jax.lax.rem(tiles_ref[visit], 2), jax.lax.rem(group, 2)
    operands = lhs_tiles_ref.at[tile], grad_tiles_ref.at[tile]
    kernel(groups_ref, tiles_ref, bounds_ref, *operands, results_ref.at[result], sum_ref)
    send(pieces, group, ends, ends & (group == groups - 1))
