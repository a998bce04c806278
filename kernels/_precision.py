"""What every matmul of the kernels and references asks of the MXU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def dot_precision(dtype: Any) -> jax.lax.Precision:
    """Full precision for float32 operands, one pass for narrower ones.

    Always explicit: left out, it is ``jax_default_matmul_precision``, and Mosaic refuses "highest" for bfloat16.
    """
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def sum_dtype(dtype: Any) -> Any:
    """What products of `dtype` are summed in: int32 for integers, float32 for all else."""
    return jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32


def dot(x: jax.Array, y: jax.Array, *, transpose_lhs: bool = False, transpose_rhs: bool = False) -> jax.Array:
    """``x @ y`` in float32 (int32 for integers). Float32 operands keep their precision (six passes on the MXU).

    Args:
        x: ``[m, k]``, or ``[k, m]`` with `transpose_lhs`.
        y: ``[k, n]``, or ``[n, k]`` with `transpose_rhs`.
    """
    contracted = ((0 if transpose_lhs else 1,), (1 if transpose_rhs else 0,))
    return jax.lax.dot_general(
        x,
        y,
        (contracted, ((), ())),
        precision=dot_precision(x.dtype),
        preferred_element_type=sum_dtype(x.dtype),
    )
