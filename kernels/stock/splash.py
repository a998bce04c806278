"""Splash attention, which JAX ships: as functions of arrays, and its `BlockSizes` from presets.

Source: ``jax.experimental.pallas.ops.tpu.splash_attention``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    FullMask,
    LocalMask,
    MultiHeadMask,
    SegmentIds,
    make_splash_mha,
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as shipped

from kernels.stock import _private
from kernels.stock.lookups import found
from kernels.stock.problem import SplashProblem


def splash_block_sizes(problem: SplashProblem, *, device_kind: str | None = None, backward: bool = True) -> BlockSizes:
    """The tuned blocks for `make_splash_mha`, from the presets of ``stock_splash`` and ``stock_splash_bwd``.

    Args:
        problem: Sizes and mask; those of one device, inside a `shard_map`.
        device_kind: For which chip (``"TPU v6 lite"``); None is the one attached.
        backward: Whether gradients are taken.
    """
    config = found("stock_splash", problem, device_kind)
    return block_sizes({**config, **(found("stock_splash_bwd", problem, device_kind) if backward else {})})


def block_sizes(config: Mapping[str, Any]) -> BlockSizes:
    """A config of ``stock_splash``, and one of ``stock_splash_bwd`` where it has that too, in the library's type.

    The layouts stay as they are by default: which one is best, the operations around the kernel decide.
    """
    fused = config.get("use_fused_bwd_kernel", False)
    return BlockSizes(**{**config, **(dict.fromkeys(("block_q_dq", "block_kv_dq")) if fused else {})})


def splash_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array, problem: SplashProblem, config: Mapping[str, Any]
) -> jax.Array:
    """Attention of ``q[batch, heads, q_len, head_dim]``, scaled before, under `problem`'s mask.

    Args:
        segments: ``[batch, q_len]`` and ``[batch, kv_len]`` int32 of a packed problem.

    Returns:
        ``[batch, heads, q_len, v_head_dim]``.
    """
    kernel = _kernel(problem, block_sizes(config))
    return jax.vmap(lambda q, k, v, *ids: kernel(q, k, v, SegmentIds(*ids) if ids else None))(q, k, v, *segments)


def splash_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    grad: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    *segments: jax.Array,
    problem: SplashProblem,
    config: Mapping[str, Any],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v, by themselves: `splash_forward` does not run.

    Args:
        grad: Of the result, ``[batch, heads, q_len, v_head_dim]``.
        out: The forward pass' result.
        lse: The log-sum-exp of its scores, ``[batch, heads, q_len]`` float32.
    """
    forward = {"block_q": min(problem.q_len, 128), "block_kv": min(problem.kv_len, 128)}
    kernel = _kernel(problem, block_sizes({**forward, **config}))
    return jax.vmap(
        lambda q, k, v, grad, out, lse, *ids: _private.splash_bwd(
            kernel, (q, k, v, SegmentIds(*ids) if ids else None, out, lse), grad
        )
    )(q, k, v, grad, out, lse, *segments)


def _kernel(problem: SplashProblem, blocks: BlockSizes) -> shipped.SplashAttentionKernel:
    shape, offset = (problem.q_len, problem.kv_len), problem.kv_len - problem.q_len
    if problem.window is not None:
        mask = LocalMask(shape, (problem.window - 1, 0), offset)
    else:
        mask = CausalMask(shape, offset) if problem.causal else FullMask(shape)
    make = functools.partial(make_splash_mha, head_shards=1, q_seq_shards=1)
    heads = MultiHeadMask([mask] * problem.heads)
    return make(heads, block_sizes=blocks, attn_logits_soft_cap=problem.soft_cap)
