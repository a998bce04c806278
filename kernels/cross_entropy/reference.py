"""The loss and its gradients in plain JAX: the numerics to match, and XLA's ``xla`` baseline."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels._precision import dot


def cross_entropy_reference(
    x: jax.Array, w: jax.Array, labels: jax.Array, *, z_loss: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Each token's loss and log-sum-exp, ``[tokens]`` float32 each.

    Args:
        x: ``[tokens, hidden]``.
        w: ``[hidden, vocab]``, of x's dtype.
        labels: ``[tokens]`` int32; a token whose label is negative is ignored: its loss is 0.
        z_loss: Times the squared log-sum-exp, added to the loss.
    """
    logits = dot(x, w)
    lse = jax.nn.logsumexp(logits, axis=1)
    picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
    return jnp.where(labels >= 0, lse - picked + z_loss * lse * lse, 0.0), lse


def cross_entropy_dx_reference(
    x: jax.Array, w: jax.Array, labels: jax.Array, lse: jax.Array, grad: jax.Array, *, z_loss: float = 0.0
) -> jax.Array:
    """The gradient of x, in its dtype.

    Args:
        x: As `cross_entropy_reference`'s, and so are w, labels and z_loss.
        w: See there.
        labels: See there.
        lse: ``[tokens]`` float32, the log-sum-exp that it returned.
        grad: ``[tokens]`` float32, the gradient of the losses.
        z_loss: See there.
    """
    return dot(_by_logits(x, w, labels, lse, grad, z_loss), w.T).astype(x.dtype)


def cross_entropy_dw_reference(
    x: jax.Array, w: jax.Array, labels: jax.Array, lse: jax.Array, grad: jax.Array, *, z_loss: float = 0.0
) -> jax.Array:
    """The gradient of w, in its dtype; arguments as of `cross_entropy_dx_reference`."""
    return dot(x.T, _by_logits(x, w, labels, lse, grad, z_loss)).astype(w.dtype)


def _by_logits(
    x: jax.Array, w: jax.Array, labels: jax.Array, lse: jax.Array, grad: jax.Array, z_loss: float
) -> jax.Array:
    """The gradient of the logits, ``[tokens, vocab]``, rounded to x's dtype as an operand of what follows."""
    grad = jnp.where(labels >= 0, grad, 0.0)
    weights = jnp.exp(dot(x, w) - lse[:, None]) * (grad * (1 + 2 * z_loss * lse))[:, None]
    one_hot = labels[:, None] == jnp.arange(w.shape[1])
    return (weights - jnp.where(one_hot, grad[:, None], 0.0)).astype(x.dtype)
