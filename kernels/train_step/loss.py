"""The mean next-token cross-entropy of hidden states and the output layer, whose logits need not exist at once."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from kernels._precision import dot_precision
from kernels.cross_entropy import cross_entropy
from kernels.train_step.layers import HIDDEN, Layers
from kernels.train_step.mesh import BATCH


def mean_loss(
    layers: Layers, hidden: jax.Array, w: jax.Array, labels: jax.Array, *, tied: bool, how: str, chunk_mib: int
) -> jax.Array:
    """A float32 scalar; softmax and sums are float32.

    Each device works on its own tokens and its part of the vocabulary, so that the gradient of w is summed over devices
    once, and not with every chunk.

    Args:
        layers: The mesh, and whether to interpret.
        hidden: ``[batch, length, width]``.
        w: The parameter ``head``, ``[width, vocab]``; ``embed``, ``[vocab, width]``, if `tied`.
        labels: ``[batch, length]`` int32.
        tied: See w.
        how: ``xla``: the logits of all tokens; ``chunked``: of some at a time, computed again for the gradients;
            ``kernel``: none (`kernels.cross_entropy`), which takes a whole vocabulary.
        chunk_mib: Of one chunk's float32 logits on one device, at most; each chunk adds to all of w's gradient.
    """
    meshed = layers.mesh is not None
    w, spec, gather = layers.placed("embed" if tied else "head", w)

    def own_tokens(hidden: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
        w = gather(w)
        if how == "kernel":
            total = jnp.sum(cross_entropy(hidden, w, labels, tied=tied, interpret=layers.interpret))
            total = jax.lax.psum(total, "tensor") if meshed else total  # of one device: it takes the whole vocabulary
        else:
            total = _sum_of_losses(
                hidden, w, labels, tied=tied, chunk_mib=chunk_mib if how == "chunked" else None, meshed=meshed
            )
        return jax.lax.psum(total, (*BATCH, "sequence")) if meshed else total

    total = layers.sharded(own_tokens, (HIDDEN, spec, P(BATCH, "sequence")), P())(hidden, w, labels)
    return total / labels.size


def _sum_of_losses(
    hidden: jax.Array, w: jax.Array, labels: jax.Array, *, tied: bool, chunk_mib: int | None, meshed: bool
) -> jax.Array:
    """Over one device's tokens, with its part of the vocabulary."""
    batch, length, _ = hidden.shape
    vocab = w.shape[0 if tied else 1]
    chunk_loss = _chunk_loss(tied, vocab, meshed)
    chunks = chunks_of(batch, length, vocab, chunk_mib) if chunk_mib else 1
    if chunks == 1:
        return chunk_loss(hidden, w, labels)

    def parts(array: jax.Array) -> jax.Array:
        return jnp.moveaxis(array.reshape(batch, chunks, length // chunks, *array.shape[2:]), 1, 0)

    wide = w.astype(jnp.float32)  # so that the chunks' gradients are added in float32

    @jax.checkpoint
    def step(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        return chunk_loss(part[0], wide.astype(hidden.dtype), part[1])

    return jnp.sum(jax.lax.map(step, (parts(hidden), parts(labels))))


def chunks_of(batch: int, length: int, vocab: int, chunk_mib: int) -> int:
    """The fewest equal parts of the length, two or more, whose float32 logits take no more than `chunk_mib`."""
    least = max(math.ceil(4 * batch * length * vocab / (chunk_mib * 2**20)), 2)
    return next((parts for parts in range(least, length) if length % parts == 0), length)


def _chunk_loss(tied: bool, vocab: int, meshed: bool) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """The summed losses of some tokens; if `meshed`, over a vocabulary that the axis ``tensor`` shares."""

    def loss(hidden: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
        contracted = (((hidden.ndim - 1,), (1 if tied else 0,)), ((), ()))
        logits = jax.lax.dot_general(
            hidden, w, contracted, precision=dot_precision(hidden.dtype), preferred_element_type=jnp.float32
        )
        top = jnp.max(jax.lax.stop_gradient(logits), axis=-1)
        if meshed:
            top = jax.lax.pmax(top, "tensor")
            labels = labels - vocab * jax.lax.axis_index("tensor")
        weights = jnp.sum(jnp.exp(logits - top[..., None]), axis=-1)
        own = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == labels[..., None]
        right = jnp.sum(jnp.where(own, logits, 0.0), axis=-1)
        if meshed:
            weights, right = (jax.lax.psum(x, "tensor") for x in (weights, right))
        return jnp.sum(top + jnp.log(weights) - right)

    return loss
