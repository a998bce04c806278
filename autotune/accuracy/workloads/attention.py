"""Attention as XLA compiles it from plain JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from autotune.accuracy.workloads._program import Program, spec
from autotune.chips import Chip


def xla(row: Mapping[str, Any], chip: Chip) -> Program:
    """Causal attention on ``[batch, length, heads, dim]`` with float32 scores, all of them."""

    def function(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        mask = jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])[None, :]
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v, preferred_element_type=jnp.float32).astype(q.dtype)

    return Program(function, (spec(row["q"]), spec(row["k"]), spec(row["v"])))
