"""Attention and its gradients in plain JAX: the numerics to match, and what XLA compiles as ``xla`` baselines."""

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
    weights = jax.nn.softmax(_scores(q, k, causal), axis=-1).astype(v.dtype)
    return _product("bhgqk,bhkd->bhgqd", weights, v).reshape(q.shape).astype(q.dtype)


def attention_lse(q: jax.Array, k: jax.Array, *, causal: bool = True) -> jax.Array:
    """The log-sum-exp of each query's scaled scores: ``[batch, heads, q_len]`` float32; see `attention_reference`."""
    return jax.nn.logsumexp(_scores(q, k, causal), axis=-1).reshape(q.shape[:3])


def attention_dq_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    grad: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    *,
    causal: bool = True,
) -> jax.Array:
    """The gradient with respect to q; see `kernels.attention.backward.attention_dq_pallas`."""
    _, change = _weights_and_change(q, k, v, grad, lse, delta, causal)
    return _product("bhgqk,bhkd->bhgqd", change.astype(k.dtype), k).reshape(q.shape).astype(q.dtype)


def attention_dkv_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    grad: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    *,
    causal: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """The gradients with respect to k and v; see `kernels.attention.backward.attention_dkv_pallas`."""
    weights, change = _weights_and_change(q, k, v, grad, lse, delta, causal)
    dk = _product("bhgqk,bhgqd->bhkd", change.astype(q.dtype), _grouped(q, k))
    dv = _product("bhgqk,bhgqd->bhkd", weights.astype(grad.dtype), _grouped(grad, k))
    return dk.astype(k.dtype), dv.astype(v.dtype)


def _product(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, x, y, precision=dot_precision(x.dtype), preferred_element_type=jnp.float32)


def _grouped(x: jax.Array, k: jax.Array) -> jax.Array:
    """``[batch, heads, …]`` as ``[batch, kv_heads, heads / kv_heads, …]``."""
    return x.reshape(x.shape[0], k.shape[1], -1, *x.shape[2:])


def _scores(q: jax.Array, k: jax.Array, causal: bool) -> jax.Array:
    """``[batch, kv_heads, heads / kv_heads, q_len, kv_len]`` float32, scaled; -inf where a query does not see."""
    q_len, kv_len = q.shape[2], k.shape[2]
    scores = _product("bhgqd,bhkd->bhgqk", _grouped(q, k), k) * q.shape[-1] ** -0.5
    if causal:
        rows, columns = jnp.arange(q_len)[:, None], jnp.arange(kv_len)[None, :]
        scores = jnp.where(columns <= rows + (kv_len - q_len), scores, -jnp.inf)
    return scores


def _weights_and_change(
    q: jax.Array, k: jax.Array, v: jax.Array, grad: jax.Array, lse: jax.Array, delta: jax.Array, causal: bool
) -> tuple[jax.Array, jax.Array]:
    """The softmax's weights, and the loss's gradient with respect to the unscaled scores."""
    weights = jnp.exp(_scores(q, k, causal) - _grouped(lse, k)[..., None])
    change = _product("bhgqd,bhkd->bhgqk", _grouped(grad, k), v) - _grouped(delta, k)[..., None]
    return weights, weights * change * q.shape[-1] ** -0.5


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
