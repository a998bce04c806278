"""The norms for training code."""

from __future__ import annotations

import functools
from typing import Any

import jax

from autotune.errors import UsageError
from autotune.outcome import Config
from kernels._dispatch import choose_config, run, varying_alike
from kernels.norm.cost import heuristic_config
from kernels.norm.pallas import norm_backward_pallas, norm_pallas
from kernels.norm.problem import Kind, NormProblem
from kernels.norm.reference import norm_backward_reference, norm_reference


def rmsnorm(
    x: jax.Array,
    weight: jax.Array,
    *,
    eps: float = 1e-6,
    residual: jax.Array | None = None,
    config: Config | None = None,
    backward_config: Config | None = None,
    interpret: Any = False,
) -> Any:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last axis, by the tuned kernel on a TPU, by XLA elsewhere.

    Differentiable: the gradients are a tuned kernel's, too.

    Args:
        x: ``[..., d]``, bfloat16 or float32.
        weight: ``[d]``, bfloat16 or float32 (models that store weight - 1 add the 1 first).
        eps: Added to the mean square.
        residual: Of x's shape and dtype: added to x before the norm. The norm is that of the sum before it is rounded.
        config: Block sizes and the like (`norm_pallas` lists them); None takes the preset for these shapes on this
            device, and a heuristic where there is none.
        backward_config: The same of the gradients (`norm_backward_pallas` lists them).
        interpret: Runs the kernels themselves anywhere, in Pallas' interpreter (`pltpu.InterpretParams()`).

    Returns:
        The normed rows, ``[..., d]`` in x's dtype; with a residual, these and ``x + residual``. Statistics, and
        the weight's gradient until it is complete, are float32.

    Raises:
        UsageError: Shapes or dtypes do not fit together.
    """
    return _norm("rmsnorm", x, (weight,), eps, residual, config, backward_config, interpret)


def layernorm(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    *,
    eps: float = 1e-6,
    residual: jax.Array | None = None,
    config: Config | None = None,
    backward_config: Config | None = None,
    interpret: Any = False,
) -> Any:
    """``(x - mean(x)) / sqrt(var(x) + eps) · weight + bias`` over the last axis: see `rmsnorm`, also for the rest.

    Args:
        x: ``[..., d]``, bfloat16 or float32.
        weight: ``[d]``, bfloat16 or float32.
        bias: As weight.
        eps: Added to the variance.
        residual: As `rmsnorm`'s.
        config: As `rmsnorm`'s.
        backward_config: As `rmsnorm`'s.
        interpret: As `rmsnorm`'s.
    """
    return _norm("layernorm", x, (weight, bias), eps, residual, config, backward_config, interpret)


def _norm(
    kind: Kind,
    x: jax.Array,
    params: tuple[jax.Array, ...],
    eps: float,
    residual: jax.Array | None,
    config: Config | None,
    backward_config: Config | None,
    interpret: Any,
) -> Any:
    if x.ndim < 1 or any(param.shape != x.shape[-1:] for param in params):
        shapes = ", ".join(str(param.shape) for param in params)
        raise UsageError(f"{kind} of {x.shape} with {shapes}: must be [..., d] with [d]")
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise UsageError(
            f"{kind} of {x.dtype} {x.shape} with residual {residual.dtype} {residual.shape}: must be the same"
        )
    d = x.shape[-1]
    problem = NormProblem(rows=x.size // d, d=d, dtype=str(x.dtype), residual=residual is not None)
    chosen = choose_config(kind, problem, config, lambda: heuristic_config(problem, kind, backward=False))
    kernel = functools.partial(norm_pallas, kind=kind, eps=eps, **chosen, interpret=interpret)
    reference = functools.partial(norm_reference, kind=kind, eps=eps)

    @jax.custom_vjp
    def op(x: jax.Array, params: tuple[jax.Array, ...], residual: jax.Array | None) -> tuple[jax.Array, ...]:
        return run(kernel, reference, interpret, x, params, residual)

    def forward(x: jax.Array, params: tuple[jax.Array, ...], residual: jax.Array | None):
        results = op(x, params, residual)
        return results, (x if residual is None else results[1], params)

    def backward(saved: tuple[jax.Array, tuple[jax.Array, ...]], grads: tuple[jax.Array, ...]):
        chosen = choose_config(
            f"{kind}_bwd", problem, backward_config, lambda: heuristic_config(problem, kind, backward=True)
        )
        kernel = functools.partial(norm_backward_pallas, kind=kind, eps=eps, **chosen, interpret=interpret)
        reference = functools.partial(norm_backward_reference, kind=kind, eps=eps)
        dx, *dparams = run(kernel, reference, interpret, *saved, grads)
        return dx, tuple(dparams), dx if problem.residual else None

    op.defvjp(forward, backward)
    rows = [array if array is None else array.reshape(-1, d) for array in (x, residual)]
    normed, *total = (result.reshape(x.shape) for result in op(*varying_alike((rows[0], params, rows[1]))))
    return (normed, *total) if total else normed
