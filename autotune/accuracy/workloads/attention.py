"""Attention as XLA compiles it from plain JAX, and as tokamax' kernel does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from autotune.accuracy.workloads._program import Program, spec
from autotune.chips import Chip
from autotune.kernel import get_kernel

BLOCKS = ("block_q", "block_kv", "block_kv_compute")
LAYOUTS = ("q_layout", "k_layout", "v_layout")


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


def tokamax(row: Mapping[str, Any], chip: Chip) -> Program:
    """The registered kernel ``tokamax_attention`` with the row's config.

    Raises:
        ImportError: tokamax is not installed.
    """
    kernel = get_kernel("tokamax_attention")
    (batch, q_len, heads, head_dim), (_, kv_len, kv_heads, _) = spec(row["q"]).shape, spec(row["k"]).shape
    fields = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len}
    fields |= {"head_dim": head_dim, "causal": row["causal"] == "true"}
    problem = kernel.problem_type.from_dict({**fields, "dtype": "bfloat16"})
    config = {name: row[name] for name in (*BLOCKS, *LAYOUTS)}
    config |= {"use_experimental_scheduler": row["use_experimental_scheduler"] == "true", "use_base2_exp": True}
    return Program(kernel.bind(problem, config), kernel.arguments(problem))
