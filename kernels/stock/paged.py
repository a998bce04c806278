"""Attention over paged keys and values, which JAX ships for serving: functions of arrays, and blocks from presets.

Source: ``jax.experimental.pallas.ops.tpu.paged_attention`` and ``.ragged_paged_attention``. Both take q scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from kernels.stock.lookups import found
from kernels.stock.problem import PagedProblem, RaggedPagedProblem

MIB = 1024 * 1024
TOKENS_AT_ONCE = 64  # in the reference, as each has its own sequence's keys beside it


def paged_attention_blocks(problem: PagedProblem, *, device_kind: str | None = None) -> dict[str, Any]:
    """The tuned keyword arguments of `paged_attention`, from the presets of ``stock_paged_attention``.

    Args:
        device_kind: For which chip (``"TPU v6 lite"``); None is the one attached.
    """
    return paged_arguments(found("stock_paged_attention", problem, device_kind))


def ragged_paged_attention_blocks(problem: RaggedPagedProblem, *, device_kind: str | None = None) -> dict[str, Any]:
    """The tuned keyword arguments of `ragged_paged_attention`, from the presets of ``stock_ragged_paged_attention``."""
    return ragged_arguments(found("stock_ragged_paged_attention", problem, device_kind))


def paged_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config in the library's terms."""
    mode = config["megacore_mode"]
    return {**config, "megacore_mode": None if mode == "none" else mode}


def ragged_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config in the library's terms, the limit in bytes."""
    fields = dict(config)
    fields["vmem_limit_bytes"] = fields.pop("vmem_limit_mib") * MIB
    return fields


def paged(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    lengths: jax.Array,
    pages: jax.Array,
    *,
    config: Mapping[str, Any],
) -> jax.Array:
    """One token's attention in each sequence: ``[batch, heads, head_dim]``.

    Args:
        q: ``[batch, heads, head_dim]``, scaled.
        k_pages: ``[kv_heads, all pages, page_size, head_dim]``.
        v_pages: As k_pages.
        lengths: ``[batch]`` int32: tokens of each sequence.
        pages: ``[batch, pages_per_seq]`` int32: where they lie.
    """
    return paged_attention(q, k_pages, v_pages, lengths, pages, **paged_arguments(config))


def paged_reference(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, lengths: jax.Array, pages: jax.Array
) -> jax.Array:
    """The same in plain JAX: every sequence's pages gathered."""
    batch, heads, dim = q.shape
    kv_heads = k_pages.shape[0]

    def gathered(of: jax.Array) -> jax.Array:
        return of[:, pages].reshape(kv_heads, batch, -1, dim)

    grouped = q.reshape(batch, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum("bhgd,hbkd->bhgk", grouped, gathered(k_pages), preferred_element_type=jnp.float32)
    seen = jnp.arange(scores.shape[-1]) < lengths[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(v_pages.dtype)
    out = jnp.einsum("bhgk,hbkd->bhgd", weights, gathered(v_pages), preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype)


def ragged(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    pages: jax.Array,
    starts: jax.Array,
    count: jax.Array,
    *,
    config: Mapping[str, Any],
) -> jax.Array:
    """Causal attention of several sequences' last tokens, one after the other: ``[tokens, heads, head_dim]``.

    Args:
        q: ``[tokens, heads, head_dim]``, scaled.
        kv_pages: ``[all pages, page_size, 2 * kv_heads, head_dim]``: a head's keys, then its values.
        kv_lens: ``[sequences]`` int32: tokens that each has, the new ones included.
        pages: ``[sequences, pages_per_seq]`` int32: where they lie.
        starts: ``[sequences + 1]`` int32: each one's first query, and the end of the last.
        count: ``[1]`` int32: sequences that there are.
    """
    return ragged_paged_attention(q, kv_pages, kv_lens, pages, starts, count, **ragged_arguments(config))


def ragged_reference(
    q: jax.Array, kv_pages: jax.Array, kv_lens: jax.Array, pages: jax.Array, starts: jax.Array, count: jax.Array
) -> jax.Array:
    """The same in plain JAX: every token against its own sequence's keys. Made to be right; a slow baseline."""
    tokens, heads, dim = q.shape
    kv_heads = kv_pages.shape[2] // 2
    owner = jnp.searchsorted(starts[1:], jnp.arange(tokens), side="right").clip(max=kv_lens.shape[0] - 1)
    k, v = (kv_pages[:, :, part::2][pages].reshape(kv_lens.shape[0], -1, kv_heads, dim) for part in (0, 1))

    def one(arrays: tuple[jax.Array, ...]) -> jax.Array:
        row, mine, position = arrays
        last = kv_lens[mine] - starts[mine + 1] + position
        grouped = row.reshape(kv_heads, heads // kv_heads, dim)
        scores = jnp.einsum("hgd,khd->hgk", grouped, k[mine], preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(jnp.arange(scores.shape[-1]) <= last, scores, -jnp.inf), axis=-1)
        out = jnp.einsum("hgk,khd->hgd", weights.astype(v.dtype), v[mine], preferred_element_type=jnp.float32)
        return out.reshape(heads, dim).astype(q.dtype)

    return jax.lax.map(one, (q, owner, jnp.arange(tokens)), batch_size=TOKENS_AT_ONCE)
