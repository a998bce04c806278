"""Attention for training code."""

from __future__ import annotations

import functools
from typing import Any

import jax

from autotune.errors import UsageError, one_of
from autotune.outcome import Config
from kernels._dispatch import choose_config, run
from kernels.attention.cost import heuristic_config
from kernels.attention.pallas import attention_pallas
from kernels.attention.problem import AttentionProblem
from kernels.attention.reference import attention_reference


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Softmax attention by the tuned flash kernel on a TPU, by XLA elsewhere.

    Differentiable: the gradients are those of the reference, which keeps the whole score matrix in memory.

    Args:
        q: ``[batch, heads, q_len, head_dim]``, bfloat16 or float32.
        k: ``[batch, kv_heads, kv_len, head_dim]`` of q's dtype; kv_heads divides heads.
        v: As k.
        causal: Query i sees the keys j ≤ i + kv_len - q_len: the last query sees all.
        config: Block sizes and the like (`attention_pallas` lists them); None takes the preset for these
            shapes on this device, and a heuristic where there is none.
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
    chosen = dict(choose_config("attention", problem, config, lambda: heuristic_config(problem)))
    kernel = functools.partial(attention_pallas, causal=causal, **chosen, interpret=interpret)
    reference = functools.partial(attention_reference, causal=causal)

    @jax.custom_vjp
    def op(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return run(kernel, reference, interpret, q, k, v)

    op.defvjp(lambda *arrays: (op(*arrays), arrays), lambda arrays, grad: jax.vjp(reference, *arrays)[1](grad))
    return op(q, k, v)
