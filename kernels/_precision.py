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


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x @ y`` in float32. Float32 operands keep their precision (on the MXU that takes six passes)."""
    return jnp.dot(x, y, precision=dot_precision(x.dtype), preferred_element_type=jnp.float32)
