"""The tiled matmul for a TPU.

The classic blocking: the grid walks (m / block_m, n / block_n, k / block_k) with k innermost, an output
tile's partial sums stay in a float32 VMEM accumulator, and the pipeline fetches the next blocks of x and
y while the MXU works on these.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels._compiler import compiler_params
from kernels._precision import dot


def matmul_pallas(
    x: jax.Array,
    y: jax.Array,
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    grid_order: str = "mn",
    held_buffers: int = 2,
    vmem_limit_mib: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """``x[m, k] @ y[k, n]`` in blocks; the lengths need not be multiples of the blocks.

    Args:
        x: ``[m, k]``, bfloat16 or float32.
        y: ``[k, n]``, of x's dtype.
        block_m: Rows of an output tile: the whole m or a multiple of 8 (float32) or 16 (bfloat16).
        block_n: Columns of an output tile: the whole n or a multiple of 128.
        block_k: Contracted length per grid step: the whole k or a multiple of 128.
        grid_order: The outer two grid dimensions: ``mn`` walks n within m, ``nm`` m within n.
        held_buffers: VMEM buffers of the operand that the inner tile loop holds still where block_k is the
            whole k (x in ``mn``, y in ``nm``). 2 fetches its next block ahead; 1 waits for it, but leaves
            VMEM for larger blocks. (Pallas' own pipeline takes 1 or 2.)
        vmem_limit_mib: VMEM the compiler may use for the kernel, MiB; None is its default.
        interpret: Passed to `pallas_call`.

    Returns:
        ``[m, n]`` in x's dtype, summed in float32.
    """
    (m, k), n = x.shape, y.shape[1]
    block_m, block_n, block_k = min(block_m, m), min(block_n, n), min(block_k, k)
    tiles, steps = {"m": pl.cdiv(m, block_m), "n": pl.cdiv(n, block_n)}, pl.cdiv(k, block_k)

    def at(index_map):
        """`index_map` takes (tile row, tile column, k step) whatever order the grid walks them in."""
        return index_map if grid_order == "mn" else lambda j, i, step: index_map(i, j, step)

    held = pl.Buffered(1) if held_buffers == 1 else None
    x_mode, y_mode = (held, None) if grid_order == "mn" else (None, held)
    return pl.pallas_call(
        _whole_k_kernel if steps == 1 else functools.partial(_matmul_kernel, steps=steps, tail=k % block_k),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid=(tiles[grid_order[0]], tiles[grid_order[1]], steps),
        in_specs=[
            pl.BlockSpec((block_m, block_k), at(lambda i, j, step: (i, step)), pipeline_mode=x_mode),
            pl.BlockSpec((block_k, block_n), at(lambda i, j, step: (step, j)), pipeline_mode=y_mode),
        ],
        out_specs=pl.BlockSpec((block_m, block_n), at(lambda i, j, step: (i, j))),
        scratch_shapes=[pltpu.VMEM((block_m, block_n), jnp.float32)] if steps > 1 else [],
        compiler_params=compiler_params("parallel", "parallel", "arbitrary", vmem_limit_mib=vmem_limit_mib),
        interpret=interpret,
        name="matmul",
    )(x, y)


def _whole_k_kernel(x_ref, y_ref, out_ref) -> None:
    """One output tile where a block holds the whole k: nothing to accumulate."""
    out_ref[...] = dot(x_ref[...], y_ref[...]).astype(out_ref.dtype)


def _matmul_kernel(x_ref, y_ref, out_ref, acc_ref, *, steps: int, tail: int) -> None:
    """One grid step: adds x's block times y's to the accumulator, and stores it after the last.

    Args:
        steps: Grid steps along k.
        tail: Length of the last k block where it is cut short, else 0. What lies beyond it in VMEM is
            whatever was there, so that step multiplies the part that exists and no other.
    """
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    if tail:  # Static: blocks that divide k pay nothing.

        @pl.when(step < steps - 1)
        def _():
            acc_ref[...] += dot(x_ref[...], y_ref[...])

        @pl.when(step == steps - 1)
        def _():
            acc_ref[...] += dot(x_ref[:, :tail], y_ref[:tail, :])
    else:
        acc_ref[...] += dot(x_ref[...], y_ref[...])

    @pl.when(step == steps - 1)
    def _():
        out_ref[...] = acc_ref[...].astype(out_ref.dtype)
