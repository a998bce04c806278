"""The norms in plain JAX: the numerics to match, and what XLA compiles as the ``xla`` baseline."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from kernels.norm.problem import Kind


def norm_reference(
    x: jax.Array, params: Sequence[jax.Array], residual: jax.Array | None = None, *, kind: Kind, eps: float
) -> tuple[jax.Array, ...]:
    """What `norm_pallas` computes: ``(normed,)``, or ``(normed, x + residual)`` where a residual is added.

    Args:
        x: ``[rows, d]``.
        params: ``(weight,)`` of an rmsnorm, ``(weight, bias)`` of a layernorm, ``[d]`` each.
        residual: ``[rows, d]``, added before the norm. The norm is that of the sum before it is rounded.
        kind: Which norm.
        eps: Added to the mean square (rmsnorm) or to the variance (layernorm).
    """
    total = x.astype(jnp.float32)
    if residual is not None:
        total += residual.astype(jnp.float32)
    weight, *bias = (param.astype(jnp.float32) for param in params)
    centered = total - jnp.mean(total, axis=1, keepdims=True) if kind == "layernorm" else total
    normed = centered * lax.rsqrt(jnp.mean(centered * centered, axis=1, keepdims=True) + eps) * weight
    for shift in bias:
        normed += shift
    return (normed.astype(x.dtype),) if residual is None else (normed.astype(x.dtype), total.astype(x.dtype))


def norm_backward_reference(
    x: jax.Array, params: Sequence[jax.Array], grads: Sequence[jax.Array], *, kind: Kind, eps: float
) -> tuple[jax.Array, ...]:
    """What `norm_backward_pallas` computes, differentiated by JAX: ``(dx, dweight)``, and a layernorm's ``dbias``.

    Args:
        x: ``[rows, d]``, what was normed (the sum where a residual was added).
        params: As `norm_reference`'s.
        grads: ``[rows, d]`` each: the gradient of the normed rows, and that of the sum where a residual was added.
        kind: As `norm_reference`'s.
        eps: As `norm_reference`'s.
    """
    _, pull = jax.vjp(lambda x, params: norm_reference(x, params, kind=kind, eps=eps)[0], x, tuple(params))
    dx, dparams = pull(grads[0])
    for grad in grads[1:]:
        dx = (dx.astype(jnp.float32) + grad.astype(jnp.float32)).astype(x.dtype)
    return dx, *dparams
