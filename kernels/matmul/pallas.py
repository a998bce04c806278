"""The tiled matmul for a TPU.

The classic blocking: the grid walks (m / block_m, n / block_n, k / block_k) with k innermost, an output
tile's partial sums stay in a float32 VMEM accumulator, and the pipeline fetches the next blocks of x and
y while the MXU works on these. A transposed operand comes in blocks of its stored layout; bias and activation
are applied to the sum before its only store.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels._activations import ACTIVATIONS
from kernels._compiler import compiler_params, output_like
from kernels._grid import tile_specs
from kernels._precision import dot, sum_dtype
from kernels.matmul.problem import RESULTS


def matmul_pallas(
    x: jax.Array,
    y: jax.Array,
    bias: jax.Array | None = None,
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    activation: str = "none",
    block_m: int,
    block_n: int,
    block_k: int,
    grid_order: str = "mn",
    held_buffers: int = 2,
    vmem_limit_mib: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """``act(x[m, k] @ y[k, n] + bias[n])`` in blocks; the lengths need not be multiples of the blocks.

    Args:
        x: ``[m, k]``, or ``[k, m]`` with `transpose_lhs`: bfloat16, float32, int8 or a float8.
        y: ``[k, n]``, or ``[n, k]`` with `transpose_rhs`, of x's dtype.
        bias: ``[n]`` or None.
        transpose_lhs: x is stored ``[k, m]``.
        transpose_rhs: y is stored ``[n, k]``.
        activation: ``none``, ``relu``, ``gelu`` (the tanh approximation) or ``silu``.
        block_m: Rows of an output tile: the whole m or a multiple of 8 (float32), 16 (bfloat16) or 32 (8 bits);
            of 128 where `transpose_lhs` puts them along the lanes.
        block_n: Columns of an output tile: the whole n or a multiple of 128.
        block_k: Contracted length per grid step: the whole k or a multiple of 128.
        grid_order: The outer two grid dimensions: ``mn`` walks n within m, ``nm`` m within n.
        held_buffers: VMEM buffers of the operand that the inner tile loop holds still where block_k is the
            whole k (x in ``mn``, y in ``nm``). 2 fetches its next block ahead; 1 waits for it, but leaves
            VMEM for larger blocks. (Pallas' own pipeline takes 1 or 2.)
        vmem_limit_mib: VMEM the compiler may use for the kernel, MiB; None is its default.
        interpret: Passed to `pallas_call`.

    Returns:
        ``[m, n]`` in x's dtype, summed in float32; int32 for int8 operands, bfloat16 for float8 ones.
    """
    (m, k), n = x.shape[:: -1 if transpose_lhs else 1], y.shape[0 if transpose_rhs else 1]
    block_m, block_n, block_k = min(block_m, m), min(block_n, n), min(block_k, k)
    tiles, steps = {"m": pl.cdiv(m, block_m), "n": pl.cdiv(n, block_n)}, pl.cdiv(k, block_k)

    spec = tile_specs(grid_order)
    x_held, y_held = (held_buffers, 2) if grid_order == "mn" else (2, held_buffers)
    in_specs = [
        spec((block_m, block_k), lambda i, j, step: (i, step), transpose=transpose_lhs, held=x_held),
        spec((block_k, block_n), lambda i, j, step: (step, j), transpose=transpose_rhs, held=y_held),
    ]
    biases = () if bias is None else (bias.reshape(1, n),)
    if biases:
        in_specs.append(spec((1, block_n), lambda i, j, step: (0, j)))
    kernel = functools.partial(
        _whole_k_kernel if steps == 1 else functools.partial(_matmul_kernel, steps=steps, tail=k % block_k),
        transposed={"transpose_lhs": transpose_lhs, "transpose_rhs": transpose_rhs},
        finish=functools.partial(_finish, activation=activation),
    )
    return pl.pallas_call(
        kernel,
        out_shape=output_like((m, n), RESULTS.get(str(x.dtype), x.dtype), x),
        grid=(tiles[grid_order[0]], tiles[grid_order[1]], steps),
        in_specs=in_specs,
        out_specs=spec((block_m, block_n), lambda i, j, step: (i, j)),
        scratch_shapes=[pltpu.VMEM((block_m, block_n), sum_dtype(x.dtype))] if steps > 1 else [],
        compiler_params=compiler_params("parallel", "parallel", "arbitrary", vmem_limit_mib=vmem_limit_mib),
        interpret=interpret,
        name="matmul",
    )(x, y, *biases)


def _whole_k_kernel(x_ref, y_ref, *refs, transposed, finish) -> None:
    """One output tile where a block holds the whole k: nothing to accumulate."""
    *bias_ref, out_ref = refs
    out_ref[...] = finish(dot(x_ref[...], y_ref[...], **transposed), *bias_ref).astype(out_ref.dtype)


def _matmul_kernel(x_ref, y_ref, *refs, steps: int, tail: int, transposed, finish) -> None:
    """One grid step: adds x's block times y's to the accumulator, and stores what it becomes after the last.

    Args:
        refs: The bias where there is one, the result, the accumulator.
        steps: Grid steps along k.
        tail: Length of the last k block where it is cut short, else 0. What lies beyond it in VMEM is
            whatever was there, so that step multiplies the part that exists and no other.
        transposed: Which operands lie transposed, as `dot` takes it.
        finish: A function of the sum and the bias.
    """
    *bias_ref, out_ref, acc_ref = refs
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    if tail:  # Static: blocks that divide k pay nothing.

        @pl.when(step < steps - 1)
        def _():
            acc_ref[...] += dot(x_ref[...], y_ref[...], **transposed)

        @pl.when(step == steps - 1)
        def _():
            x = x_ref[:tail, :] if transposed["transpose_lhs"] else x_ref[:, :tail]
            y = y_ref[:, :tail] if transposed["transpose_rhs"] else y_ref[:tail, :]
            acc_ref[...] += dot(x, y, **transposed)
    else:
        acc_ref[...] += dot(x_ref[...], y_ref[...], **transposed)

    @pl.when(step == steps - 1)
    def _():
        out_ref[...] = finish(acc_ref[...], *bias_ref).astype(out_ref.dtype)


def _finish(total: jax.Array, bias_ref=None, *, activation: str) -> jax.Array:
    """What becomes of a tile's sum, in float32 (of integers: the sum itself)."""
    if bias_ref is not None:
        total += bias_ref[...].astype(jnp.float32)
    return ACTIVATIONS[activation](total)
