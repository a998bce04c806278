"""Matrix products: the registered tiled kernel, a variant of it with a transposed operand, and XLA's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.accuracy.workloads._program import Program
from autotune.chips import Chip
from autotune.kernel import ArraySpec, get_kernel


def registered(row: Mapping[str, Any], chip: Chip) -> Program:
    """The registered kernel ``matmul``: the standard tiling, k innermost, float32 accumulator in VMEM."""
    kernel = get_kernel("matmul")
    problem = kernel.problem_type.from_dict({name: row[name] for name in ("m", "n", "k")})
    blocks = {"block_m": row["bm"], "block_n": row["bn"], "block_k": row["bk"]}
    config = kernel.space(problem, chip).parse(blocks)
    return Program(kernel.bind(problem, config), kernel.arguments(problem))


def tutorial(row: Mapping[str, Any], chip: Chip) -> Program:
    """What the Pallas matmul tutorial times: its kernel, with the right operand transposed or a ReLU; and XLA's."""
    m, n, k = row["m"], row["n"], row["k"]
    transposed = row["kernel"] == "matmul_transpose_rhs"
    arguments = ArraySpec((m, k), "bfloat16"), ArraySpec((n, k) if transposed else (k, n), "bfloat16")
    if row["kernel"] == "xla_matmul":
        return Program(jnp.matmul, arguments)
    activation = jax.nn.relu if row["kernel"] == "matmul_relu" else lambda x: x
    return Program(_tiled((row["bm"], row["bn"], row["bk"]), transposed, activation), arguments)


def _tiled(
    blocks: tuple[int, int, int], transposed: bool, activation: Callable[[jax.Array], jax.Array]
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """``activation(x @ y)``, or with ``y.T`` where `transposed`; blocks along m, n and k."""
    block_m, block_n, block_k = blocks
    contracted = ((1,), (1 if transposed else 0,)), ((), ())
    y_blocks = (
        pl.BlockSpec((block_n, block_k), lambda i, j, step: (j, step))
        if transposed
        else pl.BlockSpec((block_k, block_n), lambda i, j, step: (step, j))
    )

    def kernel(x_ref, y_ref, out_ref, acc_ref) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jax.lax.dot_general(x_ref[...], y_ref[...], contracted, preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            out_ref[...] = activation(acc_ref[...]).astype(out_ref.dtype)

    def function(x: jax.Array, y: jax.Array) -> jax.Array:
        (m, k), n = x.shape, y.shape[0 if transposed else 1]
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
            grid=(m // block_m, n // block_n, k // block_k),
            in_specs=[pl.BlockSpec((block_m, block_k), lambda i, j, step: (i, step)), y_blocks],
            out_specs=pl.BlockSpec((block_m, block_n), lambda i, j, step: (i, j)),
            scratch_shapes=[pltpu.VMEM((block_m, block_n), jnp.float32)],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
            name="matmul",
        )(x, y)

    return function
