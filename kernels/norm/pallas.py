"""The norms for a TPU, forward and backward.

Both are bound by memory: what is computed must hide behind the rows' way from HBM and back. The grid walks
blocks of whole rows, which the pipeline fetches ahead; within a block a loop walks tiles of few rows, so that
what is computed from a row stays near the registers. The backward pass computes the rows' statistics anew: it
needs x anyway, and a saved column of float32 would take the room and the time of 128.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels._compiler import compiler_params, output_like
from kernels.norm.problem import Kind

SUBLANES = 8


def norm_pallas(
    x: jax.Array,
    params: Sequence[jax.Array],
    residual: jax.Array | None = None,
    *,
    kind: Kind,
    eps: float,
    block_rows: int,
    block_rows_compute: int,
    unroll: int = 1,
    write_pieces: int = 1,
    vmem_limit_mib: int | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """``(normed,)``, or ``(normed, x + residual)``; the rows need not be a multiple of the block.

    Args:
        x: ``[rows, d]``, bfloat16 or float32.
        params: ``(weight,)`` of an rmsnorm, ``(weight, bias)`` of a layernorm, ``[d]`` each.
        residual: ``[rows, d]`` of x's dtype, added before the norm. The norm is that of the sum before it is rounded.
        kind: Which norm.
        eps: Added to the mean square (rmsnorm) or to the variance (layernorm).
        block_rows: Rows fetched per grid step: a multiple of 8 (float32) or 16 (bfloat16).
        block_rows_compute: Rows per tile, a multiple of the same that divides block_rows.
        unroll: Tiles in one pass of the loop over a block's tiles.
        write_pieces: Transfers that take a block of results to HBM. With 1 they are the pipeline's; more are the
            kernel's own (on v5e a single write cannot use the whole bandwidth), for a chip with one core and rows
            that are a multiple of the block.
        vmem_limit_mib: VMEM the compiler may use for the kernel, MiB; None is its default.
        interpret: Passed to `pallas_call`.

    Returns:
        ``[rows, d]`` each, in x's dtype; statistics are float32.
    """
    rows, d = x.shape
    arrays = [x] if residual is None else [x, residual]
    block = pl.BlockSpec((block_rows, d), lambda i: (i, 0))
    out_spec, scratch, order = block, [], "parallel"
    if write_pieces > 1:  # A step waits for what another one started: one core takes them in order.
        out_spec, order = pl.BlockSpec(memory_space=pl.ANY), "arbitrary"
        scratch = [pltpu.VMEM((2, block_rows, d), x.dtype)] * len(arrays) + [pltpu.SemaphoreType.DMA((2,))] * len(
            arrays
        )
    kernel = functools.partial(
        _forward_kernel, kind=kind, eps=eps, counts=(len(arrays), len(params)), tile_rows=block_rows_compute,
        unroll=unroll, write_pieces=write_pieces,
    )  # fmt: skip
    return tuple(
        pl.pallas_call(
            kernel,
            out_shape=[output_like(x.shape, x.dtype, x)] * len(arrays),
            grid=(pl.cdiv(rows, block_rows),),
            in_specs=[block] * len(arrays) + [pl.BlockSpec((1, d), lambda i: (0, 0))] * len(params),
            out_specs=[out_spec] * len(arrays),
            scratch_shapes=scratch,
            compiler_params=compiler_params(order, vmem_limit_mib=vmem_limit_mib),
            interpret=interpret,
            name=kind,
        )(*arrays, *(param.reshape(1, d) for param in params))
    )


def norm_backward_pallas(
    x: jax.Array,
    params: Sequence[jax.Array],
    grads: Sequence[jax.Array],
    *,
    kind: Kind,
    eps: float,
    block_rows: int,
    block_rows_compute: int,
    unroll: int = 1,
    parts: int = 1,
    vmem_limit_mib: int | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """The gradients of x and of each of `params`: ``(dx, dweight)``, and a layernorm's ``dbias``.

    Args:
        x: ``[rows, d]``, what was normed: the sum where a residual was added.
        params: As `norm_pallas`'s.
        grads: ``[rows, d]`` each, of x's dtype: the gradient of the normed rows, and that of the sum where a
            residual was added.
        kind: Which norm.
        eps: As `norm_pallas`'s.
        block_rows: As `norm_pallas`'s.
        block_rows_compute: As `norm_pallas`'s.
        unroll: As `norm_pallas`'s.
        parts: The rows are dealt out in so many parts, each with its own sums over rows, which XLA adds up: one for
            each core that works on them (two on v4 and v5p).
        vmem_limit_mib: As `norm_pallas`'s.
        interpret: Passed to `pallas_call`.

    Returns:
        dx ``[rows, d]`` in x's dtype (the gradient of x and of the residual alike), the others ``[d]`` in their
        parameter's; sums over rows are float32.
    """
    rows, d = x.shape
    blocks = pl.cdiv(rows, block_rows)
    parts = min(parts, blocks)
    steps = pl.cdiv(blocks, parts)
    # The last part may have steps left over: they stay where it was, and compute nothing.
    block = pl.BlockSpec((block_rows, d), lambda part, step: (jnp.minimum(part * steps + step, blocks - 1), 0))
    sums = [output_like((parts, 1, d), p.dtype if parts == 1 else jnp.float32, x) for p in params]
    kernel = functools.partial(
        _backward_kernel, kind=kind, eps=eps, grads=len(grads), rows=rows, even=rows == parts * steps * block_rows,
        tile_rows=block_rows_compute, unroll=unroll,
    )  # fmt: skip
    dx, *partial = pl.pallas_call(
        kernel,
        out_shape=[output_like(x.shape, x.dtype, x), *sums],
        grid=(parts, steps),
        in_specs=[block] * (1 + len(grads)) + [pl.BlockSpec((1, d), lambda part, step: (0, 0))],
        out_specs=[block] + [pl.BlockSpec((None, 1, d), lambda part, step: (part, 0, 0))] * len(params),
        scratch_shapes=[pltpu.VMEM((SUBLANES, d), jnp.float32)] * len(params),
        compiler_params=compiler_params("parallel", "arbitrary", vmem_limit_mib=vmem_limit_mib),
        interpret=interpret,
        name=f"{kind}_bwd",
    )(x, *grads, params[0].reshape(1, d))
    totals = [each[0, 0] if parts == 1 else jnp.sum(each, axis=(0, 1)) for each in partial]
    return dx, *(total.astype(param.dtype) for total, param in zip(totals, params, strict=True))


def _forward_kernel(
    *refs, kind: Kind, eps: float, counts: tuple[int, int], tile_rows: int, unroll: int, write_pieces: int
) -> None:
    """One grid step: a block's rows, tile by tile. Rows past the end are computed as well, and go nowhere.

    Args:
        refs: x and the residual, the parameters, the normed rows and the sums; with more than one piece the latter
            two are in HBM, and two buffers and semaphores for each follow.
        counts: Of x and the residual, and of the parameters.
        tile_rows: Rows of a tile.
    """
    arrays, params = counts
    inputs, (weight_ref, *bias_ref), refs = refs[:arrays], refs[arrays : arrays + params], refs[arrays + params :]
    outputs, buffers, semaphores = refs[:arrays], refs[arrays : 2 * arrays], refs[2 * arrays :]
    write = None
    if write_pieces > 1:
        write = functools.partial(_in_pieces, outputs, buffers, semaphores, write_pieces)
        step, steps = pl.program_id(0), pl.num_programs(0)
        outputs = [buffer.at[lax.rem(step, 2)] for buffer in buffers]
        pl.when(step >= 2)(lambda: _await(write(step - 2)))

    def tile(number) -> None:
        at = _tile(number, tile_rows)
        total = sum(_wide(ref, at) for ref in inputs)
        normed = _standardized(total, kind, eps)[0] * _wide(weight_ref)
        for ref in bias_ref:
            normed += _wide(ref)
        for ref, value in zip(outputs, (normed, total), strict=False):
            ref[at] = value.astype(ref.dtype)

    _each(inputs[0].shape[0] // tile_rows, unroll, tile)
    if write is not None:
        for copy in write(step):
            copy.start()

        @pl.when(step == steps - 1)
        def _():
            pl.when(step >= 1)(lambda: _await(write(step - 1)))
            _await(write(step))


def _await(copies: list[Any]) -> None:
    for copy in copies:
        copy.wait()


def _in_pieces(outputs, buffers, semaphores, pieces: int, step) -> list[Any]:
    """The transfers of a step's blocks from the buffers of their turn."""
    slot, block_rows = lax.rem(step, 2), buffers[0].shape[1]
    rows = block_rows // pieces
    return [
        pltpu.make_async_copy(
            buffer.at[slot, pl.ds(piece * rows, rows)],
            out.at[pl.ds(pl.multiple_of(step * block_rows + piece * rows, rows), rows)],
            semaphore.at[slot],
        )
        for out, buffer, semaphore in zip(outputs, buffers, semaphores, strict=True)
        for piece in range(pieces)
    ]


def _backward_kernel(
    *refs, kind: Kind, eps: float, grads: int, rows: int, even: bool, tile_rows: int, unroll: int
) -> None:
    """One grid step: the gradients of a block's rows, and what they add to the parameters' gradients.

    Args:
        refs: x, the gradients, the weight; dx and the parameters' gradients; their sums so far, of every eighth row.
        grads: 2 with a residual, else 1.
        rows: Of x. What lies past them in VMEM is whatever was there, and must not reach the sums.
        even: Whether every step has a block full of rows.
        tile_rows: Rows of a tile.
    """
    x_ref, grad_ref, *sum_grad_ref = refs[: 1 + grads]
    weight_ref, dx_ref, *refs = refs[1 + grads :]
    outputs, sums = refs[: len(refs) // 2], refs[len(refs) // 2 :]
    block_rows, d = x_ref.shape
    step, steps = pl.program_id(1), pl.num_programs(1)
    left = rows - (pl.program_id(0) * steps + step) * block_rows  # negative in a step left over

    @pl.when(step == 0)
    def _():
        for ref in sums:
            ref[...] = jnp.zeros_like(ref)

    def tile(number, *, masked: bool = False) -> None:
        at = _tile(number, tile_rows)
        normed, scale = _standardized(_wide(x_ref, at), kind, eps)
        grad = _wide(grad_ref, at)
        weighted = grad * _wide(weight_ref)
        # Less what the row's statistics take back: they change with x, too.
        dx = weighted - normed * jnp.mean(weighted * normed, axis=1, keepdims=True)
        if kind == "layernorm":
            dx -= jnp.mean(weighted, axis=1, keepdims=True)
        dx *= scale
        for ref in sum_grad_ref:
            dx += _wide(ref, at)
        dx_ref[at] = dx.astype(dx_ref.dtype)
        for ref, terms in zip(sums, (grad * normed, grad), strict=False):
            if masked:
                row = lax.broadcasted_iota(jnp.int32, terms.shape, 0)
                terms = jnp.where(row < left - number * tile_rows, terms, 0.0)
            ref[...] += jnp.sum(terms.reshape(-1, SUBLANES, d), axis=0)  # registers on registers, not across rows

    tiles = block_rows // tile_rows
    full = tiles if even else jnp.clip(lax.div(left, tile_rows), 0, tiles)
    _each(full, unroll, tile)
    if rows % tile_rows:
        pl.when((full < tiles) & (full * tile_rows < left))(lambda: tile(full, masked=True))

    @pl.when(step == steps - 1)
    def _():
        for ref, total in zip(outputs, sums, strict=True):
            ref[...] = jnp.sum(total[...], axis=0, keepdims=True).astype(ref.dtype)


def _tile(number, tile_rows: int) -> tuple:
    """The index of a block's rows that are tile `number`'s."""
    return pl.ds(pl.multiple_of(number * tile_rows, tile_rows), tile_rows), slice(None)


def _wide(ref, at=...) -> jax.Array:
    return ref[at].astype(jnp.float32)


def _standardized(x: jax.Array, kind: Kind, eps: float) -> tuple[jax.Array, jax.Array]:
    """Rows before weight and bias, and what they were multiplied by (``[rows, 1]``), all in float32."""
    if kind == "layernorm":
        x -= jnp.mean(x, axis=1, keepdims=True)
    scale = lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + eps)
    return x * scale, scale


def _each(count, unroll: int, body: Callable[[Any], None]) -> None:
    """Calls `body` with the numbers below `count`, `unroll` of them per pass of the loop."""
    static = isinstance(count, int)
    passes = count // unroll if static else lax.div(count, unroll)

    def several(number, _) -> None:
        for index in range(unroll):
            body(number * unroll + index)

    lax.fori_loop(0, passes, several, None)
    if not static or count % unroll:
        lax.fori_loop(passes * unroll, count, lambda number, _: body(number), None)
