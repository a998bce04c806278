"""Attention in chunks, for training code on any platform."""

from __future__ import annotations

import jax

from autotune.errors import UsageError, one_of
from autotune.outcome import Config
from kernels._dispatch import choose_config, varying_alike
from kernels.chunked_attention.chunked import Q_LOOPS, REMATS, chunked_attention_jax
from kernels.chunked_attention.cost import heuristic_config
from kernels.chunked_attention.problem import ChunkedAttentionProblem

SIZES, WORDS = ("q_chunk", "kv_chunk"), {"q_loop": Q_LOOPS, "remat": REMATS}


def chunked_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    scale: float | None = None,
    config: Config | None = None,
) -> jax.Array:
    """Softmax attention that never holds the scores of all queries and keys; plain JAX, which differentiates it.

    Args:
        q: ``[batch, heads, q_len, head_dim]``, bfloat16 or float32.
        k: ``[batch, kv_heads, kv_len, head_dim]`` of q's dtype; kv_heads divides heads.
        v: As k.
        causal: Query i sees the keys j ≤ i + kv_len - q_len: the last query sees all.
        scale: Of the scores; None is 1 / sqrt(head_dim).
        config: ``q_chunk``, ``kv_chunk``, ``q_loop`` and ``remat`` (`chunked_attention_jax` says what they are); None
            takes the preset for these shapes on this device, and a heuristic where there is none.

    Returns:
        ``[batch, heads, q_len, head_dim]`` in q's dtype; the softmax and the sums are float32.

    Raises:
        UsageError: Shapes, dtypes, head counts or the config do not fit together.
    """
    problem = _problem(q, k, v, causal)
    config = choose_config("chunked_attention", problem, config, lambda: heuristic_config(problem), anywhere=True)
    _check(config)
    return chunked_attention_jax(*varying_alike((q, k, v)), causal=causal, scale=scale, **config)


def _problem(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> ChunkedAttentionProblem:
    """The instance that these arrays are."""
    if not (q.ndim == k.ndim == v.ndim == 4 and k.shape == v.shape and q.shape[::3] == k.shape[::3]):
        raise UsageError(
            f"chunked_attention of q {q.shape}, k {k.shape}, v {v.shape}: must be [batch, heads, q_len, head_dim] and "
            "twice [batch, kv_heads, kv_len, head_dim]"
        )
    if not q.dtype == k.dtype == v.dtype:
        right = one_of(ChunkedAttentionProblem.dtypes)
        raise UsageError(f"chunked_attention of {q.dtype}, {k.dtype}, {v.dtype}: must all be {right}")
    batch, heads, q_len, head_dim = q.shape
    return ChunkedAttentionProblem(
        batch=batch, heads=heads, kv_heads=k.shape[1], q_len=q_len, kv_len=k.shape[2], head_dim=head_dim,
        dtype=str(q.dtype), causal=causal,
    )  # fmt: skip


def _check(config: Config) -> None:
    """Refuses what `chunked_attention_jax` has no meaning for."""
    known = (*SIZES, *WORDS)
    if unknown := [name for name in config if name not in known]:
        raise UsageError(f"the config has an unknown {unknown[0]!r}: use {one_of(known)}")
    for name in SIZES:
        if not isinstance(config.get(name), int) or config[name] < 1:
            raise UsageError(f"{name}={config.get(name)}: must be a positive integer")
    for name, right in WORDS.items():
        if name in config and config[name] not in right:
            raise UsageError(f"{name}={config[name]}: must be {one_of(right)}")
