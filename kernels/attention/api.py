"""Attention for training code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from autotune.chips import MIB
from autotune.errors import UsageError, one_of
from autotune.outcome import Config
from kernels._dispatch import attached_chip, choose_config, run, varying_alike
from kernels._tpu_model import LANES, cdiv
from kernels.attention.backward import attention_bwd_pallas, attention_dkv_pallas, attention_dq_pallas
from kernels.attention.cost import backward_heuristic_config, fused_heuristic_config, heuristic_config
from kernels.attention.pallas import attention_pallas
from kernels.attention.problem import AttentionProblem
from kernels.attention.reference import (
    attention_bwd_reference,
    attention_dkv_reference,
    attention_dq_reference,
    attention_lse,
    attention_reference,
)

BACKWARD = ("split", "fused")


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    backward: str | None = None,
    config: Config | None = None,
    dq_config: Config | None = None,
    dkv_config: Config | None = None,
    bwd_config: Config | None = None,
    residual_name: str | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Softmax attention by the tuned flash kernel on a TPU, by XLA elsewhere.

    Differentiable, by kernels of its own where the forward pass is one. They keep no score matrix, only each query's
    log-sum-exp.

    Args:
        q: ``[batch, heads, q_len, head_dim]``, bfloat16 or float32.
        k: ``[batch, kv_heads, kv_len, head_dim]`` of q's dtype; kv_heads divides heads.
        v: ``[batch, kv_heads, kv_len, v_head_dim]`` of q's dtype.
        causal: Query i sees the keys j ≤ i + kv_len - q_len: the last query sees all.
        window: And of these the last so many, itself included; None for all.
        soft_cap: Scores s become soft_cap · tanh(s / soft_cap).
        scale: Of the scores; None is 1 / sqrt(head_dim).
        segment_ids: Of packed sequences: ``[batch, length]`` int32 for queries and keys alike, or one for each
            (``[batch, q_len]``, ``[batch, kv_len]``). A query sees the keys of its own id; where there are none, its
            result is zero.
        backward: ``fused``: all gradients in one kernel, which needs VMEM for the sums of a whole kv head's dk and dv;
            ``split``: dq in one, dk and dv in another. None: fused where that fits (and no config of the others is
            given), as it takes five products for their seven.
        config: Block sizes and the like (`attention_pallas` lists them); None takes the preset for these
            shapes on this device, and a heuristic where there is none.
        dq_config: The same for the gradient with respect to q (`attention_dq_pallas`).
        dkv_config: The same for those with respect to k and v (`attention_dkv_pallas`).
        bwd_config: The same for all of them in one (`attention_bwd_pallas`).
        residual_name: What `jax.checkpoint` policies know the result and the log-sum-exp by: a policy that saves the
            name keeps the forward kernel from running again in the backward pass.
        interpret: Runs the kernel itself anywhere, in Pallas' interpreter (`pltpu.InterpretParams()`).

    Returns:
        ``[batch, heads, q_len, v_head_dim]`` in q's dtype; the softmax and the sums are float32.

    Raises:
        UsageError: Shapes, dtypes, head counts or options do not fit together.
    """
    packed = segment_ids is not None
    problem = _problem(q, k, v, causal=causal, window=window, soft_cap=soft_cap, packed=packed)
    segments = _segments(q, k, segment_ids) if packed else ()
    if backward not in (None, *BACKWARD):
        raise UsageError(f"backward={backward}: must be {one_of(BACKWARD)}, or None")
    if backward is None:
        split = dq_config or dkv_config or not _fused_fits(problem)
        backward = "split" if split and bwd_config is None else "fused"
    options = {**problem.options, "scale": scale}

    def tuned(kernel: str, function: Callable[..., Any], given: Config | None) -> functools.partial[Any]:
        """The kernel's function with its config, which is looked up only where it is used."""
        heuristic = heuristic_config if kernel == "attention" else backward_heuristic_config
        config = choose_config(kernel, problem, given, lambda: heuristic(problem))
        return functools.partial(function, **options, **config, interpret=interpret)

    reference = functools.partial(attention_reference, **options)

    @jax.custom_vjp
    def op(*arrays: jax.Array) -> jax.Array:
        return run(tuned("attention", attention_pallas, config), reference, interpret, *arrays)

    def forward_and_saved(*arrays: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        def both(q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> tuple[jax.Array, jax.Array]:
            return reference(q, k, v, *ids), attention_lse(q, k, *ids, **options)

        kernel = _saving_lse(tuned("attention", attention_pallas, config))
        out, lse = run(kernel, both, interpret, *arrays)
        if residual_name is not None:
            out, lse = (checkpoint_name(array, residual_name) for array in (out, lse))
        return out, (*arrays[:3], out, lse, *arrays[3:])

    def gradients(saved: tuple[jax.Array, ...], grad: jax.Array) -> tuple[jax.Array | None, ...]:
        q, k, v, out, lse, *ids = saved
        delta = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
        arrays = q, k, v, grad, lse, delta, *ids

        def result(kernel: Callable[..., Any], reference: Callable[..., Any]) -> Any:
            return run(kernel, functools.partial(reference, **options), interpret, *arrays)

        if backward == "fused":
            found = result(tuned("attention_bwd", attention_bwd_pallas, bwd_config), attention_bwd_reference)
        else:
            dq = result(tuned("attention_dq", attention_dq_pallas, dq_config), attention_dq_reference)
            found = dq, *result(tuned("attention_dkv", attention_dkv_pallas, dkv_config), attention_dkv_reference)
        return *found, *[None] * len(ids)

    op.defvjp(forward_and_saved, gradients)
    return op(*varying_alike((q, k, v, *segments)))


def _saving_lse(kernel: functools.partial[Any]) -> functools.partial[Any]:
    """The forward kernel that gives the log-sum-exp too, under a limit of VMEM with room for two blocks of it.

    The config was tuned without: under its own limit a training step might not compile.
    """
    limit, block_q = kernel.keywords.get("vmem_limit_mib"), kernel.keywords["block_q"]
    room = cdiv(2 * block_q * LANES * 4, MIB)
    return functools.partial(kernel, save_lse=True, vmem_limit_mib=limit + room if limit else None)


def _fused_fits(problem: AttentionProblem) -> bool:
    chip = attached_chip()
    return chip is None or fused_heuristic_config(problem, chip) is not None


def _problem(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> AttentionProblem:
    """The instance that these arrays are."""
    fits = q.ndim == k.ndim == v.ndim == 4 and k.shape[:3] == v.shape[:3] and q.shape[::3] == k.shape[::3]
    if not fits:
        raise UsageError(
            f"attention of q {q.shape}, k {k.shape}, v {v.shape}: must be [batch, heads, q_len, head_dim], "
            "[batch, kv_heads, kv_len, head_dim] and [batch, kv_heads, kv_len, v_head_dim]"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise UsageError(f"attention of {q.dtype}, {k.dtype}, {v.dtype}: must all be {one_of(AttentionProblem.dtypes)}")
    batch, heads, q_len, head_dim = q.shape
    (kv_heads, kv_len), v_dim = k.shape[1:3], v.shape[3]
    return AttentionProblem(
        batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim,
        v_head_dim=None if v_dim == head_dim else v_dim, dtype=str(q.dtype), **options,
    )  # fmt: skip


def _segments(q: jax.Array, k: jax.Array, ids: Any) -> tuple[jax.Array, ...]:
    """The segment ids of queries and of keys."""
    both = tuple(jnp.asarray(x) for x in (ids if isinstance(ids, tuple) else (ids, ids)))
    want = tuple((x.shape[0], x.shape[2]) for x in (q, k))
    if (
        len(both) != 2
        or tuple(x.shape for x in both) != want
        or any(not jnp.issubdtype(x.dtype, jnp.integer) for x in both)
    ):
        got = ", ".join(f"{x.dtype}{list(x.shape)}" for x in both)
        raise UsageError(
            f"segment_ids of {got}: must be integers of [batch, length], one array where queries and keys are as many, "
            "else one for the queries and one for the keys"
        )
    return tuple(x.astype(jnp.int32) for x in both)
