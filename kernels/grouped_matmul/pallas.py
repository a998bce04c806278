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

from autotune.errors import UsageError
from kernels._compiler import compiler_params
from kernels._precision import dot_precision
from kernels._tpu_model import sublanes
from kernels.grouped_matmul.visits import plan_visits

PIECES = 2  # of a written result
LONGEST_TILE = 16  # rows of a VMEM tile


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
        transfers: When rows and right-hand sides are fetched: one grid ``step`` before they are needed, as Pallas does
            it, or ``early``: while the tile or the group before is worked on, however many steps these have. That
            takes a block_k of the whole k, and a block_m and a block_n that divide m and n.
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
        last = _div(jnp.maximum(bounds[groups] - 1, 0), block_m)
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
    in_specs = [pl.BlockSpec((block_m, block_k), lhs_map), pl.BlockSpec((None, *rhs_block), rhs_map)]
    if transfers == "early":
        if block_k < k or m % block_m or n % block_n:
            raise UsageError(f"transfers=early with {(m, n, k)} in {(block_m, block_n, block_k)}: must be whole blocks")
        kernel = functools.partial(_fetched_early, kernel=kernel, rest=groups, transpose_rhs=transpose_rhs)
        in_specs = [pl.BlockSpec(memory_space=pl.ANY)] * 2
        scratch = [*_buffers(lhs, block_m, block_k), *_buffers(rhs, *rhs_block), pltpu.SMEM((1,), jnp.int32)]
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), lhs.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(n, block_n), visits.count, steps),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((block_m, block_n), lambda j, visit, step, group, tiles, _: (tiles[visit], j)),
            scratch_shapes=scratch,
        ),
        compiler_params=compiler_params("parallel", "arbitrary", "arbitrary", vmem_limit_mib=vmem_limit_mib),
        interpret=interpret,
        name="grouped_matmul",
    )(visits.groups, visits.tiles, visits.bounds, lhs, rhs)


def _div(x: jax.Array, y: int) -> jax.Array:
    """x // y of a scalar that is not negative, without the code for those that are."""
    return jax.lax.div(x, jnp.int32(y))


def _fetch_rows(sources, visit, tiles_ref, used) -> None:
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


def _fetched_early(
    groups_ref, tiles_ref, bounds_ref, lhs_ref, rhs_ref, out_ref, rows_ref, rows_here, matrices_ref, matrices_here,
    slot_ref, *, kernel, rest: int, transpose_rhs: bool,
) -> None:  # fmt: skip
    """`kernel` with its row tile and its group's matrix, while those that follow are fetched into the other buffers.

    Args:
        rows_ref: Two row tiles, and their semaphores.
        matrices_ref: Two right-hand sides, and their semaphores.
        slot_ref: Which buffer is the present group's.
    """
    visit, visits = pl.program_id(1), pl.num_programs(1)
    group, (block_m, block_n) = groups_ref[visit], out_ref.shape
    columns = _part(pl.program_id(0), block_n, rhs_ref.shape[1 if transpose_rhs else 2])

    def fetch(group, slot):
        at = rhs_ref.at[group, columns, :] if transpose_rhs else rhs_ref.at[group, :, columns]
        return pltpu.make_async_copy(at, matrices_ref.at[slot], matrices_here.at[slot])

    @pl.when((visit == 0) & (group != rest))
    def _():
        slot_ref[0] = 1
        fetch(group, 0).start()

    used = _div(bounds_ref[rest] + block_m - 1, block_m)
    _fetch_rows(
        [(lambda tile: lhs_ref.at[_part(tile, block_m, lhs_ref.shape[0])], rows_ref, rows_here)], visit, tiles_ref, used
    )

    # Its first visit: the group before, if any, is another one.
    @pl.when(((visit == 0) | (groups_ref[jnp.maximum(visit - 1, 0)] != group)) & (group != rest))
    def _():
        slot = 1 - slot_ref[0]
        slot_ref[0] = slot
        fetch(group, slot).wait()
        further = visit + _div(bounds_ref[group + 1] - 1, block_m) - tiles_ref[visit] + 1
        following = groups_ref[jnp.minimum(further, visits - 1)]
        pl.when((further < visits) & (following != rest))(lambda: fetch(following, 1 - slot).start())

    rows = rows_ref.at[jax.lax.rem(tiles_ref[visit], 2)]
    kernel(groups_ref, tiles_ref, bounds_ref, rows, matrices_ref.at[slot_ref[0]], out_ref)


def _buffers(array: jax.Array, *block: int) -> list[Any]:
    """Scratch for two blocks of the array, and the semaphores of their transfers."""
    return [pltpu.VMEM((2, *block), array.dtype), pltpu.SemaphoreType.DMA((2,))]


def _part(block, length: int, size: int):
    """The block's part of a dimension of `size`; the whole of one block need not be aligned."""
    return slice(None) if length == size else pl.ds(pl.multiple_of(block * length, length), length)


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
        first = _div(start, align) * align

        def one(i, _):
            row = pl.multiple_of(jnp.minimum(first + i * tile, block - tile), align)
            body(pl.ds(row, tile), pl.ds(pl.multiple_of(i * tile, tile), tile), row)

        jax.lax.fori_loop(0, _div(end - first + tile - 1, tile), one, None)

    def store(rows, row, value) -> None:
        """Keeps what earlier groups have in the tile. Rows past the group's end are left to the next visit."""
        index = row + jax.lax.broadcasted_iota(jnp.int32, (tile, out_ref.shape[1]), 0)
        kept = out_ref[rows, :].astype(jnp.float32)
        out_ref[rows, :] = jnp.where(index >= start, value, kept).astype(out_ref.dtype)

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
        transfers: As `grouped_matmul_pallas`'; ``early`` also gives a result the time of the next group to be written.
            It takes blocks that divide m, n and k.
        vmem_limit_mib: VMEM the compiler may use for the kernel, MiB; None is its default.
        interpret: Passed to `pallas_call`.

    Returns:
        ``[groups, k, n]`` in lhs' dtype, zeros for a group without rows; sums are float32.
    """
    (m, k), n, groups = lhs.shape, grad.shape[1], group_sizes.shape[0]
    block_m, block_n, block_k = min(block_m, m), min(block_n, n), min(block_k, k)
    tile = min(block_m_compute or block_m, block_m)
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
            scratch += _buffers(lhs, *block)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((groups, k, n), lhs.dtype),
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
    rows, columns = _part(tile_k, block_k, k), _part(tile_n, block_n, n)
    sources = [
        (lambda tile: lhs_ref.at[_part(tile, block_m, m), rows], lhs_tiles_ref, lhs_here),
        (lambda tile: grad_ref.at[_part(tile, block_m, m), columns], grad_tiles_ref, grad_here),
    ]
    _fetch_rows(sources, visit, tiles_ref, _div(bounds_ref[groups] + block_m - 1, block_m))

    def pieces(group):
        """The result's way out, in pieces: on some chips a single write cannot use the whole bandwidth."""
        count = PIECES if block_k % (PIECES * LONGEST_TILE) == 0 else 1
        slot, length = jax.lax.rem(group, 2), block_k // count
        for piece in range(count):
            part = pl.ds(piece * length, length)
            to = _part(tile_k * count + piece, length, k)
            yield pltpu.make_async_copy(results_ref.at[slot, part], out_ref.at[group, to, columns], written.at[slot])

    def wait(group) -> None:
        for piece in pieces(group):
            piece.wait()

    ends = bounds_ref[group + 1] <= (tiles_ref[visit] + 1) * block_m
    pl.when(ends & (group >= 2))(lambda: wait(group - 2))
    tile, result = jax.lax.rem(tiles_ref[visit], 2), jax.lax.rem(group, 2)
    operands = lhs_tiles_ref.at[tile], grad_tiles_ref.at[tile]
    kernel(groups_ref, tiles_ref, bounds_ref, *operands, results_ref.at[result], sum_ref)

    @pl.when(ends)
    def _():
        for piece in pieces(group):
            piece.start()

    @pl.when(ends & (group == groups - 1))
    def _():
        if groups > 1:
            wait(group - 1)
        wait(group)


def _drhs_kernel(groups_ref, tiles_ref, bounds_ref, lhs_ref, grad_ref, out_ref, sum_ref, *, tile: int) -> None:
    """One visit: adds its rows' products to the group's sum; the group's last tile of rows stores the result."""
    visit = pl.program_id(2)
    group, block = groups_ref[visit], lhs_ref.shape[0]
    offset = tiles_ref[visit] * block
    group_start, group_end = bounds_ref[group] - offset, bounds_ref[group + 1] - offset
    start, end = jnp.maximum(group_start, 0), jnp.minimum(group_end, block)
    align = sublanes(str(lhs_ref.dtype))
    first = 0 if tile == block else _div(start, align) * align
    count = jnp.where(end > start, _div(end - first + tile - 1, tile), 0)
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
        return before + _product(mine(lhs_ref), mine(grad_ref), 0, 0)

    def add(i, _) -> None:
        sum_ref[...] = so_far(i)

    jax.lax.fori_loop(0, count - last, add, None)

    @pl.when((last == 1) & (count > 0))
    def _():
        out_ref[...] = so_far(count - 1).astype(out_ref.dtype)

    @pl.when(group_start == group_end)
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)


def _product(x, y, x_side: int, y_side: int):
    """x and y contracted over a side of each, in float32."""
    return jax.lax.dot_general(
        x,
        y,
        (((x_side,), (y_side,)), ((), ())),
        precision=dot_precision(x.dtype),
        preferred_element_type=jnp.float32,
    )
