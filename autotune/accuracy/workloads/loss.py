"""Linear cross-entropy: the loss of ``softmax(x @ w)`` at the labels, fused in one Pallas kernel and as XLA does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.accuracy.workloads._program import Program, spec
from autotune.chips import Chip


def xla(row: Mapping[str, Any], chip: Chip) -> Program:
    """Logits in the operands' common dtype, log-softmax and a one-hot sum: gives the loss and the log-sum-exp."""

    def function(x: jax.Array, labels: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = x @ w
        one_hot = jax.nn.one_hot(labels, w.shape[1], dtype=x.dtype)
        total = jnp.sum(-one_hot * jax.nn.log_softmax(logits, axis=-1), dtype=jnp.float32)
        loss = total / x.shape[0] if row["reduction"] == "mean" else total
        return loss, jax.nn.logsumexp(logits, axis=-1)

    return Program(function, (spec(row["x"]), spec(row["labels"]), spec(row["w"])))


def fused(row: Mapping[str, Any], chip: Chip) -> Program:
    """The same in a grid of (rows, vocabulary, hidden) blocks, logits never leaving VMEM."""
    blocks = row["b_block_size"], row["v_block_size"], row["h_block_size"]
    return Program(
        _fused(blocks, mean=row["reduction"] == "mean"), (spec(row["x"]), spec(row["labels"]), spec(row["w"]))
    )


def _fused(blocks: tuple[int, int, int], *, mean: bool) -> Callable[..., tuple[jax.Array, jax.Array]]:
    block_b, block_v, block_h = blocks

    def function(x: jax.Array, labels: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        (rows, hidden), vocabulary = x.shape, w.shape[1]
        grid = (pl.cdiv(rows, block_b), pl.cdiv(vocabulary, block_v), pl.cdiv(hidden, block_h))
        tail = vocabulary % block_v

        def product(x_ref, w_ref) -> jax.Array:
            # Unlike jnp.dot, this leaves float32 x and bfloat16 w as they are.
            return jax.lax.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

        def kernel(x_ref, labels_ref, w_ref, loss_ref, lse_ref, logits_ref) -> None:
            b, v, h = (pl.program_id(axis) for axis in range(3))

            @pl.when((b == 0) & (v == 0) & (h == 0))
            def _():
                loss_ref[0] = 0.0

            @pl.when((v == 0) & (h == 0))
            def _():
                lse_ref[...] = jnp.full_like(lse_ref, -jnp.inf)

            if tail:  # what lies beyond the vocabulary in VMEM is whatever was there

                @pl.when(v == grid[1] - 1)
                def _():
                    column = jax.lax.broadcasted_iota(jnp.int32, w_ref.shape, 1)
                    w_ref[...] = jnp.where(column < tail, w_ref[...], 0)

            # A product in each branch: one shared by both would live in VMEM beside the logits.
            @pl.when(h == 0)
            def _():
                logits_ref[...] = product(x_ref, w_ref)

            @pl.when(h > 0)
            def _():
                logits_ref[...] += product(x_ref, w_ref)

            @pl.when(h == grid[2] - 1)
            def _():
                one_hot = jax.nn.one_hot(labels_ref[...] - v * block_v, block_v, dtype=jnp.float32)
                loss_ref[0] -= jnp.sum(one_hot * logits_ref[...])
                lse_ref[...] = jnp.logaddexp(lse_ref[...], jax.nn.logsumexp(logits_ref[...], axis=-1))

            @pl.when((v == grid[1] - 1) & (h == grid[2] - 1))
            def _():
                loss_ref[0] += jnp.sum(lse_ref[...])

        loss, lse = pl.pallas_call(
            kernel,
            out_shape=[jax.ShapeDtypeStruct((1,), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.float32)],
            grid=grid,
            in_specs=[
                pl.BlockSpec((block_b, block_h), lambda b, v, h: (b, h)),
                pl.BlockSpec((block_b,), lambda b, v, h: (b,)),
                pl.BlockSpec((block_h, block_v), lambda b, v, h: (h, v)),
            ],
            out_specs=[
                pl.BlockSpec(memory_space=pltpu.SMEM),
                pl.BlockSpec((block_b,), lambda b, v, h: (b,)),
            ],
            scratch_shapes=[pltpu.VMEM((block_b, block_v), jnp.float32)],
            name="linear_cross_entropy",
        )(x, labels, w)
        return (loss[0] / rows if mean else loss[0]), lse

    return function
