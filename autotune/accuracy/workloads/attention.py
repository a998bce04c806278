"""Attention as XLA compiles it from plain JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from autotune.accuracy.workloads._program import Program, spec
from autotune.chips import Chip


def xla(row: Mapping[str, Any], chip: Chip) -> Program:
    """Causal attention on ``[batch, length, heads, dim]`` with all scores in float32, as its source writes it.

    Both products name their algorithm: the weights are rounded to bfloat16 within the second one.
    """
    product = jax.lax.DotAlgorithmPreset.BF16_BF16_F32

    def function(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision=product, preferred_element_type=jnp.float32)
        mask = jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])[None, :]
        scores = jnp.where(mask, scores * q.shape[-1] ** -0.5, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision=product, preferred_element_type=jnp.float32)
        return mixed.astype(q.dtype)

    return Program(function, (spec(row["q"]), spec(row["k"]), spec(row["v"])))
