"""The matmul in plain JAX: the numerics to match, and what XLA compiles as the ``xla`` baseline."""

from __future__ import annotations

import jax

from kernels._precision import dot


def matmul_reference(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x[m, k] @ y[k, n]``, summed in float32, returned in x's dtype.

    Float32 operands are multiplied in full float32, as the kernel does: XLA's default on a TPU is one
    bfloat16 pass, which would not be the same computation.
    """
    return dot(x, y).astype(x.dtype)
