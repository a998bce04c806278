"""The gated MLP for a TPU: two products of the same x, and what becomes of them, in one pass.

Blocked as the matmul is: the grid walks (m / block_m, n / block_n, k / block_k) with k innermost. Each block of
x is fetched once for both weights, and gate and up live nowhere but in their two float32 VMEM accumulators.
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
from kernels.gated_mlp.reference import ACTIVATIONS


def gated_mlp_pallas(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    *,
    activation: str = "silu",
    block_m: int,
    block_n: int,
    block_k: int,
    grid_order: str = "mn",
    held_buffers: int = 2,
    vmem_limit_mib: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """``act(x @ w_gate) * (x @ w_up)`` in blocks; the lengths need not be multiples of the blocks.

    Args:
        x: ``[m, k]``, bfloat16 or float32.
        w_gate: ``[k, n]``, of x's dtype; so is w_up.
        w_up: As w_gate.
        activation: ``silu`` or ``gelu`` (the tanh approximation).
        block_m: Rows of an output tile: the whole m or a multiple of 8 (float32) or 16 (bfloat16).
        block_n: Columns of an output tile: the whole n or a multiple of 128.
        block_k: Contracted length per grid step: the whole k or a multiple of 128.
        grid_order: The outer two grid dimensions: ``mn`` walks n within m, ``nm`` m within n.
        held_buffers: VMEM buffers of what the inner tile loop holds still where block_k is the whole k (x in
            ``mn``, the weights in ``nm``). 2 fetches the next block ahead; 1 waits for it, but leaves VMEM for
            larger blocks. (Pallas' own pipeline takes 1 or 2.)
        vmem_limit_mib: VMEM the compiler may use for the kernel, MiB; None is its default.
        interpret: Passed to `pallas_call`.

    Returns:
        ``[m, n]`` in x's dtype; sums, activation and product are float32.
    """
    (m, k), n = x.shape, w_gate.shape[1]
    block_m, block_n, block_k = min(block_m, m), min(block_n, n), min(block_k, k)
    tiles, steps = {"m": pl.cdiv(m, block_m), "n": pl.cdiv(n, block_n)}, pl.cdiv(k, block_k)

    def at(index_map):
        """`index_map` takes (tile row, tile column, k step) whatever order the grid walks them in."""
        return index_map if grid_order == "mn" else lambda j, i, step: index_map(i, j, step)

    held = pl.Buffered(1) if held_buffers == 1 else None
    x_mode, weight_mode = (held, None) if grid_order == "mn" else (None, held)
    weight = pl.BlockSpec((block_k, block_n), at(lambda i, j, step: (step, j)), pipeline_mode=weight_mode)
    kernel = functools.partial(
        _gated_mlp_kernel,
        activation=ACTIVATIONS[activation],
        steps=steps,
        tail=k % block_k or block_k,
    )
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid=(tiles[grid_order[0]], tiles[grid_order[1]], steps),
        in_specs=[
            pl.BlockSpec((block_m, block_k), at(lambda i, j, step: (i, step)), pipeline_mode=x_mode),
            weight,
            weight,
        ],
        out_specs=pl.BlockSpec((block_m, block_n), at(lambda i, j, step: (i, j))),
        scratch_shapes=[pltpu.VMEM((block_m, block_n), jnp.float32)] * 2 if steps > 1 else [],
        compiler_params=compiler_params("parallel", "parallel", "arbitrary", vmem_limit_mib=vmem_limit_mib),
        interpret=interpret,
        name="gated_mlp",
    )(x, w_gate, w_up)


def _gated_mlp_kernel(x_ref, gate_ref, up_ref, out_ref, *sums, activation, steps: int, tail: int) -> None:
    """One grid step: adds x's block times both weights' to the sums; the last one stores what becomes of them.

    Args:
        sums: Of gate and of up, float32; none where a block holds the whole k.
        activation: A function of the gate.
        steps: Grid steps along k.
        tail: Length of the last k block. What lies beyond it in VMEM is whatever was there, so that step multiplies
            the part that exists and no other.
    """
    step = pl.program_id(2)
    weights = gate_ref, up_ref

    if steps > 1:

        @pl.when(step < steps - 1)
        def _():
            for total, weight in zip(sums, weights, strict=True):
                # A select beside the MXU costs nothing; a pass that stores zeros costs as much as one that adds.
                so_far = jnp.where(step == 0, 0.0, total[...])
                total[...] = so_far + dot(x_ref[...], weight[...])

    @pl.when(step == steps - 1 if steps > 1 else True)
    def _():
        gate, up = (dot(x_ref[:, :tail], weight[:tail, :]) for weight in weights)
        if sums:  # The last products go straight on, not through the sums' memory.
            gate, up = sums[0][...] + gate, sums[1][...] + up
        out_ref[...] = (activation(gate) * up).astype(out_ref.dtype)
