"""Attention chunk by chunk in plain JAX: no score matrix of the whole lengths, on any platform."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels._dispatch import varying_alike
from kernels._precision import dot_precision

Q_LOOPS, REMATS = ("unroll", "scan"), ("none", "kv_step", "q_chunk")
State = tuple[jax.Array, jax.Array, jax.Array]  # of a query chunk: running maximum, sum of weights, sum of weighted v


def chunked_attention_jax(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_chunk: int,
    kv_chunk: int,
    q_loop: str = "unroll",
    remat: str = "none",
    causal: bool = True,
    scale: float | None = None,
) -> jax.Array:
    """Softmax attention over chunks of queries and keys, with a running maximum and sum.

    Args:
        q: ``[batch, heads, q_len, head_dim]``, bfloat16 or float32.
        k: ``[batch, kv_heads, kv_len, head_dim]`` of q's dtype; kv_heads divides heads.
        v: As k.
        q_chunk: Queries that go over the keys together, all where there are fewer.
        kv_chunk: Keys per step, likewise.
        q_loop: The loop over query chunks: ``unroll`` (a program part for each, which has only the key chunks that
            the chunk sees) or ``scan`` (one for all, which passes over the others by `jax.lax.cond`).
        remat: What the backward pass computes again instead of keeping: ``none``, the weights of each ``kv_step``
            (the running sums are kept), or all of a ``q_chunk``.
        causal: Query i sees the keys j ≤ i + kv_len - q_len: the last query sees all.
        scale: Of the scores; None is 1 / sqrt(head_dim).

    Returns:
        ``[batch, heads, q_len, head_dim]`` in q's dtype. All between is float32; the products of what was bfloat16
        are at the platform's default precision (one bfloat16 pass on a TPU).
    """
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    q_chunk, kv_chunk = min(q_chunk, q_len), min(kv_chunk, kv_len)
    offset = kv_len - q_len
    dtype, precision = q.dtype, dot_precision(q.dtype)
    # In bfloat16 the gradients of k and v would be rounded with every query chunk that adds to them, and those of the
    # weights before they are subtracted from their mean.
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    chunk: Callable[..., jax.Array] = functools.partial(
        _attend,
        kv_len=kv_len,
        offset=offset if causal else None,
        scale=head_dim**-0.5 if scale is None else scale,
        remat_step=remat == "kv_step",
        precision=precision,
    )
    if remat == "q_chunk":  # XLA cannot merge both passes: their loops differ in what they keep.
        chunk = jax.checkpoint(chunk, static_argnums=(4, 5), prevent_cse=False)
    queries = _chunks(q.reshape(batch, kv_heads, heads // kv_heads, q_len, head_dim), q_chunk)
    keys, values = _chunks(k, kv_chunk), _chunks(v, kv_chunk)
    steps, unmasked = len(keys), kv_len // kv_chunk
    if q_loop == "scan":
        split = (0, steps) if causal else (unmasked, steps)
        firsts = jnp.arange(len(queries)) * q_chunk
        out = jax.lax.map(lambda x: chunk(x[0], x[1], keys, values, *split), (queries, firsts))
    else:
        parts = []
        for i, rows in enumerate(queries):
            split = (unmasked, steps)
            if causal:  # The first query sees all keys of the chunks without a mask, the last one some of the others.
                first_sees, last_sees = i * q_chunk + 1 + offset, min((i + 1) * q_chunk, q_len) + offset
                split = (first_sees // kv_chunk, -(-last_sees // kv_chunk))
            parts.append(chunk(rows, i * q_chunk, keys[: split[1]], values[: split[1]], *split))
        out = jnp.stack(parts)
    out = jnp.moveaxis(out, 0, 3)
    return out.reshape(batch, heads, -1, head_dim)[:, :, :q_len].astype(dtype)


def _chunks(x: jax.Array, size: int) -> jax.Array:
    """``[…, length, dim]`` as ``[chunks, …, size, dim]``, with zeros after the end."""
    chunks = -(-x.shape[-2] // size)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, chunks * size - x.shape[-2]), (0, 0)])
    return jnp.moveaxis(x.reshape(*x.shape[:-2], chunks, size, x.shape[-1]), -3, 0)


def _attend(
    q: jax.Array,
    first: jax.Array | int,
    keys: jax.Array,
    values: jax.Array,
    unmasked: int,
    steps: int,
    *,
    kv_len: int,
    offset: int | None,
    scale: float,
    remat_step: bool,
    precision: jax.lax.Precision,
) -> jax.Array:
    """One query chunk over the key chunks: the first `unmasked` without a mask, the rest up to `steps` with one.

    Args:
        q: ``[batch, kv_heads, group, q_chunk, head_dim]``.
        first: Its first query's number; known to Python where the query chunks are unrolled.
        keys: ``[chunks, batch, kv_heads, kv_chunk, head_dim]``, zeros past kv_len.
        values: As keys.
        kv_len: How many keys there are.
        offset: How many keys the first query of all sees beside one; None where each query sees all.
        scale: Of the scores.
        remat_step: Whether the backward pass computes the weights of each step again.
        precision: Of the products.

    Returns:
        As q.
    """
    kv_chunk = keys.shape[-2]
    product = functools.partial(jnp.einsum, precision=precision)

    def step(state: State, number: jax.Array, k: jax.Array, v: jax.Array, *, masked: bool) -> State:
        top, total, out = state
        scores = product("bhgqd,bhkd->bhgqk", q, k) * scale
        if masked:
            key = number * kv_chunk + jnp.arange(kv_chunk)
            seen = key < kv_len
            if offset is not None:
                seen &= key <= (first + jnp.arange(q.shape[-2]) + offset)[:, None]
            scores = jnp.where(seen, scores, -jnp.inf)
        # The result does not depend on the maximum, and so no gradient goes through it.
        new_top = jnp.maximum(top, jax.lax.stop_gradient(scores).max(axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        fade = jnp.exp(top - new_top)
        more = product("bhgqk,bhkd->bhgqd", weights, v)
        return new_top, total * fade + weights.sum(axis=-1), out * fade[..., None] + more

    def body(masked: bool) -> Callable[[State, tuple[jax.Array, ...]], tuple[State, None]]:
        one: Callable[..., State] = functools.partial(step, masked=masked)
        one = jax.checkpoint(one, prevent_cse=False) if remat_step else one

        def run(state: State, chunk: tuple[jax.Array, ...]) -> tuple[State, None]:
            if isinstance(first, int) or offset is None:
                return one(state, *chunk), None
            ahead = chunk[0] * kv_chunk > first + q.shape[-2] - 1 + offset
            return jax.lax.cond(ahead, lambda state, *_: state, one, state, *chunk), None

        return run

    numbers = jnp.arange(steps)
    nothing = (
        jnp.full(q.shape[:-1], -jnp.inf, jnp.float32),
        jnp.zeros(q.shape[:-1], jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    state, _ = varying_alike((nothing, q))
    for masked, part in ((False, slice(0, unmasked)), (True, slice(unmasked, steps))):
        if part.start < part.stop:
            state, _ = jax.lax.scan(body(masked), state, (numbers[part], keys[part], values[part]))
    _, total, out = state
    return out / total[..., None]
