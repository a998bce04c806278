"""tokamax' attention, where it is installed: as a function of arrays, with a config of its own type.

Tried with tokamax 0.0.12; the operation is in a private module there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from tokamax._src.ops.attention import base as attention_base
from tokamax._src.ops.attention import pallas_mosaic_tpu as attention
from tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_kernel import QKVLayout


class _Attention(attention.PallasMosaicTpuFlashAttention):
    def supported_on(self, device: Any) -> bool:
        """It asks the default device, which is none of those that it is compiled for."""
        return True


def tokamax_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    soft_cap: float | None,
    config: Mapping[str, Any],
) -> jax.Array:
    """Attention in tokamax' order of dimensions, ``[batch, length, heads, head_dim]``, with scores over its root."""
    layouts = {name: QKVLayout[config[name]] for name in ("q_layout", "k_layout", "v_layout")}
    op = dataclasses.replace(_Attention(), config=attention.Config(**{**config, **layouts}))
    scale = q.shape[-1] ** -0.5
    return op(q, k, v, logits_scale=scale, logits_soft_cap=soft_cap, mask=attention_base.Mask(is_causal=causal))
