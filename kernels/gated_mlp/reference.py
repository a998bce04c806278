"""The gated MLP and its gradients in plain JAX: the numerics to match, and XLA's ``xla`` baseline."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kernels._precision import dot

ACTIVATIONS = {"silu": jax.nn.silu, "gelu": functools.partial(jax.nn.gelu, approximate=True)}


def gated_mlp_reference(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, *, activation: str = "silu") -> jax.Array:
    """``act(x @ w_gate) * (x @ w_up)`` in float32 throughout, returned in x's dtype.

    Args:
        x: ``[m, k]``.
        w_gate: ``[k, n]``, of x's dtype; so is w_up.
        w_up: As w_gate.
        activation: ``silu`` or ``gelu`` (the tanh approximation).
    """
    return (ACTIVATIONS[activation](dot(x, w_gate)) * dot(x, w_up)).astype(x.dtype)


def gated_mlp_gradients(
    x: jax.Array, w_gate: jax.Array, w_up: jax.Array, grad: jax.Array, *, activation: str = "silu"
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of x, w_gate and w_up for the result's gradient ``grad[m, n]``.

    Gate and up are computed again. Their gradients are rounded to x's dtype as operands, the sums are float32.
    """
    act, slope = jax.vjp(ACTIVATIONS[activation], dot(x, w_gate))
    grad = grad.astype(jnp.float32)
    by_gate = slope(grad * dot(x, w_up))[0].astype(x.dtype)
    by_up = (grad * act).astype(x.dtype)
    by_x = dot(by_gate, w_gate.T) + dot(by_up, w_up.T)
    return tuple(array.astype(x.dtype) for array in (by_x, dot(x.T, by_gate), dot(x.T, by_up)))
