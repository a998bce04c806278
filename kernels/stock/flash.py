"""Flash attention, which JAX ships: as a function of arrays, and its `BlockSizes` from presets.

Source: ``jax.experimental.pallas.ops.tpu.flash_attention``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

from kernels.stock.lookups import found
from kernels.stock.problem import FlashProblem


def flash_block_sizes(problem: FlashProblem, *, device_kind: str | None = None) -> BlockSizes:
    """The tuned blocks for `flash_attention`, from the presets of ``stock_flash``; of its forward pass only.

    Args:
        device_kind: For which chip (``"TPU v6 lite"``); None is the one attached.
    """
    return BlockSizes(**found("stock_flash", problem, device_kind))


def flash_forward(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, config: Mapping[str, Any]) -> jax.Array:
    """Attention of ``[batch, heads, length, head_dim]``, with scores over the root of head_dim."""
    blocks = BlockSizes(**config)
    return flash_attention(q, k, v, causal=causal, sm_scale=q.shape[-1] ** -0.5, block_sizes=blocks)
