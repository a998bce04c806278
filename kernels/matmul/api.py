"""The matmul for training code."""

from __future__ import annotations

from typing import Any

import jax

from autotune.errors import UsageError, one_of
from autotune.outcome import Config
from kernels._dispatch import choose_config, run
from kernels.matmul.cost import heuristic_config
from kernels.matmul.pallas import matmul_pallas
from kernels.matmul.problem import MatmulProblem
from kernels.matmul.reference import matmul_reference


def matmul(x: jax.Array, y: jax.Array, *, config: Config | None = None, interpret: Any = False) -> jax.Array:
    """``x @ y`` by the tuned kernel on a TPU, by XLA elsewhere. Differentiable (the gradients are XLA's).

    Args:
        x: ``[..., m, k]``, bfloat16 or float32; leading dimensions are folded into m.
        y: ``[k, n]``, of x's dtype.
        config: Block sizes and the like (`matmul_pallas` lists them); None takes the preset for these
            shapes on this device, and a heuristic where there is none.
        interpret: Runs the kernel itself anywhere, in Pallas' interpreter (`pltpu.InterpretParams()`).

    Returns:
        ``[..., m, n]`` in x's dtype, summed in float32.

    Raises:
        UsageError: Shapes or dtypes do not fit together.
    """
    if x.ndim < 2 or y.ndim != 2 or x.shape[-1] != y.shape[0]:
        raise UsageError(f"matmul of {x.shape} with {y.shape}: must be [..., m, k] with [k, n]")
    if x.dtype != y.dtype:
        raise UsageError(f"matmul of {x.dtype} with {y.dtype}: must be both {one_of(MatmulProblem.dtypes)}")
    rows = x.reshape(-1, x.shape[-1])
    problem = MatmulProblem(m=rows.shape[0], n=y.shape[1], k=y.shape[0], dtype=str(x.dtype))
    chosen = dict(choose_config("matmul", problem, config, lambda: heuristic_config(problem)))

    def kernel(x: jax.Array, y: jax.Array) -> jax.Array:
        return matmul_pallas(x, y, **chosen, interpret=interpret)

    @jax.custom_vjp
    def op(x: jax.Array, y: jax.Array) -> jax.Array:
        return run(kernel, matmul_reference, interpret, x, y)

    def backward(saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, y = saved
        return matmul_reference(grad, y.T), matmul_reference(x.T, grad)

    op.defvjp(lambda x, y: (op(x, y), (x, y)), backward)
    return op(rows, y).reshape(*x.shape[:-1], y.shape[1])
