"""Attention for training code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from autotune.errors import UsageError, one_of
from autotune.outcome import Config
from kernels._dispatch import choose_config, run
from kernels.attention.backward import attention_dkv_pallas, attention_dq_pallas
from kernels.attention.cost import backward_heuristic_config, heuristic_config
from kernels.attention.pallas import attention_pallas
from kernels.attention.problem import AttentionProblem
from kernels.attention.reference import (
    attention_dkv_reference,
    attention_dq_reference,
    attention_lse,
    attention_reference,
)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    config: Config | None = None,
    dq_config: Config | None = None,
    dkv_config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Softmax attention by the tuned flash kernel on a TPU, by XLA elsewhere.

    Differentiable, by kernels of its own where the forward pass is one. They keep no score matrix, only each query's
    log-sum-exp.

    Args:
        q: ``[batch, heads, q_len, head_dim]``, bfloat16 or float32.
        k: ``[batch, kv_heads, kv_len, head_dim]`` of q's dtype; kv_heads divides heads.
        v: As k.
        causal: Query i sees the keys j ≤ i + kv_len - q_len: the last query sees all.
        config: Block sizes and the like (`attention_pallas` lists them); None takes the preset for these
            shapes on this device, and a heuristic where there is none.
        dq_config: The same for the gradient with respect to q (`attention_dq_pallas`).
        dkv_config: The same for those with respect to k and v (`attention_dkv_pallas`).
        interpret: Runs the kernel itself anywhere, in Pallas' interpreter (`pltpu.InterpretParams()`).

    Returns:
        ``[batch, heads, q_len, head_dim]`` in q's dtype; the softmax and the sums are float32.

    Raises:
        UsageError: Shapes, dtypes or head counts do not fit together.
    """
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or q.shape[::3] != k.shape[::3]:
        raise UsageError(
            f"attention of q {q.shape}, k {k.shape}, v {v.shape}: must be [batch, heads, q_len, head_dim] and twice "
            "[batch, kv_heads, kv_len, head_dim]"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise UsageError(f"attention of {q.dtype}, {k.dtype}, {v.dtype}: must all be {one_of(AttentionProblem.dtypes)}")
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    problem = AttentionProblem(
        batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim,
        dtype=str(q.dtype), causal=causal,
    )  # fmt: skip

    def chosen(kernel: str, given: Config | None, heuristic: Callable[[AttentionProblem], Config]) -> Config:
        return choose_config(kernel, problem, given, lambda: heuristic(problem))

    forward = functools.partial(
        attention_pallas, causal=causal, **chosen("attention", config, heuristic_config), interpret=interpret
    )

    @jax.custom_vjp
    def op(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        reference = functools.partial(attention_reference, causal=causal)
        return run(forward, reference, interpret, q, k, v)

    def forward_and_saved(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        def reference(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            return attention_reference(q, k, v, causal=causal), attention_lse(q, k, causal=causal)

        out, lse = run(functools.partial(forward, save_lse=True), reference, interpret, q, k, v)
        return out, (q, k, v, out, lse)

    def backward(saved: tuple[jax.Array, ...], grad: jax.Array) -> tuple[jax.Array, ...]:
        q, k, v, out, lse = saved
        delta = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
        arrays = q, k, v, grad, lse, delta
        options = {"causal": causal, "interpret": interpret}
        dq = functools.partial(
            attention_dq_pallas, **chosen("attention_dq", dq_config, backward_heuristic_config), **options
        )
        dkv = functools.partial(
            attention_dkv_pallas, **chosen("attention_dkv", dkv_config, backward_heuristic_config), **options
        )
        dq_reference = functools.partial(attention_dq_reference, causal=causal)
        dkv_reference = functools.partial(attention_dkv_reference, causal=causal)
        return run(dq, dq_reference, interpret, *arrays), *run(dkv, dkv_reference, interpret, *arrays)

    op.defvjp(forward_and_saved, backward)
    return op(q, k, v)
