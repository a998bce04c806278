"""The gated MLP for training code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from autotune.errors import UsageError, one_of
from autotune.outcome import Config
from kernels._dispatch import choose_config, run, varying_alike
from kernels.gated_mlp.cost import BACKWARD, DX, FORWARD, heuristic_config
from kernels.gated_mlp.pallas import gated_mlp_bwd_pallas, gated_mlp_dx_pallas, gated_mlp_pallas
from kernels.gated_mlp.problem import GatedMlpDxProblem, GatedMlpProblem
from kernels.gated_mlp.reference import gated_mlp_bwd_reference, gated_mlp_dx_reference, gated_mlp_reference
from kernels.matmul.api import product
from kernels.matmul.cost import Form
from kernels.matmul.problem import TiledProblem


def gated_mlp(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    *,
    activation: str = "silu",
    config: Config | None = None,
    bwd_config: Config | None = None,
    dx_config: Config | None = None,
    dw_config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """``act(x @ w_gate) * (x @ w_up)`` by the tuned kernel on a TPU, by XLA elsewhere.

    Differentiable, by kernels too: one computes gate and up again and their gradients from them, one the gradient
    of x from these, and the matmul's multiplies them by x as it is stored.

    Args:
        x: ``[..., m, k]``, bfloat16 or float32; leading dimensions are folded into m.
        w_gate: ``[k, n]``, of x's dtype.
        w_up: As w_gate.
        activation: ``silu`` (SwiGLU) or ``gelu`` (GeGLU, the tanh approximation).
        config: Block sizes and the like (`gated_mlp_pallas` lists them); None takes the preset for these
            shapes on this device, and a heuristic where there is none.
        bwd_config: The same for the gradients of gate and up, tuned as ``gated_mlp_bwd``.
        dx_config: The same for the gradient of x, tuned as ``gated_mlp_dx``.
        dw_config: The same for those of the weights, tuned as ``matmul``.
        interpret: Runs the kernel itself anywhere, in Pallas' interpreter (`pltpu.InterpretParams()`).

    Returns:
        ``[..., m, n]`` in x's dtype; sums, activation and product are float32.

    Raises:
        UsageError: Shapes or dtypes do not fit together, or the activation is unknown.
    """
    if x.ndim < 2 or w_gate.ndim != 2 or w_gate.shape != w_up.shape or x.shape[-1] != w_gate.shape[0]:
        raise UsageError(
            f"gated_mlp of x {x.shape}, w_gate {w_gate.shape}, w_up {w_up.shape}: must be [..., m, k] and twice [k, n]"
        )
    if not x.dtype == w_gate.dtype == w_up.dtype:
        dtypes = f"{x.dtype}, {w_gate.dtype}, {w_up.dtype}"
        raise UsageError(f"gated_mlp of {dtypes}: must all be {one_of(GatedMlpProblem.dtypes)}")
    rows = x.reshape(-1, x.shape[-1])
    (m, k), n = rows.shape, w_gate.shape[1]
    problem = GatedMlpProblem(m=m, n=n, k=k, dtype=str(x.dtype), activation=activation)

    def activated(function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(function, activation=activation)

    dx_problem = GatedMlpDxProblem(m=m, n=k, k=n, dtype=problem.dtype)

    def kernel(function: Callable[..., Any], name: str, problem: TiledProblem, form: Form, given: Config | None):
        chosen = choose_config(name, problem, given, lambda: heuristic_config(problem, form))
        return functools.partial(function, **chosen, interpret=interpret)

    @jax.custom_vjp
    def op(x: jax.Array, w_gate: jax.Array, w_up: jax.Array) -> jax.Array:
        forward = kernel(activated(gated_mlp_pallas), "gated_mlp", problem, FORWARD, config)
        return run(forward, activated(gated_mlp_reference), interpret, x, w_gate, w_up)

    def backward(arrays: tuple[jax.Array, ...], grad: jax.Array) -> tuple[jax.Array, ...]:
        x, *weights = arrays
        bwd = kernel(activated(gated_mlp_bwd_pallas), "gated_mlp_bwd", problem, BACKWARD, bwd_config)
        dx = kernel(gated_mlp_dx_pallas, "gated_mlp_dx", dx_problem, DX, dx_config)
        by_both = run(bwd, activated(gated_mlp_bwd_reference), interpret, *arrays, grad)
        return (
            run(dx, gated_mlp_dx_reference, interpret, *by_both, *weights),
            *(product(x, by_one, transpose_lhs=True, config=dw_config, interpret=interpret) for by_one in by_both),
        )

    op.defvjp(lambda *arrays: (op(*arrays), arrays), backward)
    return op(*varying_alike((rows, w_gate, w_up))).reshape(*x.shape[:-1], n)
