"""Cross-entropy for training code."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autotune.errors import UsageError, one_of
from autotune.outcome import Config
from kernels._dispatch import choose_config, run, varying_alike
from kernels.cross_entropy.backward import cross_entropy_dw_pallas, cross_entropy_dx_pallas
from kernels.cross_entropy.cost import heuristic_config
from kernels.cross_entropy.pallas import cross_entropy_pallas
from kernels.cross_entropy.problem import CrossEntropyProblem
from kernels.cross_entropy.reference import (
    cross_entropy_dw_reference,
    cross_entropy_dx_reference,
    cross_entropy_reference,
)

IGNORED = -1  # to the kernels


def cross_entropy(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    tied: bool = False,
    ignore_index: int = -100,
    config: Config | None = None,
    dx_config: Config | None = None,
    dw_config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """``-log softmax(x @ w)[label]`` of each token, by the tuned kernel on a TPU, by XLA elsewhere.

    On a TPU the logits never exist as an array, neither here nor in the gradients of x and w, which are tuned kernels'
    too. The losses are not reduced: a mean over the tokens that count is
    ``losses.sum() / (labels != -100).sum()``.

    Args:
        x: ``[..., tokens, hidden]``, bfloat16 or float32; leading dimensions are folded into the tokens.
        w: ``[hidden, vocab]``, of x's dtype; ``[vocab, hidden]`` if `tied`.
        labels: ``[..., tokens]`` integers: below vocab, or `ignore_index`. One that is neither is the caller's
            mistake; a loss for it means nothing.
        z_loss: Times the squared log-sum-exp of the logits, added to each loss (1e-4 is usual).
        soft_cap: Logits become ``soft_cap · tanh(logits / soft_cap)``; None leaves them. (Gemma 2's is 30.)
        tied: Whether w is an embedding table that is the head as well; it is taken as it lies.
        ignore_index: The label of tokens whose loss and gradients are zero.
        config: Block sizes and the like (`cross_entropy_pallas` lists them); None takes the preset for these shapes
            on this device, and a heuristic where there is none.
        dx_config: The same of the gradient of x (`cross_entropy_dx_pallas`).
        dw_config: The same of the gradient of w (`cross_entropy_dw_pallas`).
        interpret: Runs the kernels themselves anywhere, in Pallas' interpreter (`pltpu.InterpretParams()`).

    Returns:
        Losses, ``[..., tokens]`` float32; the softmax and all sums are float32.

    Raises:
        UsageError: Shapes or dtypes do not fit together, z_loss is negative, soft_cap not positive, or no block of
            that hidden length fits the VMEM (of a v4: gradients of more than 7168 in bfloat16, 3584 in float32).
    """
    if x.ndim < 2 or w.ndim != 2 or x.shape[-1] != w.shape[1 if tied else 0] or labels.shape != x.shape[:-1]:
        raise UsageError(
            f"cross_entropy of x {x.shape}, w {w.shape}, labels {labels.shape}: must be [..., tokens, hidden], "
            f"{'[vocab, hidden] (tied)' if tied else '[hidden, vocab]'} and [..., tokens]"
        )
    if x.dtype != w.dtype or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise UsageError(
            f"cross_entropy of {x.dtype}, {w.dtype} and labels {labels.dtype}: x and w must both be "
            f"{one_of(CrossEntropyProblem.dtypes)}, labels integers"
        )
    hidden, vocab = w.shape[::-1] if tied else w.shape
    options = {"z_loss": float(z_loss), "soft_cap": None if soft_cap is None else float(soft_cap), "tied": tied}
    problem = CrossEntropyProblem(tokens=labels.size, hidden=hidden, vocab=vocab, dtype=str(x.dtype), **options)
    configs = {"": config, "_dx": dx_config, "_dw": dw_config}

    def call(suffix: str, kernel: Any, reference: Any, *arrays: jax.Array) -> Any:
        """One of the three passes, with its config."""
        chosen = choose_config(
            f"cross_entropy{suffix}",
            problem,
            configs[suffix],
            lambda: heuristic_config(problem, suffix[1:] or "forward"),
        )
        kernel = functools.partial(kernel, **options, **chosen, interpret=interpret)
        return run(kernel, functools.partial(reference, **options), interpret, *arrays)

    def forward(x: jax.Array, w: jax.Array, labels: jax.Array):
        losses, lse = call("", cross_entropy_pallas, cross_entropy_reference, x, w, labels)
        return losses, (x, w, labels, lse)

    def backward(saved: tuple[jax.Array, ...], grad: jax.Array):
        dx = call("_dx", cross_entropy_dx_pallas, cross_entropy_dx_reference, *saved, grad)
        dw = call("_dw", cross_entropy_dw_pallas, cross_entropy_dw_reference, *saved, grad)
        return dx, dw, np.zeros(saved[2].shape, jax.dtypes.float0)

    @jax.custom_vjp
    def op(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
        return forward(x, w, labels)[0]

    op.defvjp(forward, backward)
    labels = jnp.where(labels == ignore_index, IGNORED, labels).astype(jnp.int32)
    return op(*varying_alike((x.reshape(-1, hidden), w, labels.reshape(-1)))).reshape(labels.shape)
