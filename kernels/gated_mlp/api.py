"""The gated MLP for training code."""

from __future__ import annotations

import functools
from typing import Any

import jax

from autotune.errors import UsageError, one_of
from autotune.outcome import Config
from kernels._dispatch import choose_config, run
from kernels.gated_mlp.cost import heuristic_config
from kernels.gated_mlp.pallas import gated_mlp_pallas
from kernels.gated_mlp.problem import GatedMlpProblem
from kernels.gated_mlp.reference import gated_mlp_gradients, gated_mlp_reference


def gated_mlp(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    *,
    activation: str = "silu",
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """``act(x @ w_gate) * (x @ w_up)`` by the tuned kernel on a TPU, by XLA elsewhere.

    Differentiable: the backward pass computes gate and up again, and its products are XLA's.

    Args:
        x: ``[..., m, k]``, bfloat16 or float32; leading dimensions are folded into m.
        w_gate: ``[k, n]``, of x's dtype.
        w_up: As w_gate.
        activation: ``silu`` (SwiGLU) or ``gelu`` (GeGLU, the tanh approximation).
        config: Block sizes and the like (`gated_mlp_pallas` lists them); None takes the preset for these
            shapes on this device, and a heuristic where there is none.
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
    chosen = dict(choose_config("gated_mlp", problem, config, lambda: heuristic_config(problem)))
    kernel = functools.partial(gated_mlp_pallas, activation=activation, **chosen, interpret=interpret)
    reference = functools.partial(gated_mlp_reference, activation=activation)

    @jax.custom_vjp
    def op(x: jax.Array, w_gate: jax.Array, w_up: jax.Array) -> jax.Array:
        return run(kernel, reference, interpret, x, w_gate, w_up)

    op.defvjp(
        lambda *arrays: (op(*arrays), arrays),
        lambda arrays, grad: gated_mlp_gradients(*arrays, grad, activation=activation),
    )
    return op(rows, w_gate, w_up).reshape(*x.shape[:-1], n)
