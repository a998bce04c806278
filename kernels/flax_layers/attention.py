"""The tuned attention as the ``attention_fn`` of Flax's multi-head attention, NNX's and Linen's alike."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from autotune.errors import UsageError
from autotune.outcome import Config
from kernels.attention import attention

FLAX = "Flax's own dot_product_attention"


@functools.partial(jax.tree_util.register_dataclass, data_fields=["queries", "keys"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Segments:
    """What a layer is given as ``mask`` where several sequences share a row: a query sees the keys of its own id.

    Attributes:
        queries: ``[batch..., q_len]`` integers.
        keys: ``[batch..., kv_len]`` integers; None where they are the queries'.

    Example:
        >>> layer(x, mask=Segments(ids), is_causal=True)  # x [batch, length, features], ids [batch, length]
    """

    queries: jax.Array
    keys: jax.Array | None = None


def attention_fn(
    *,
    causal: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    backward: str | None = None,
    config: Config | None = None,
    bwd_config: Config | None = None,
    interpret: Any = False,
) -> Callable[..., jax.Array]:
    """An ``attention_fn`` for `flax.nnx.MultiHeadAttention` and `flax.linen.MultiHeadDotProductAttention`.

    On a TPU it is the tuned kernel, forward and backward, elsewhere XLA. It never falls back on a TPU: what the kernel
    cannot do is refused.

    Args:
        causal: Query i sees the keys j ≤ i + kv_len - q_len. NNX's layer can be told so in its call, too
            (``is_causal=True``); Linen's cannot.
        window: Of these the last so many, itself included; None for all.
        soft_cap: As `kernels.attention.attention`'s; so are the rest.
        scale: None is 1 / sqrt(head_dim).
        backward: ``fused``, ``split`` or None.
        config: Block sizes and the like of the forward kernel; None takes the preset.
        bwd_config: The same of the fused backward kernel.
        interpret: Runs the kernels themselves anywhere, in Pallas' interpreter.

    Returns:
        A function of ``query [batch..., q_len, heads, head_dim]``, ``key [batch..., kv_len, kv_heads, head_dim]``,
        ``value [batch..., kv_len, kv_heads, v_head_dim]`` (bfloat16 or float32; kv_heads divides heads), with the
        keyword arguments of `flax.nnx.dot_product_attention`, that gives ``[batch..., q_len, heads, v_head_dim]``.
        Its ``mask`` is one of

        - None;
        - `Segments`, for packed sequences;
        - a mask of keys, ``[batch..., 1, 1, kv_len]``: padding, or what is filled of a decoding layer's cache. A query
          that sees no key gives zeros (Flax gives the mean of all values).

        ``precision`` changes nothing: float32 is always multiplied in full.

    Raises:
        UsageError: By that function: another mask, a bias, dropout, weights to be sown, products of the caller's own,
            or what `kernels.attention.attention` refuses.

    Example:
        >>> layer = nnx.MultiHeadAttention(
        ...     8, 512, num_kv_heads=2, attention_fn=attention_fn(causal=True), decode=False, rngs=nnx.Rngs(0)
        ... )
    """
    options = {
        "window": window,
        "soft_cap": soft_cap,
        "scale": scale,
        "backward": backward,
        "config": config,
        "bwd_config": bwd_config,
        "interpret": interpret,
    }

    # Linen leaves out every argument that is not in this signature: what must be refused has to be here.
    def tuned_attention(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | Segments | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        promote_dtype: Any = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = True,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> jax.Array:
        einsum = qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None
        refused = {"a bias": bias is not None, "sow_weights=True": module is not None, "an einsum of its own": einsum}
        for what in (what for what, given in refused.items() if given):
            raise UsageError(f"attention_fn with {what}: the kernel takes none; leave it out, or use {FLAX}")
        if dropout_rate and not deterministic:
            raise UsageError(
                f"attention_fn with dropout_rate={dropout_rate}: the kernel drops no weights; give dropout_rate=0 or "
                f"deterministic=True, or use {FLAX}"
            )
        arrays: tuple[jax.Array, ...] = (query, key, value)
        if promote_dtype is not None:
            arrays = promote_dtype(arrays, dtype=dtype)
        else:
            arrays = tuple(array.astype(dtype or jnp.result_type(*arrays)) for array in arrays)
        _check_shapes(*arrays)
        q_len, kv_len = query.shape[-3], key.shape[-3]
        if is_causal and q_len != kv_len:
            raise UsageError(
                f"attention_fn with is_causal=True, {q_len} queries and {kv_len} keys: Flax takes the first query to "
                "see the first key, the kernel the last query to see the last; give attention_fn(causal=True) for that"
            )
        batch = query.shape[:-3]
        segments = _segment_ids(mask, batch, q_len, kv_len)
        if window is not None and q_len != kv_len and mask is not None:
            raise UsageError(
                f"attention_fn with window={window}, {q_len} queries, {kv_len} keys and a mask: the window ends at the "
                "last key, seen or not; leave the window out, or cut the keys to those that are seen"
            )
        q, k, v = (_by_heads(array) for array in arrays)
        out = attention(q, k, v, causal=causal or is_causal, segment_ids=segments, **options)
        return jnp.moveaxis(out, 1, 2).reshape(*batch, q_len, *out.shape[1::2])

    return tuned_attention


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    """That they have the same batch; the kernel's own function checks the rest."""
    shapes = [array.shape for array in (query, key, value)]
    if any(len(shape) < 3 for shape in shapes) or len({shape[:-3] for shape in shapes}) > 1:
        raise UsageError(
            f"attention_fn of query {shapes[0]}, key {shapes[1]}, value {shapes[2]}: must be [batch..., length, heads, "
            "head_dim] each, with the same batch"
        )


def _by_heads(array: jax.Array) -> jax.Array:
    """``[batch..., length, heads, head_dim]`` as ``[batch, heads, length, head_dim]``."""
    return jnp.moveaxis(array.reshape(-1, *array.shape[-3:]), 2, 1)


def _segment_ids(
    mask: jax.Array | Segments | None, batch: tuple[int, ...], q_len: int, kv_len: int
) -> tuple[jax.Array, jax.Array] | None:
    """The ids ``[batch, q_len]`` and ``[batch, kv_len]`` that say the same as the mask."""
    if mask is None:
        return None
    size = math.prod(batch)
    if isinstance(mask, Segments):
        keys = mask.queries if mask.keys is None else mask.keys
        wanted = ((*batch, q_len), (*batch, kv_len))
        if (mask.queries.shape, keys.shape) != wanted:
            raise UsageError(
                f"Segments of {mask.queries.shape} and {keys.shape}: must be {wanted[0]} for the queries and "
                f"{wanted[1]} for the keys"
            )
        return mask.queries.reshape(size, q_len), keys.reshape(size, kv_len)
    # That it is the same for all heads and queries must be seen in its shape: its values are not known in a trace.
    whole = (*batch, 1, 1, kv_len)
    if mask.ndim != len(whole) or any(n not in (1, m) for n, m in zip(mask.shape, whole, strict=True)):
        raise UsageError(
            f"attention_fn with a mask of {mask.shape}: the kernel takes none of queries and keys; for a causal one "
            f"give attention_fn(causal=True), for packed sequences mask=Segments(ids), for padding a mask of {whole}; "
            f"for any other use {FLAX}"
        )
    seen = jnp.broadcast_to(mask.astype(bool), whole).reshape(size, kv_len)
    return jnp.ones((size, q_len), jnp.int32), seen.astype(jnp.int32)
