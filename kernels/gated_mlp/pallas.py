"""The gated MLP and its gradients for a TPU: two products, and what becomes of them, in one pass.

Blocked as the matmul is: the grid walks (m / block_m, n / block_n, k / block_k) with k innermost. Each block of
x is fetched once for both weights, and gate and up live nowhere but in their two float32 VMEM accumulators. The
backward pass computes them again in the same way and makes their gradients of them, tile by tile; the gradient of x
is two products of different operands with one sum.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels._activations import ACTIVATIONS
from kernels._compiler import compiler_params, output_like
from kernels._grid import tile_specs
from kernels._precision import dot


def gated_mlp_pallas(
    x: jax.Array, w_gate: jax.Array, w_up: jax.Array, *, activation: str = "silu", **config: Any
) -> jax.Array:
    """``act(x @ w_gate) * (x @ w_up)`` in blocks; the lengths need not be multiples of the blocks.

    Args:
        x: ``[m, k]``, bfloat16 or float32.
        w_gate: ``[k, n]``, of x's dtype; so is w_up.
        w_up: As w_gate.
        activation: ``silu`` or ``gelu`` (the tanh approximation).
        config: Blocks and the like: `_tiled` lists them.

    Returns:
        ``[m, n]`` in x's dtype; sums, activation and product are float32.
    """
    act = ACTIVATIONS[activation]

    def result(gate: jax.Array, up: jax.Array) -> tuple[jax.Array]:
        return (act(gate) * up,)

    (out,) = _tiled([x], [w_gate, w_up], [], result, results=1, name="gated_mlp", **config)
    return out


def gated_mlp_bwd_pallas(
    x: jax.Array, w_gate: jax.Array, w_up: jax.Array, grad: jax.Array, *, activation: str = "silu", **config: Any
) -> tuple[jax.Array, jax.Array]:
    """The gradients of gate ``x @ w_gate`` and of up ``x @ w_up``, which are computed again.

    Args:
        x: ``[m, k]``, bfloat16 or float32.
        w_gate: ``[k, n]``, of x's dtype; so is w_up.
        w_up: As w_gate.
        grad: ``[m, n]``, the gradient of ``act(gate) * up``, of x's dtype.
        activation: ``silu`` or ``gelu`` (the tanh approximation).
        config: Blocks and the like: `_tiled` lists them.

    Returns:
        Twice ``[m, n]`` in x's dtype, computed in float32.
    """

    def result(gate: jax.Array, up: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
        act, slope = jax.vjp(ACTIVATIONS[activation], gate)
        return slope(grad * up)[0], grad * act

    return _tiled([x], [w_gate, w_up], [grad], result, results=2, name="gated_mlp_bwd", **config)


def gated_mlp_dx_pallas(
    by_gate: jax.Array, by_up: jax.Array, w_gate: jax.Array, w_up: jax.Array, **config: Any
) -> jax.Array:
    """``by_gate @ w_gate.T + by_up @ w_up.T``, the gradient of x: one sum, the weights as they are stored.

    Args:
        by_gate: ``[m, k]``, bfloat16 or float32; k is what the forward pass calls n.
        by_up: As by_gate.
        w_gate: ``[n, k]``, of the same dtype.
        w_up: As w_gate.
        config: Blocks and the like: `_tiled` lists them.

    Returns:
        ``[m, n]`` in by_gate's dtype, summed in float32.
    """

    def result(total: jax.Array) -> tuple[jax.Array]:
        return (total,)

    (out,) = _tiled(
        [by_gate, by_up], [w_gate, w_up], [], result, results=1, transpose_rhs=True, name="gated_mlp_dx", **config
    )
    return out


def _tiled(
    lefts: Sequence[jax.Array],
    rights: Sequence[jax.Array],
    tiles: Sequence[jax.Array],
    result: Callable[..., tuple[jax.Array, ...]],
    *,
    results: int,
    name: str,
    transpose_rhs: bool = False,
    block_m: int,
    block_n: int,
    block_k: int,
    grid_order: str = "mn",
    held_buffers: int = 2,
    vmem_limit_mib: int | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """Products in one pass over their tiles, and what `result` makes of these.

    Args:
        lefts: ``[m, k]`` each. One alone is multiplied by every right, each product with a sum of its own; of two,
            each goes with its right, and both products have one sum.
        rights: ``[k, n]`` each, or ``[n, k]`` with `transpose_rhs`.
        tiles: ``[m, n]`` each, more of what `result` takes.
        result: A function of the sums' and the tiles' blocks, all float32.
        results: How many arrays it gives, each ``[m, n]`` of the operands' dtype.
        name: The kernel's, in profiles.
        transpose_rhs: The rights are stored ``[n, k]``.
        block_m: Rows of an output tile: the whole m or a multiple of 8 (float32) or 16 (bfloat16).
        block_n: Columns of an output tile: the whole n or a multiple of 128.
        block_k: Contracted length per grid step: the whole k or a multiple of 128.
        grid_order: The outer two grid dimensions: ``mn`` walks n within m, ``nm`` m within n.
        held_buffers: VMEM buffers of what the inner tile loop holds still where block_k is the whole k (lefts in
            ``mn``, rights in ``nm``). 2 fetches the next block ahead; 1 waits for it, but leaves VMEM for
            larger blocks. (Pallas' own pipeline takes 1 or 2.)
        vmem_limit_mib: VMEM the compiler may use for the kernel, MiB; None is its default.
        interpret: Passed to `pallas_call`.
    """
    (m, k), n, dtype = lefts[0].shape, rights[0].shape[0 if transpose_rhs else 1], lefts[0].dtype
    block_m, block_n, block_k = min(block_m, m), min(block_n, n), min(block_k, k)
    counts, steps = {"m": pl.cdiv(m, block_m), "n": pl.cdiv(n, block_n)}, pl.cdiv(k, block_k)
    spec = tile_specs(grid_order)
    left_held, right_held = (held_buffers, 2) if grid_order == "mn" else (2, held_buffers)
    left = spec((block_m, block_k), lambda i, j, step: (i, step), held=left_held)
    right = spec((block_k, block_n), lambda i, j, step: (step, j), transpose=transpose_rhs, held=right_held)
    tile = spec((block_m, block_n), lambda i, j, step: (i, j))
    sums = len(rights) if len(lefts) == 1 else 1
    kernel = functools.partial(
        _tiled_kernel,
        counts=(len(lefts), len(rights), len(tiles), results),
        result=result,
        transpose_rhs=transpose_rhs,
        steps=steps,
        lengths=(block_k, k % block_k or block_k),
    )
    return pl.pallas_call(
        kernel,
        out_shape=[output_like((m, n), dtype, lefts[0])] * results,
        grid=(counts[grid_order[0]], counts[grid_order[1]], steps),
        in_specs=[left] * len(lefts) + [right] * len(rights) + [tile] * len(tiles),
        out_specs=[tile] * results,
        scratch_shapes=[pltpu.VMEM((block_m, block_n), jnp.float32)] * sums if steps > 1 else [],
        compiler_params=compiler_params("parallel", "parallel", "arbitrary", vmem_limit_mib=vmem_limit_mib),
        interpret=interpret,
        name=name,
    )(*lefts, *rights, *tiles)


def _tiled_kernel(*refs, counts, result, transpose_rhs: bool, steps: int, lengths: tuple[int, int]) -> None:
    """One grid step: adds the blocks' products to the sums; the last one stores what becomes of them.

    Args:
        refs: Lefts, rights, tiles and results, so many as `counts` says, then the float32 sums; none of these where
            a block holds the whole k.
        steps: Grid steps along k.
        lengths: Of a k block, and of the last. What lies beyond that in VMEM is whatever was there, so the last step
            multiplies the part that exists and no other.
    """
    refs = iter(refs)
    lefts, rights, tiles, outs = ([next(refs) for _ in range(count)] for count in counts)
    sums = list(refs)
    step = pl.program_id(2)

    def products(length: int) -> list[jax.Array]:
        """Of this step, as each sum takes them."""

        def times(left, right) -> jax.Array:
            block = right[:, :length] if transpose_rhs else right[:length, :]
            return dot(left[:, :length], block, transpose_rhs=transpose_rhs)

        if len(lefts) == 1:
            return [times(lefts[0], right) for right in rights]
        return [functools.reduce(operator.add, map(times, lefts, rights))]

    if steps > 1:

        @pl.when(step < steps - 1)
        def _():
            for total, more in zip(sums, products(lengths[0]), strict=True):
                # A select beside the MXU costs nothing; a pass that stores zeros costs as much as one that adds.
                so_far = jnp.where(step == 0, 0.0, total[...])
                total[...] = so_far + more

    @pl.when(step == steps - 1 if steps > 1 else True)
    def _():
        totals = products(lengths[1])
        if sums:  # The last products go straight on, not through the sums' memory.
            totals = [total[...] + last for total, last in zip(sums, totals, strict=True)]
        blocks = (tile[...].astype(jnp.float32) for tile in tiles)
        for out, array in zip(outs, result(*totals, *blocks), strict=True):
            out[...] = array.astype(out.dtype)
