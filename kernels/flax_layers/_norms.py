"""What NNX's and Linen's norms share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from autotune.errors import UsageError
from kernels.norm import layernorm, rmsnorm


def check(name: str, layer: Any, mask: Any = None) -> None:
    """Raises UsageError where a norm is asked for that the kernels are not: over other axes or devices, masked."""
    wanted = {"reduction_axes": (-1, (-1,)), "feature_axes": (-1, (-1,)), "axis_name": (None,)}
    for option, right in wanted.items():
        given = getattr(layer, option)
        if (tuple(given) if isinstance(given, list) else given) not in right:
            raise UsageError(f"{name} with {option}={given}: the kernel has {right[0]} alone; use flax's own {name}")
    if mask is not None:
        raise UsageError(f"{name} with a mask: the kernel takes none; use flax's own {name}")


def normed(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    centered: bool,
    out_dtype: Any,
    eps: float,
    residual: jax.Array | None,
    interpret: Any,
) -> Any:
    """The norm of ``[..., d]`` in `out_dtype`; with a residual, this and the sum, which has the wider dtype of the two.

    Args:
        x: Rows, bfloat16 or float32. What is wider of its dtype and `out_dtype` is what the kernel reads and writes.
        scale: ``[d]``; None is ones.
        bias: ``[d]``, of a LayerNorm; None is zeros.
        centered: A LayerNorm; else an RMSNorm.
        out_dtype: Of the result.
        eps: Added to the variance or mean square.
        residual: Of x's shape, added to x before the norm.
        interpret: Passed to the kernel.
    """
    inside = jnp.promote_types(x.dtype, out_dtype)
    if residual is not None:
        inside = jnp.promote_types(inside, residual.dtype)
        residual = residual.astype(inside)
    width = x.shape[-1:]
    scale = jnp.ones(width, jnp.float32) if scale is None else scale
    options = {"eps": eps, "residual": residual, "interpret": interpret}
    if centered:
        bias = jnp.zeros(width, jnp.float32) if bias is None else bias
        out = layernorm(x.astype(inside), scale, bias, **options)
    else:
        out = rmsnorm(x.astype(inside), scale, **options)
    return out.astype(out_dtype) if residual is None else (out[0].astype(out_dtype), out[1])
