"""Flash attention, backward, for a TPU: dq in one kernel, dk and dv in another; or all three in one.

As in FlashAttention-2 (Dao, arXiv:2307.08691), the weights are computed again from the scores and the forward
pass's log-sum-exp, tile by tile. `dq` walks keys for a block of queries, as the forward pass does. `dk` and `dv`
walk the queries of all heads that share a kv head for a block of keys, on transposed tiles: so both of their
products, and the statistics along the lanes, come as they are. All in one takes five products for each tile in place
of three and four, but keeps the float32 sums of a whole kv head's dk and dv in VMEM.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels._compiler import compiler_params, output_like
from kernels.attention.backward_tiles import bwd_kernel, dkv_kernel, dq_kernel
from kernels.attention.blocks import Blocks
from kernels.attention.tiles import LANES, Scores, kv_block, q_block


def attention_dq_pallas(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    grad: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    q_segments: jax.Array | None = None,
    kv_segments: jax.Array | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    block_q: int,
    block_kv: int,
    block_q_compute: int | None = None,
    block_kv_compute: int | None = None,
    vmem_limit_mib: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """The gradient of attention with respect to q.

    Args:
        q: ``[batch, heads, q_len, head_dim]``, bfloat16 or float32.
        k: ``[batch, kv_heads, kv_len, head_dim]`` of q's dtype.
        v: ``[batch, kv_heads, kv_len, v_head_dim]`` of q's dtype.
        grad: Of the result, ``[batch, heads, q_len, v_head_dim]`` of q's dtype.
        lse: ``[batch, heads, q_len]`` float32: the log-sum-exp of each query's scores.
        delta: As lse: the sum of grad times the result over v_head_dim.
        q_segments: Mask and scores are those of `attention_pallas`, and so are the arguments up to `scale`.
        block_q: Queries per block: the whole q_len or a multiple of 128.
        block_kv: Keys fetched per grid step: the whole kv_len or a multiple of 128.
        block_q_compute: Queries per tile, a part of block_q (None: all of it); block_kv_compute: the same of keys.
        vmem_limit_mib: VMEM the compiler may use for the kernel, MiB; None is its default.
        interpret: Passed to `pallas_call`.

    Returns:
        As q; the sums are float32.
    """
    operands = _Operands(q, k, v, grad, lse, delta, q_segments, kv_segments)
    blocks = operands.blocks(causal, window, block_q, block_kv, block_q_compute, block_kv_compute)
    batch, heads, _, head_dim = q.shape
    group = heads // k.shape[1]

    def kv_at(b, h, i, step):
        j, first = kv_block(blocks, i, step)
        return b, lax.div(h, group), jnp.maximum(j, first)

    q_spec = pl.BlockSpec((None, None, block_q, head_dim), lambda b, h, i, step: (b, h, i, 0))
    return pl.pallas_call(
        functools.partial(dq_kernel, blocks=blocks, scores=Scores.of(q, scale, soft_cap)),
        out_shape=output_like(q.shape, q.dtype, q),
        grid=(batch, heads, blocks.q_blocks, blocks.kv_steps),
        in_specs=operands.specs(blocks, lambda b, h, i, step: (b, h, i), kv_at),
        out_specs=q_spec,
        scratch_shapes=[
            pltpu.VMEM((block_q, head_dim), q.dtype),  # q times the scale
            pltpu.VMEM((block_q, LANES), jnp.float32),  # the log-sum-exp to base 2, of each row in every lane
            pltpu.VMEM((block_q, LANES), jnp.float32),  # delta, the same way
            pltpu.VMEM((block_q, head_dim), jnp.float32),
            *[pltpu.VMEM((block_q, LANES), jnp.int32)] * blocks.packed,  # each row's segment
        ],
        compiler_params=compiler_params("parallel", "parallel", "parallel", "arbitrary", vmem_limit_mib=vmem_limit_mib),
        interpret=interpret,
        name="attention_dq",
    )(*operands.arrays())


def attention_dkv_pallas(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    grad: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    q_segments: jax.Array | None = None,
    kv_segments: jax.Array | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    block_q: int,
    block_kv: int,
    block_q_compute: int | None = None,
    block_kv_compute: int | None = None,
    vmem_limit_mib: int | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The gradients of attention with respect to k and v; arguments as of `attention_dq_pallas`.

    Here block_kv is what a kernel instance works for, block_q what is fetched per grid step.

    Returns:
        As k and v; the sums, over the heads that share a kv head as well, are float32.
    """
    operands = _Operands(q, k, v, grad, lse, delta, q_segments, kv_segments)
    blocks = operands.blocks(causal, window, block_q, block_kv, block_q_compute, block_kv_compute)
    batch, heads = q.shape[:2]
    (kv_heads, _, head_dim), v_dim = k.shape[1:], v.shape[3]
    group = heads // kv_heads

    def q_at(b, h, j, g, step):
        i, first = q_block(blocks, j, step)
        return b, h * group + g, jnp.maximum(i, first)

    return pl.pallas_call(
        functools.partial(dkv_kernel, blocks=blocks, scores=Scores.of(q, scale, soft_cap)),
        out_shape=[output_like(x.shape, x.dtype, x) for x in (k, v)],
        grid=(batch, kv_heads, blocks.kv_blocks, group, blocks.q_steps),
        in_specs=operands.specs(blocks, q_at, lambda b, h, j, g, step: (b, h, j)),
        out_specs=[
            pl.BlockSpec((None, None, block_kv, dim), lambda b, h, j, g, step: (b, h, j, 0))
            for dim in (head_dim, v_dim)
        ],
        scratch_shapes=[
            pltpu.VMEM((block_kv, head_dim), k.dtype),  # k times the scale
            pltpu.VMEM((block_kv, head_dim), jnp.float32),
            pltpu.VMEM((block_kv, v_dim), jnp.float32),
            *[pltpu.VMEM((block_kv, LANES), jnp.int32)] * blocks.packed,  # each key's segment
        ],
        compiler_params=compiler_params(
            "parallel", "parallel", "parallel", "arbitrary", "arbitrary", vmem_limit_mib=vmem_limit_mib
        ),
        interpret=interpret,
        name="attention_dkv",
    )(*operands.arrays())


def attention_bwd_pallas(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    grad: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    q_segments: jax.Array | None = None,
    kv_segments: jax.Array | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    block_q: int,
    block_kv: int,
    block_q_compute: int | None = None,
    block_kv_compute: int | None = None,
    vmem_limit_mib: int | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """All gradients of attention in one pass; arguments as of `attention_dq_pallas`.

    Queries are walked outside, keys inside: dq's sum is that of a block of queries, dk's and dv's are those of a whole
    kv head, which must fit the VMEM (8 · (head_dim + v_head_dim) bytes a key for bfloat16, and the blocks).

    Returns:
        As q, k and v; the sums are float32.
    """
    operands = _Operands(q, k, v, grad, lse, delta, q_segments, kv_segments)
    blocks = operands.blocks(causal, window, block_q, block_kv, block_q_compute, block_kv_compute)
    batch, heads = q.shape[:2]
    (kv_heads, kv_len, head_dim), v_dim = k.shape[1:], v.shape[3]
    group = heads // kv_heads

    def q_at(b, h, g, i, step):
        return b, h * group + g, i

    def kv_at(b, h, g, i, step):
        j, first = kv_block(blocks, i, step)
        return b, h, jnp.maximum(j, first)

    padded = blocks.kv_blocks * block_kv
    whole = [
        pl.BlockSpec((None, None, kv_len, dim), lambda b, h, g, i, step: (b, h, 0, 0)) for dim in (head_dim, v_dim)
    ]
    return pl.pallas_call(
        functools.partial(bwd_kernel, blocks=blocks, scores=Scores.of(q, scale, soft_cap)),
        out_shape=[output_like(x.shape, x.dtype, x) for x in (q, k, v)],
        grid=(batch, kv_heads, group, blocks.q_blocks, blocks.kv_steps),
        in_specs=operands.specs(blocks, q_at, kv_at),
        out_specs=[pl.BlockSpec((None, None, block_q, head_dim), lambda *at: (*q_at(*at), 0)), *whole],
        scratch_shapes=[
            pltpu.VMEM((block_q, head_dim), q.dtype),  # q times the scale
            pltpu.VMEM((padded, head_dim), jnp.float32),
            pltpu.VMEM((padded, v_dim), jnp.float32),
            pltpu.VMEM((block_q, head_dim), jnp.float32),
            *[pltpu.VMEM((block_kv, LANES), jnp.int32)] * blocks.packed,  # each key's segment
        ],
        compiler_params=compiler_params(
            "parallel", "parallel", "arbitrary", "arbitrary", "arbitrary", vmem_limit_mib=vmem_limit_mib
        ),
        interpret=interpret,
        name="attention_bwd",
    )(*operands.arrays())


@dataclasses.dataclass(frozen=True)
class _Operands:
    """What the backward kernels are given; see `attention_dq_pallas`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    grad: jax.Array
    lse: jax.Array
    delta: jax.Array
    q_segments: jax.Array | None
    kv_segments: jax.Array | None

    def blocks(self, causal: bool, window: int | None, *sizes: int | None) -> Blocks:
        """Of the sizes block_q, block_kv, block_q_compute and block_kv_compute."""
        config = dict(zip(("block_q", "block_kv", "block_q_compute", "block_kv_compute"), sizes, strict=True))
        mask = {"causal": causal, "window": window, "packed": self.q_segments is not None}
        return Blocks.of(self.q.shape[2], self.k.shape[2], config, **mask)

    def arrays(self) -> list[jax.Array]:
        """As the kernels take them: what a query or a key has one of lies along the lanes."""
        arrays = [self.q, self.k, self.v, self.grad, self.lse[:, :, None, :], self.delta[:, :, None, :]]
        if self.q_segments is not None:
            arrays += [self.q_segments[:, None, :], self.kv_segments[:, None, :]]
        return arrays

    def specs(self, blocks: Blocks, q_at: Callable[..., tuple], kv_at: Callable[..., tuple]) -> list[pl.BlockSpec]:
        """Of `arrays`.

        Args:
            q_at: Batch, query head and q block of a grid step.
            kv_at: Batch, kv head and kv block of a grid step.
        """

        def rows(array: jax.Array, block: int, at: Callable[..., tuple]) -> pl.BlockSpec:
            return pl.BlockSpec((None, None, block, array.shape[3]), lambda *step: (*at(*step), 0))

        def statistic(*step: Any) -> tuple:
            b, h, i = q_at(*step)
            return b, h, 0, i

        def ids(block: int, at: Callable[..., tuple]) -> pl.BlockSpec:
            return pl.BlockSpec((None, 1, block), lambda *step: (at(*step)[0], 0, at(*step)[2]))

        q, kv = (blocks.block_q, q_at), (blocks.block_kv, kv_at)
        specs = [rows(self.q, *q), rows(self.k, *kv), rows(self.v, *kv), rows(self.grad, *q)]
        specs += [pl.BlockSpec((None, None, 1, blocks.block_q), statistic)] * 2
        return [*specs, ids(*q), ids(*kv)] if blocks.packed else specs
