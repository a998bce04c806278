"""The backward pass for a TPU: the gradient of x in one kernel, that of w in another.

Tiles of logits are computed again, and with the forward pass's log-sum-exp become their own gradient. The gradient
of x walks the vocabulary for a block of tokens, as the forward pass does. The gradient of w walks the tokens for a
block of the vocabulary, on transposed tiles: so the second product, and the statistics along the lanes, come as they
are, and only the block of w and its gradient have to be turned, once each; those of an embedding table need not be.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels._compiler import compiler_params, output_like
from kernels._precision import dot
from kernels.cross_entropy.pallas import LANES, LOG2E, capped, dot_of_rows, product, to_column, w_block

# Of rows that are turned to be multiplied by: one alone does not lower in bfloat16. Those beyond the last that exists
# are whatever was in VMEM, and so are their columns of the product, which go no further.
FEWEST_ROWS = 16


def cross_entropy_dx_pallas(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    lse: jax.Array,
    grad: jax.Array,
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    tied: bool = False,
    block_m: int,
    block_n: int,
    block_n_compute: int | None = None,
    turned_sum: bool = False,
    held_buffers: int = 2,
    vmem_limit_mib: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """The gradient of x; no length need be a multiple of its block.

    Args:
        x: ``[tokens, hidden]``, bfloat16 or float32.
        w: ``[hidden, vocab]``, of x's dtype; ``[vocab, hidden]`` if `tied`.
        labels: ``[tokens]`` int32; a token whose label is negative is ignored.
        lse: ``[tokens]`` float32, the log-sum-exp of each token's logits.
        grad: ``[tokens]`` float32, the gradient of the losses.
        z_loss: Times the squared log-sum-exp, added to the loss.
        soft_cap: As the forward pass's (`cross_entropy_pallas`), and so is tied.
        tied: See there.
        block_m: Tokens per block, a multiple of 128.
        block_n: Of the vocabulary per block, a multiple of 128.
        block_n_compute: Of the vocabulary per tile of logits, a part of block_n (None: all of it).
        turned_sum: Whether the gradient is summed transposed, and turned when it is complete: then the second product
            turns tiles of logits, not blocks of w. Not if `tied`: there nothing needs turning.
        held_buffers: VMEM buffers of x. 2 fetches the next block of tokens ahead; 1 waits for it, but leaves VMEM
            for larger blocks.
        vmem_limit_mib: VMEM the compiler may use for the kernel, MiB; None is its default.
        interpret: Passed to `pallas_call`.

    Returns:
        As x; the sums are float32.
    """
    (tokens, hidden), vocab = x.shape, w.shape[0 if tied else 1]
    kernel = functools.partial(
        _dx_kernel,
        z_loss=z_loss,
        soft_cap=soft_cap,
        tied=tied,
        turned=turned_sum,
        vocab=vocab,
        tile=block_n_compute or block_n,
    )
    row = pl.BlockSpec((1, block_m), lambda i, j: (0, i))
    lanes = pltpu.VMEM((block_m, LANES), jnp.float32)
    return pl.pallas_call(
        kernel,
        out_shape=output_like(x.shape, x.dtype, x),
        grid=(pl.cdiv(tokens, block_m), pl.cdiv(vocab, block_n)),
        in_specs=[
            pl.BlockSpec((block_m, hidden), lambda i, j: (i, 0), pipeline_mode=_buffers(held_buffers)),
            w_block(hidden, block_n, lambda i, j: (0, j), tied),
            row,
            row,
            row,
        ],
        out_specs=pl.BlockSpec((block_m, hidden), lambda i, j: (i, 0)),
        scratch_shapes=[
            pltpu.VMEM((block_m, LANES), jnp.int32),
            lanes,
            lanes,
            lanes,
            pltpu.VMEM((hidden, block_m) if turned_sum else (block_m, hidden), jnp.float32),
        ],
        compiler_params=compiler_params("parallel", "arbitrary", vmem_limit_mib=vmem_limit_mib),
        interpret=interpret,
        name="cross_entropy_dx",
    )(x, w, labels[None, :], lse[None, :], grad[None, :])


def cross_entropy_dw_pallas(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    lse: jax.Array,
    grad: jax.Array,
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    tied: bool = False,
    block_m: int,
    block_n: int,
    block_m_compute: int | None = None,
    held_buffers: int = 2,
    vmem_limit_mib: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """The gradient of w; arguments as of `cross_entropy_dx_pallas`, but for these.

    Args:
        block_m_compute: Tokens per tile of logits, a part of block_m (None: all of it).
        held_buffers: VMEM buffers of w, which here is what stays while the grid walks the tokens.

    Returns:
        As w; the sums are float32.
    """
    (tokens, hidden), vocab = x.shape, w.shape[0 if tied else 1]
    kernel = functools.partial(
        _dw_kernel, z_loss=z_loss, soft_cap=soft_cap, tied=tied, tokens=tokens, tile=block_m_compute or block_m
    )
    row = pl.BlockSpec((1, block_m), lambda j, i: (0, i))
    return pl.pallas_call(
        kernel,
        out_shape=output_like(w.shape, w.dtype, w),
        grid=(pl.cdiv(vocab, block_n), pl.cdiv(tokens, block_m)),
        in_specs=[
            pl.BlockSpec((block_m, hidden), lambda j, i: (i, 0)),
            w_block(hidden, block_n, lambda j, i: (0, j), tied, pipeline_mode=_buffers(held_buffers)),
            row,
            row,
            row,
        ],
        out_specs=w_block(hidden, block_n, lambda j, i: (0, j), tied),
        scratch_shapes=[pltpu.VMEM((block_n, hidden), jnp.float32)]
        + [pltpu.VMEM((block_n, hidden), w.dtype)] * (not tied),
        compiler_params=compiler_params("parallel", "arbitrary", vmem_limit_mib=vmem_limit_mib),
        interpret=interpret,
        name="cross_entropy_dw",
    )(x, w, labels[None, :], lse[None, :], grad[None, :])


def _buffers(count: int) -> pl.Buffered | None:
    return pl.Buffered(1) if count == 1 else None


def _factors(labels: jax.Array, lse: jax.Array, grad: jax.Array, z_loss: float) -> tuple[jax.Array, jax.Array]:
    """What a token's softmax, and its label's one, are multiplied by in the gradient of its logits."""
    of_label = jnp.where(labels >= 0, grad, 0.0)
    return (of_label * (1 + 2 * z_loss * lse) if z_loss else of_label), of_label


def _by_logits(logits, is_label, lse, of_softmax, of_label, soft_cap: float | None) -> jax.Array:
    """The gradient of logits; lse to base 2 (times log2 e)."""
    logits, slope = capped(logits, soft_cap)
    weights = jnp.exp2(logits - lse) * of_softmax
    by_logits = jnp.where(is_label, weights - of_label, weights)
    return by_logits if slope is None else by_logits * slope


def _dx_kernel(
    x_ref,
    w_ref,
    labels_ref,
    lse_ref,
    grad_ref,
    dx_ref,
    place,
    lse,
    of_softmax,
    of_label,
    acc,
    *,
    z_loss: float,
    soft_cap: float | None,
    tied: bool,
    turned: bool,
    vocab: int,
    tile: int,
) -> None:
    """One grid step: a block of tokens against a block of the vocabulary.

    Args:
        place: Of each token and lane, where its label's logit is, as in the forward pass.
        lse: The log-sum-exp to base 2, of each token in every lane; so are of_softmax and of_label (`_factors`).
        turned: Whether acc, the gradient so far, is transposed.
        vocab: Columns that exist. What lies beyond them is whatever was in VMEM: the last block takes the part that
            exists and no other.
        tile: Columns of a tile.
    """
    j, blocks, block_n = pl.program_id(1), pl.num_programs(1), w_ref.shape[0 if tied else 1]

    @pl.when(j == 0)
    def _():
        labels, lses, grads = (to_column(ref) for ref in (labels_ref, lse_ref, grad_ref))
        place[...] = labels - lax.broadcasted_iota(jnp.int32, place.shape, 1)
        lse[...] = lses * LOG2E
        of_softmax[...], of_label[...] = _factors(labels, lses, grads, z_loss)
        acc[...] = jnp.zeros_like(acc)

    def update(columns: int) -> None:
        chunks = []
        for first in range(0, columns, tile):
            width = min(tile, columns - first)
            at = slice(first, first + max(width, FEWEST_ROWS if tied else 1))
            logits = product(x_ref[...], w_ref, slice(None), at, tied)[:, :width]
            for start in range(0, logits.shape[1], LANES):
                chunk = logits[:, start : start + LANES]
                each = slice(None), slice(0, chunk.shape[1])
                is_label = place[each] == j * block_n + first + start
                statistics = lse[each], of_softmax[each], of_label[each]
                chunks.append(_by_logits(chunk, is_label, *statistics, soft_cap).astype(w_ref.dtype))
        by_logits = jnp.concatenate(chunks, axis=1)
        if tied:
            acc[...] += dot(by_logits, w_ref[:columns, :])
        else:
            factors = by_logits, w_ref[:, :columns]
            acc[...] += dot_of_rows(*(factors[::-1] if turned else factors))

    tail = vocab % block_n
    if tail:
        pl.when(j < blocks - 1)(lambda: update(block_n))
        pl.when(j == blocks - 1)(lambda: update(tail))
    else:
        update(block_n)

    @pl.when(j == blocks - 1)
    def _():
        dx = acc[...].astype(dx_ref.dtype)
        dx_ref[...] = dx.T if turned else dx


def _dw_kernel(
    x_ref,
    w_ref,
    labels_ref,
    lse_ref,
    grad_ref,
    dw_ref,
    acc,
    *turned,
    z_loss: float,
    soft_cap: float | None,
    tied: bool,
    tokens: int,
    tile: int,
) -> None:
    """One grid step: a block of the vocabulary against a block of tokens.

    Args:
        acc: The block's gradient so far, a row for each of the vocabulary.
        turned: The block of w, transposed, where w itself does not have such rows.
        tokens: Those that exist: as `_dx_kernel`'s columns.
        tile: Tokens of a tile.
    """
    j, i, blocks = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    block_m, block_n = x_ref.shape[0], acc.shape[0]
    w_rows = w_ref if tied else turned[0]

    @pl.when(i == 0)
    def _():
        if not tied:
            w_rows[...] = w_ref[...].T
        acc[...] = jnp.zeros_like(acc)

    def update(rows: int) -> None:
        tiles = []
        for first in range(0, rows, tile):
            width = min(tile, rows - first)
            at = slice(first, first + width)
            labels, lse = labels_ref[:, at], lse_ref[:, at]
            x = x_ref[first : first + max(width, FEWEST_ROWS), :]
            logits = dot_of_rows(w_rows[...], x)[:, :width]  # [vocabulary, tokens]
            is_label = lax.broadcasted_iota(jnp.int32, logits.shape, 0) == labels - j * block_n
            factors = _factors(labels, lse, grad_ref[:, at], z_loss)
            tiles.append(_by_logits(logits, is_label, lse * LOG2E, *factors, soft_cap).astype(x_ref.dtype))
        acc[...] += dot(jnp.concatenate(tiles, axis=1), x_ref[:rows, :])

    tail = tokens % block_m
    if tail:
        pl.when(i < blocks - 1)(lambda: update(block_m))
        pl.when(i == blocks - 1)(lambda: update(tail))
    else:
        update(block_m)

    @pl.when(i == blocks - 1)
    def _():
        dw = acc[...].astype(dw_ref.dtype)
        dw_ref[...] = dw if tied else dw.T
