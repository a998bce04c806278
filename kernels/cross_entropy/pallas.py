"""The forward pass for a TPU: losses and log-sum-exps, of logits that never leave VMEM.

The grid walks blocks of the vocabulary for a block of tokens, whose x stays in VMEM. Each lane keeps the maximum
and the sum of the columns that fell to it, so that no step reduces across lanes; the last one does, once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels._compiler import compiler_params, output_like
from kernels._precision import dot, dot_precision

LANES = 128
LOG2E = math.log2(math.e)
LOWEST = -1e30  # below any logit, and finite: differences of two stay numbers


def cross_entropy_pallas(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    tied: bool = False,
    block_m: int,
    block_n: int,
    block_k: int | None = None,
    block_n_compute: int | None = None,
    held_buffers: int = 2,
    vmem_limit_mib: int | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Each token's loss and log-sum-exp; no length need be a multiple of its block.

    Args:
        x: ``[tokens, hidden]``, bfloat16 or float32.
        w: ``[hidden, vocab]``, of x's dtype; ``[vocab, hidden]`` if `tied`.
        labels: ``[tokens]`` int32; a token whose label is negative is ignored.
        z_loss: Times the squared log-sum-exp, added to the loss.
        soft_cap: Logits become ``soft_cap · tanh(logits / soft_cap)``; None leaves them.
        tied: Whether w is an embedding table, a row for each of the vocabulary.
        block_m: Tokens per block, a multiple of 128.
        block_n: Of the vocabulary per block, a multiple of 128.
        block_k: Of the hidden length per block of w: all of it (None) or a multiple of 128.
        block_n_compute: Of the vocabulary per tile of logits, a part of block_n (None: all of it).
        held_buffers: VMEM buffers of x. 2 fetches the next block of tokens ahead; 1 waits for it, but leaves VMEM
            for larger blocks.
        vmem_limit_mib: VMEM the compiler may use for the kernel, MiB; None is its default.
        interpret: Passed to `pallas_call`.

    Returns:
        Losses and log-sum-exps, ``[tokens]`` float32 each. An ignored token's loss is 0.
    """
    (tokens, hidden), vocab = x.shape, w.shape[0 if tied else 1]
    block_k = min(block_k or hidden, hidden)
    steps = pl.cdiv(hidden, block_k)
    kernel = functools.partial(
        _forward_kernel,
        z_loss=z_loss,
        soft_cap=soft_cap,
        tied=tied,
        steps=steps,
        tail_k=hidden - (steps - 1) * block_k,
        vocab=vocab,
        tile=block_n_compute or block_n,
    )
    row = pl.BlockSpec((1, block_m), lambda i, j, k: (0, i))
    lanes = pltpu.VMEM((block_m, LANES), jnp.float32)
    losses, lse = pl.pallas_call(
        kernel,
        out_shape=[output_like((1, tokens), jnp.float32, x)] * 2,
        grid=(pl.cdiv(tokens, block_m), pl.cdiv(vocab, block_n), steps),
        in_specs=[
            pl.BlockSpec(
                (block_m, hidden),
                lambda i, j, k: (i, 0),
                pipeline_mode=pl.Buffered(1) if held_buffers == 1 else None,
            ),
            w_block(block_k, block_n, lambda i, j, k: (k, j), tied),
            row,
        ],
        out_specs=[row, row],
        scratch_shapes=[pltpu.VMEM((block_m, LANES), jnp.int32), lanes, lanes, lanes]
        + [pltpu.VMEM((block_m, block_n), jnp.float32)] * (steps > 1),
        compiler_params=compiler_params("parallel", "arbitrary", "arbitrary", vmem_limit_mib=vmem_limit_mib),
        interpret=interpret,
        name="cross_entropy",
    )(x, w, labels[None, :])
    return losses[0], lse[0]


def _forward_kernel(
    x_ref,
    w_ref,
    labels_ref,
    losses_ref,
    lse_ref,
    place,
    top,
    total,
    picked,
    *sums,
    z_loss: float,
    soft_cap: float | None,
    tied: bool,
    steps: int,
    tail_k: int,
    vocab: int,
    tile: int,
) -> None:
    """One grid step: a block of tokens against a block of the vocabulary, or against some of its rows.

    Args:
        place: Of each token and lane, where the label's logit is: its column less the lane, a multiple of 128 in the
            lane that it falls to and in no other.
        top: Of each token and lane, the largest logit so far, to base 2 (times log2 e).
        total: The sum of exponentials, relative to `top`.
        picked: The label's logit, to base 2, in the lane that it falls to; else 0.
        sums: Of logits, where a block of w does not hold all its rows.
        steps: Grid steps along hidden, `tail_k` its last one's length: what lies beyond it is whatever was in VMEM.
        vocab: Columns that exist.
        tile: Columns of a tile.
    """
    j, step = pl.program_id(1), pl.program_id(2)
    blocks, (block_k, block_n) = pl.num_programs(1), (w_ref.shape[::-1] if tied else w_ref.shape)
    tail = vocab % block_n or block_n

    @pl.when((j == 0) & (step == 0))
    def _():
        lane = lax.broadcasted_iota(jnp.int32, place.shape, 1)
        place[...] = to_column(labels_ref) - lane
        top[...] = jnp.full_like(top, LOWEST)
        total[...] = jnp.zeros_like(total)
        picked[...] = jnp.zeros_like(picked)

    def update(columns: int) -> None:
        """Takes the first so many columns into the statistics."""
        for first in range(0, columns, tile):
            width = min(tile, pl.cdiv(columns - first, LANES) * LANES)
            at = slice(first, first + width)
            if steps == 1:
                logits = product(x_ref[...], w_ref, slice(None), at, tied)
            else:  # the last product goes straight on, not through the sums' memory
                x = x_ref[:, (steps - 1) * block_k :]
                logits = sums[0][:, at] + product(x, w_ref, slice(0, tail_k), at, tied)
            logits = capped(logits, soft_cap)[0]
            if columns - first < width:
                column = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
                logits = jnp.where(column < columns - first, logits, LOWEST)
            chunks = [logits[:, c : c + LANES] for c in range(0, width, LANES)]
            before = top[...]
            now = functools.reduce(jnp.maximum, chunks, before)
            top[...] = now
            total[...] = sum((jnp.exp2(chunk - now) for chunk in chunks), total[...] * jnp.exp2(before - now))
            label, found = place[...], picked[...]
            for number, chunk in enumerate(chunks):
                found = jnp.where(label == j * block_n + first + number * LANES, chunk, found)
            picked[...] = found

    if steps > 1:

        @pl.when(step < steps - 1)
        def _():
            x = x_ref[:, pl.ds(pl.multiple_of(step * block_k, LANES), block_k)]
            # A select beside the MXU costs nothing; a pass that stores zeros costs as much as one that adds.
            so_far = jnp.where(step == 0, 0.0, sums[0][...])
            sums[0][...] = so_far + product(x, w_ref, slice(None), slice(None), tied)

    last_step = step == steps - 1
    if tail == block_n:
        pl.when(last_step)(lambda: update(block_n))
    else:
        pl.when(last_step & (j < blocks - 1))(lambda: update(block_n))
        pl.when(last_step & (j == blocks - 1))(lambda: update(tail))

    @pl.when(last_step & (j == blocks - 1))
    def _():
        for first in range(0, top.shape[0], LANES):
            rows = slice(first, first + LANES)
            largest = jnp.max(top[rows], axis=1, keepdims=True)
            exponentials = jnp.sum(total[rows] * jnp.exp2(top[rows] - largest), axis=1, keepdims=True)
            lse = (largest + jnp.log2(exponentials)) / LOG2E
            label = jnp.sum(picked[rows], axis=1, keepdims=True) / LOG2E
            losses = lse - label + z_loss * lse * lse if z_loss else lse - label
            lse_ref[:, rows] = _to_row(lse)
            losses_ref[:, rows] = jnp.where(labels_ref[:, rows] >= 0, _to_row(losses), 0.0)


def w_block(depth: int, columns: int, index_map: Callable[..., tuple], tied: bool, **options: Any) -> pl.BlockSpec:
    """A block of w; `index_map` gives (hidden, vocabulary) whichever comes first in w."""
    if tied:
        return pl.BlockSpec((columns, depth), lambda *at: index_map(*at)[::-1], **options)
    return pl.BlockSpec((depth, columns), index_map, **options)


def product(x: jax.Array, w_ref, depth: slice, columns: slice, tied: bool) -> jax.Array:
    """x times that part of a block of w, in float32."""
    return dot_of_rows(x, w_ref[columns, depth]) if tied else dot(x, w_ref[depth, columns])


def dot_of_rows(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x @ y.T`` in float32."""
    dimensions = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, y, dimensions, precision=dot_precision(x.dtype), preferred_element_type=jnp.float32)


def capped(logits: jax.Array, soft_cap: float | None) -> tuple[jax.Array, jax.Array | None]:
    """Logits to base 2 (times log2 e), capped where they are to be; and their slope, None where that is 1."""
    if soft_cap is None:
        return logits * LOG2E, None
    bent = jnp.tanh(logits * (1 / soft_cap))
    return bent * (soft_cap * LOG2E), 1 - bent * bent


def to_column(row_ref) -> jax.Array:
    """``[1, n]`` as ``[n, 128]`` of equal lanes; n is a multiple of 128, the elements are of 32 bits."""
    squares = range(0, row_ref.shape[1], LANES)
    rows = [jnp.broadcast_to(row_ref[:, first : first + LANES], (LANES, LANES)) for first in squares]
    return jnp.concatenate([row.T for row in rows], axis=0)


def _to_row(column: jax.Array) -> jax.Array:
    """``[128, 1]`` as ``[1, 128]``."""
    return jnp.broadcast_to(column, (LANES, LANES)).T[:1]
