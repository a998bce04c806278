"""The loss and its gradients in plain JAX: the numerics to match, and XLA's ``xla`` baseline."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels._precision import dot


def cross_entropy_reference(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    tied: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Each token's loss and log-sum-exp, ``[tokens]`` float32 each.

    Args:
        x: ``[tokens, hidden]``.
        w: ``[hidden, vocab]``, of x's dtype; ``[vocab, hidden]`` if `tied`.
        labels: ``[tokens]`` int32; a token whose label is negative is ignored: its loss is 0.
        z_loss: Times the squared log-sum-exp, added to the loss.
        soft_cap: Logits become ``soft_cap · tanh(logits / soft_cap)``; None leaves them.
        tied: Whether w is an embedding table.
    """
    logits = _logits(x, w, soft_cap, tied)[0]
    lse = jax.nn.logsumexp(logits, axis=1)
    picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
    return jnp.where(labels >= 0, lse - picked + z_loss * lse * lse, 0.0), lse


def cross_entropy_dx_reference(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    lse: jax.Array,
    grad: jax.Array,
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    tied: bool = False,
) -> jax.Array:
    """The gradient of x, in its dtype.

    Args:
        x: As `cross_entropy_reference`'s, and so are w, labels, z_loss, soft_cap and tied.
        w: See there.
        labels: See there.
        lse: ``[tokens]`` float32, the log-sum-exp that it returned.
        grad: ``[tokens]`` float32, the gradient of the losses.
        z_loss: See there.
        soft_cap: See there.
        tied: See there.
    """
    by_logits = _by_logits(x, w, labels, lse, grad, z_loss, soft_cap, tied)
    return dot(by_logits, w if tied else w.T).astype(x.dtype)


def cross_entropy_dw_reference(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    lse: jax.Array,
    grad: jax.Array,
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    tied: bool = False,
) -> jax.Array:
    """The gradient of w, in its dtype; arguments as of `cross_entropy_dx_reference`."""
    by_logits = _by_logits(x, w, labels, lse, grad, z_loss, soft_cap, tied)
    return (dot(by_logits.T, x) if tied else dot(x.T, by_logits)).astype(w.dtype)


def _logits(x: jax.Array, w: jax.Array, soft_cap: float | None, tied: bool) -> tuple[jax.Array, jax.Array | float]:
    """``[tokens, vocab]``, and their slope where they are capped."""
    logits = dot(x, w.T if tied else w)
    if soft_cap is None:
        return logits, 1.0
    bent = jnp.tanh(logits / soft_cap)
    return soft_cap * bent, 1 - bent * bent


def _by_logits(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    lse: jax.Array,
    grad: jax.Array,
    z_loss: float,
    soft_cap: float | None,
    tied: bool,
) -> jax.Array:
    """The gradient of the product, ``[tokens, vocab]``, rounded to x's dtype as an operand of what follows."""
    logits, slope = _logits(x, w, soft_cap, tied)
    grad = jnp.where(labels >= 0, grad, 0.0)
    weights = jnp.exp(logits - lse[:, None]) * (grad * (1 + 2 * z_loss * lse))[:, None]
    one_hot = labels[:, None] == jnp.arange(logits.shape[1])
    return ((weights - jnp.where(one_hot, grad[:, None], 0.0)) * slope).astype(x.dtype)
