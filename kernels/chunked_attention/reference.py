"""The chunked attention's reference: the plain softmax one, and the training function of either."""

from __future__ import annotations

from collections.abc import Callable

import jax

from kernels.attention.reference import attention_reference

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def chunked_attention_reference(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = True, scale: float | None = None
) -> jax.Array:
    """Softmax attention with the whole score matrix in memory; arguments as `chunked_attention_jax`'s."""
    return attention_reference(q, k, v, causal=causal, scale=scale)


def with_gradients(attention: Attention) -> Callable[..., tuple[jax.Array, ...]]:
    """What a training step runs of `attention`: a function of q, k, v and the result's gradient.

    It gives the result and the gradients of q, k and v.
    """

    def training(q: jax.Array, k: jax.Array, v: jax.Array, grad: jax.Array) -> tuple[jax.Array, ...]:
        out, backward = jax.vjp(attention, q, k, v)
        return out, *backward(grad)

    return training
