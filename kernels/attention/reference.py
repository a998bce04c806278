"""Attention and its gradients in plain JAX: the numerics to match, and what XLA compiles as ``xla`` baselines."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from kernels._precision import dot_precision

PIECE = 1 << 24  # scores that `attention_in_pieces` holds at a time: 64 MiB


def attention_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_segments: jax.Array | None = None,
    kv_segments: jax.Array | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Softmax attention with the whole score matrix in memory.

    Args:
        q: ``[batch, heads, q_len, head_dim]``.
        k: ``[batch, kv_heads, kv_len, head_dim]``.
        v: ``[batch, kv_heads, kv_len, v_head_dim]``.
        q_segments: ``[batch, q_len]``: a query sees the keys of its own id; None where there are no segments.
        kv_segments: ``[batch, kv_len]``.
        causal: Query i sees the keys j ≤ i + kv_len - q_len.
        window: And of these the last so many; None for all.
        soft_cap: Scores s become soft_cap · tanh(s / soft_cap).
        scale: Of the scores; None is 1 / sqrt(head_dim).

    Returns:
        ``[batch, heads, q_len, v_head_dim]`` in q's dtype, zeros for a query that sees no key. Scores, softmax and sums
        are float32; float32 operands are multiplied in full float32, as the kernel does.
    """
    scores, _ = _scores(q, k, scale, soft_cap)
    seen = _seen(q, k, causal, window, q_segments, kv_segments)
    weights = _softmax(scores, seen).astype(v.dtype)
    return _product("bhgqk,bhkd->bhgqd", weights, v).reshape(*q.shape[:3], v.shape[3]).astype(q.dtype)


def attention_lse(
    q: jax.Array,
    k: jax.Array,
    q_segments: jax.Array | None = None,
    kv_segments: jax.Array | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> jax.Array:
    """The log-sum-exp of each query's scores: ``[batch, heads, q_len]`` float32; see `attention_reference`."""
    scores, _ = _scores(q, k, scale, soft_cap)
    seen = _seen(q, k, causal, window, q_segments, kv_segments)
    scores = scores if seen is None else jnp.where(seen, scores, -jnp.inf)
    return jax.nn.logsumexp(scores, axis=-1).reshape(q.shape[:3])


def attention_bwd_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    grad: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    q_segments: jax.Array | None = None,
    kv_segments: jax.Array | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients with respect to q, k and v; see `kernels.attention.backward.attention_bwd_pallas`.

    What of them is not used XLA does not compute.
    """
    scores, slope = _scores(q, k, scale, soft_cap)
    seen = _seen(q, k, causal, window, q_segments, kv_segments)
    weights = jnp.exp(scores - _grouped(lse, k)[..., None])
    change = _product("bhgqd,bhkd->bhgqk", _grouped(grad, k), v) - _grouped(delta, k)[..., None]
    change = weights * change * slope
    if seen is not None:
        weights, change = (jnp.where(seen, x, 0.0) for x in (weights, change))
    weights, change = weights.astype(grad.dtype), change.astype(q.dtype)
    dq = _product("bhgqk,bhkd->bhgqd", change, k).reshape(q.shape)
    dk = _product("bhgqk,bhgqd->bhkd", change, _grouped(q, k))
    dv = _product("bhgqk,bhgqd->bhkd", weights, _grouped(grad, k))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def attention_dq_reference(*arrays: jax.Array, **options: Any) -> jax.Array:
    """The first result of `attention_bwd_reference`, by itself."""
    return attention_bwd_reference(*arrays, **options)[0]


def attention_dkv_reference(*arrays: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
    """The others of `attention_bwd_reference`, by themselves."""
    return attention_bwd_reference(*arrays, **options)[1:]


def _product(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, x, y, precision=dot_precision(x.dtype), preferred_element_type=jnp.float32)


def _grouped(x: jax.Array, k: jax.Array) -> jax.Array:
    """``[batch, heads, …]`` as ``[batch, kv_heads, heads / kv_heads, …]``."""
    return x.reshape(x.shape[0], k.shape[1], -1, *x.shape[2:])


def _scores(
    q: jax.Array, k: jax.Array, scale: float | None, soft_cap: float | None
) -> tuple[jax.Array, jax.Array | float]:
    """``[batch, kv_heads, heads / kv_heads, q_len, kv_len]`` float32, and their slope in the products."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = _product("bhgqd,bhkd->bhgqk", _grouped(q, k), k) * scale
    if soft_cap is None:
        return scores, scale
    bent = jnp.tanh(scores / soft_cap)
    return soft_cap * bent, scale * (1.0 - bent * bent)


def _seen(
    q: jax.Array,
    k: jax.Array,
    causal: bool,
    window: int | None,
    q_segments: jax.Array | None,
    kv_segments: jax.Array | None,
) -> jax.Array | None:
    """Which keys each query sees, broadcastable to the scores; None for all."""
    seen = None
    if causal:
        q_len, kv_len = q.shape[2], k.shape[2]
        last = jnp.arange(q_len)[:, None] + (kv_len - q_len)
        key = jnp.arange(kv_len)[None, :]
        seen = key <= last if window is None else (key <= last) & (key > last - window)
    if q_segments is not None:
        same = (q_segments[:, :, None] == kv_segments[:, None, :])[:, None, None]
        seen = same if seen is None else seen & same
    return seen


def _softmax(scores: jax.Array, seen: jax.Array | None) -> jax.Array:
    """Over the keys that are seen; zeros where none is."""
    if seen is None:
        return jax.nn.softmax(scores, axis=-1)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    # With a causal mask alone, each query sees a key.
    return weights if seen.ndim == 2 else jnp.where(seen.any(axis=-1, keepdims=True), weights, 0.0)


def attention_in_pieces(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array, **options: Any) -> jax.Array:
    """`attention_reference`, one kv head and some rows at a time: no more than `PIECE` scores in memory."""
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    group = heads // kv_heads
    q = q.reshape(batch * kv_heads, 1, group, q_len, head_dim)
    k, v = (x.reshape(batch * kv_heads, 1, 1, kv_len, x.shape[3]) for x in (k, v))
    segments = tuple(jnp.repeat(ids, kv_heads, axis=0)[:, None] for ids in segments)
    step = max(1, PIECE // (group * kv_len))
    one = functools.partial(attention_reference, **options)
    pieces = []
    for first in range(0, q_len, step):
        rows = q[..., first : first + step, :]
        # A causal piece is a problem of its own, whose last query sees its last key.
        seen = kv_len - q_len + first + rows.shape[-2] if options.get("causal", True) else kv_len
        ids = (segments[0][..., first : first + step], segments[1][..., :seen]) if segments else ()
        pieces.append(jax.lax.map(lambda arrays: one(*arrays), (rows, k[..., :seen, :], v[..., :seen, :], *ids)))
    return jnp.concatenate(pieces, axis=-2).reshape(batch, heads, q_len, v.shape[-1])
