"""Attention in plain JAX: the numerics to match, and what XLA compiles as the ``xla`` baseline."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kernels._precision import dot_precision

PIECE = 1 << 24  # scores that `attention_in_pieces` holds at a time: 64 MiB


def attention_reference(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = True) -> jax.Array:
    """Softmax attention with the whole score matrix in memory.

    Args:
        q: ``[batch, heads, q_len, head_dim]``.
        k: ``[batch, kv_heads, kv_len, head_dim]``; so is v.
        v: As k.
        causal: Query i sees the keys j ≤ i + kv_len - q_len.

    Returns:
        ``[batch, heads, q_len, head_dim]`` in q's dtype. Scores, softmax and sums are float32; float32
        operands are multiplied in full float32, as the kernel does.
    """
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    precision = dot_precision(q.dtype)
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, q_len, head_dim)
    scores = jnp.einsum("bhgqd,bhkd->bhgqk", grouped, k, precision=precision, preferred_element_type=jnp.float32)
    scores *= head_dim**-0.5
    if causal:
        rows, columns = jnp.arange(q_len)[:, None], jnp.arange(kv_len)[None, :]
        scores = jnp.where(columns <= rows + (kv_len - q_len), scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bhgqk,bhkd->bhgqd", weights, v, precision=precision, preferred_element_type=jnp.float32)
    return out.reshape(batch, heads, q_len, head_dim).astype(q.dtype)


def attention_in_pieces(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = True) -> jax.Array:
    """`attention_reference`, one kv head and some rows at a time: no more than `PIECE` scores in memory."""
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    group = heads // kv_heads
    q = q.reshape(batch * kv_heads, 1, group, q_len, head_dim)
    k, v = (x.reshape(batch * kv_heads, 1, 1, kv_len, head_dim) for x in (k, v))
    step = max(1, PIECE // (group * kv_len))
    pieces = []
    for first in range(0, q_len, step):
        rows = q[..., first : first + step, :]
        # A causal piece is a problem of its own, whose last query sees its last key.
        seen = kv_len - q_len + first + rows.shape[-2] if causal else kv_len
        one = functools.partial(attention_reference, causal=causal)
        pieces.append(jax.lax.map(lambda qkv, one=one: one(*qkv), (rows, k[..., :seen, :], v[..., :seen, :])))
    return jnp.concatenate(pieces, axis=-2).reshape(batch, heads, q_len, head_dim)
