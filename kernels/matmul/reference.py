"""The matmul in plain JAX: the numerics to match, and what XLA compiles as the ``xla`` baseline."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels._activations import ACTIVATIONS
from kernels._precision import dot
from kernels.matmul.problem import RESULTS


def matmul_reference(
    x: jax.Array,
    y: jax.Array,
    bias: jax.Array | None = None,
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    activation: str = "none",
) -> jax.Array:
    """``act(x[m, k] @ y[k, n] + bias[n])``, in float32 throughout (int8 operands: in int32).

    Float32 operands are multiplied in full float32, as the kernel does: XLA's default on a TPU is one
    bfloat16 pass, which would not be the same computation.

    Args:
        x: ``[m, k]``, or ``[k, m]`` with `transpose_lhs`.
        y: ``[k, n]``, or ``[n, k]`` with `transpose_rhs`, of x's dtype.
        bias: ``[n]`` or None.
        transpose_lhs: x is stored ``[k, m]``.
        transpose_rhs: y is stored ``[n, k]``.
        activation: ``none``, ``relu``, ``gelu`` (the tanh approximation) or ``silu``.

    Returns:
        ``[m, n]`` in x's dtype; int32 for int8 operands, bfloat16 for float8 ones.
    """
    total = dot(x, y, transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    if bias is not None:
        total += bias.astype(jnp.float32)
    return ACTIVATIONS[activation](total).astype(RESULTS.get(str(x.dtype), x.dtype))
