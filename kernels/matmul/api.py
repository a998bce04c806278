"""The matmul for training code."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from autotune.errors import UsageError, one_of
from autotune.outcome import Config
from kernels._activations import ACTIVATIONS
from kernels._dispatch import choose_config, run, varying_alike
from kernels.matmul.cost import heuristic_config
from kernels.matmul.pallas import matmul_pallas
from kernels.matmul.problem import RESULTS, MatmulProblem
from kernels.matmul.reference import matmul_reference


def matmul(
    x: jax.Array,
    y: jax.Array,
    bias: jax.Array | None = None,
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    activation: str = "none",
    config: Config | None = None,
    dx_config: Config | None = None,
    dy_config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """``act(x @ y + bias)`` by the tuned kernel on a TPU, by XLA elsewhere. An operand may be stored transposed.

    Differentiable in bfloat16 and float32: the gradients of x and y are the same kernel's products of the result's
    gradient with the other operand as it is stored, each with the preset of its own shapes. Where an activation is
    differentiated, XLA applies it to the kernel's ``x @ y + bias``, kept in x's dtype for its slope.

    Args:
        x: ``[..., m, k]``: bfloat16, float32, int8, float8_e4m3fn or float8_e5m2; leading dimensions are folded
            into m. With `transpose_lhs`: ``[k, m]``.
        y: ``[k, n]``, or ``[n, k]`` with `transpose_rhs`, of x's dtype.
        bias: ``[n]`` in the result's dtype, or None.
        transpose_lhs: x is stored ``[k, m]``.
        transpose_rhs: y is stored ``[n, k]``.
        activation: ``none``, ``relu``, ``gelu`` (the tanh approximation) or ``silu``.
        config: Block sizes and the like (`matmul_pallas` lists them); None takes the preset for these
            shapes on this device, and a heuristic where there is none.
        dx_config: The same for the gradient of x, a matmul of its own shapes.
        dy_config: The same for the gradient of y.
        interpret: Runs the kernel itself anywhere, in Pallas' interpreter (`pltpu.InterpretParams()`).

    Returns:
        ``[..., m, n]`` in x's dtype; int32 for int8 operands, bfloat16 for float8 ones. Sums (but int8's), bias and
        activation are float32.

    Raises:
        UsageError: Shapes or dtypes do not fit together, or the device does not multiply that dtype.
    """
    if (x.ndim != 2 if transpose_lhs else x.ndim < 2) or y.ndim != 2:
        raise UsageError(f"matmul of {x.shape} with {y.shape}: must be {_layouts(transpose_lhs, transpose_rhs)}")
    rows = x.reshape(-1, x.shape[-1])
    options = {"transpose_lhs": transpose_lhs, "transpose_rhs": transpose_rhs}
    multiply = functools.partial(product, config=config, interpret=interpret, **options)

    @jax.custom_vjp
    def op(x: jax.Array, y: jax.Array, bias: jax.Array | None) -> jax.Array:
        return multiply(x, y, bias, activation=activation)

    def forward(x: jax.Array, y: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, tuple]:
        if str(x.dtype) in RESULTS:
            raise UsageError(f"matmul of {x.dtype} has no gradient: must be bfloat16 or float32 where it is needed")
        if activation == "none":
            return op(x, y, bias), (x, y, bias, None)
        before = multiply(x, y, bias)
        return ACTIVATIONS[activation](before.astype(jnp.float32)).astype(before.dtype), (x, y, bias, before)

    def backward(saved: tuple, grad: jax.Array) -> tuple[jax.Array | None, ...]:
        x, y, bias, before = saved
        if before is not None:
            _, slope = jax.vjp(ACTIVATIONS[activation], before.astype(jnp.float32))
            grad = slope(grad.astype(jnp.float32))[0].astype(grad.dtype)
        dx, dy = gradients(
            x, y, grad, **options, dx_config=dx_config, dy_config=dy_config, interpret=interpret
        )  # fmt: skip
        return dx, dy, None if bias is None else grad.astype(jnp.float32).sum(0).astype(bias.dtype)

    op.defvjp(forward, backward)
    result = op(*varying_alike((rows, y, bias)))
    return result if transpose_lhs else result.reshape(*x.shape[:-1], result.shape[1])


def product(
    x: jax.Array,
    y: jax.Array,
    bias: jax.Array | None = None,
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    activation: str = "none",
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """One run of the kernel, or of XLA's: `matmul` of two dimensions and without gradients."""
    (m, k), (deep, n) = x.shape[:: -1 if transpose_lhs else 1], y.shape[:: -1 if transpose_rhs else 1]
    if k != deep:
        raise UsageError(f"matmul of {x.shape} with {y.shape}: must be {_layouts(transpose_lhs, transpose_rhs)}")
    if x.dtype != y.dtype:
        raise UsageError(f"matmul of {x.dtype} with {y.dtype}: must be both {one_of(MatmulProblem.dtypes)}")
    if transpose_rhs and n == 1:  # A row and a column lie alike, and a problem has but the column.
        y, transpose_rhs = y.reshape(k, 1), False
    options = {"transpose_lhs": transpose_lhs, "transpose_rhs": transpose_rhs, "activation": activation}
    problem = MatmulProblem(m=m, n=n, k=k, dtype=str(x.dtype), bias=bias is not None, **options)
    if bias is not None and (bias.shape, str(bias.dtype)) != ((n,), problem.result_dtype):
        raise UsageError(f"a bias of {bias.dtype}{list(bias.shape)}: must be {problem.result_dtype}[{n}]")
    chosen = choose_config("matmul", problem, config, lambda: heuristic_config(problem))
    kernel = functools.partial(matmul_pallas, **options, **chosen, interpret=interpret)
    arrays = (x, y) if bias is None else (x, y, bias)
    return run(kernel, functools.partial(matmul_reference, **options), interpret, *arrays)


def gradients(
    x: jax.Array,
    y: jax.Array,
    grad: jax.Array,
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    dx_config: Config | None = None,
    dy_config: Config | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The gradients of x and y, in the layouts of these, for the product's gradient ``grad[m, n]``."""
    by_x = functools.partial(product, config=dx_config, interpret=interpret)
    by_y = functools.partial(product, config=dy_config, interpret=interpret)
    return (
        by_x(y, grad, transpose_lhs=transpose_rhs, transpose_rhs=True)
        if transpose_lhs
        else by_x(grad, y, transpose_rhs=not transpose_rhs),
        by_y(grad, x, transpose_lhs=True, transpose_rhs=transpose_lhs)
        if transpose_rhs
        else by_y(x, grad, transpose_lhs=not transpose_lhs),
    )


def _layouts(transpose_lhs: bool, transpose_rhs: bool) -> str:
    return f"{'[k, m]' if transpose_lhs else '[..., m, k]'} with {'[n, k]' if transpose_rhs else '[k, n]'}"
