"""The gated MLP and its gradients in plain JAX: the numerics to match, and XLA's ``xla`` baselines."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels._activations import ACTIVATIONS
from kernels._precision import dot


def gated_mlp_reference(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, *, activation: str = "silu") -> jax.Array:
    """``act(x @ w_gate) * (x @ w_up)`` in float32 throughout, returned in x's dtype.

    Args:
        x: ``[m, k]``.
        w_gate: ``[k, n]``, of x's dtype; so is w_up.
        w_up: As w_gate.
        activation: ``silu`` or ``gelu`` (the tanh approximation).
    """
    return (ACTIVATIONS[activation](dot(x, w_gate)) * dot(x, w_up)).astype(x.dtype)


def gated_mlp_bwd_reference(
    x: jax.Array, w_gate: jax.Array, w_up: jax.Array, grad: jax.Array, *, activation: str = "silu"
) -> tuple[jax.Array, jax.Array]:
    """The gradients of gate ``x @ w_gate`` and of up ``x @ w_up`` for the result's gradient ``grad[m, n]``.

    Gate and up are computed again, in float32; their gradients have x's dtype.
    """
    act, slope = jax.vjp(ACTIVATIONS[activation], dot(x, w_gate))
    grad = grad.astype(jnp.float32)
    return slope(grad * dot(x, w_up))[0].astype(x.dtype), (grad * act).astype(x.dtype)


def gated_mlp_dx_reference(by_gate: jax.Array, by_up: jax.Array, w_gate: jax.Array, w_up: jax.Array) -> jax.Array:
    """``by_gate @ w_gate.T + by_up @ w_up.T``, summed in float32, returned in by_gate's dtype."""
    total = dot(by_gate, w_gate, transpose_rhs=True) + dot(by_up, w_up, transpose_rhs=True)
    return total.astype(by_gate.dtype)
