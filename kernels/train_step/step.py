"""Loss, gradients and the whole optimizer step, for one device or a mesh of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autotune.outcome import Config
from kernels.train_step.layers import Layers
from kernels.train_step.loss import mean_loss
from kernels.train_step.mesh import BATCH, batch_sharding, make_mesh, parameter_shardings
from kernels.train_step.problem import TrainProblem
from kernels.train_step.transformer import hidden_states, initial_parameters, parameter_shapes

Tree = Any
LossAndGradients = Callable[[Tree, jax.Array], tuple[jax.Array, Tree]]

# What configs are held against: plain JAX, the whole batch at once, nothing computed again, no loop.
PLAIN: Config = {
    "attention": "xla",
    "norm": "xla",
    "mlp": "xla",
    "loss": "xla",
    "loss_chunk_mib": 0,
    "accumulate": 1,
    "scan_layers": False,
    "scan_group": 1,
}


def optimizer() -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) with float32 moments."""
    return optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)


def loss_and_gradients(
    problem: TrainProblem, config: Config | None = None, mesh: Mesh | None = None, *, interpret: Any = False
) -> LossAndGradients:
    """A function of the parameters' tree and the tokens, ``[batch, seq_len + 1]`` int32.

    It gives the mean loss (float32) and its gradients (float32, the parameters' tree).

    Args:
        config: None is `PLAIN`.
        mesh: What the config's axes are; None is one device.
        interpret: Passed to the Pallas kernels.
    """
    shape = problem.shape
    chosen = PLAIN if config is None else config
    words = {name: chosen[name] for name in ("attention", "norm", "mlp")}
    layers = Layers(problem.dtype, mesh, **words, interpret=interpret)

    def loss(parameters: Tree, tokens: jax.Array) -> jax.Array:
        hidden = hidden_states(parameters, tokens[:, :-1], shape, layers, chosen)
        w = parameters["embed" if shape.tied else "head"]
        return mean_loss(
            layers, hidden, w, tokens[:, 1:], tied=shape.tied, how=chosen["loss"], chunk_mib=chosen["loss_chunk_mib"]
        )

    def scattered(gradients: Tree) -> Tree:
        """As the parameters lie: each device adds up its own part."""
        if mesh is None:
            return gradients
        return jax.lax.with_sharding_constraint(gradients, parameter_shardings(gradients, mesh))

    def both(parameters: Tree, tokens: jax.Array) -> tuple[jax.Array, Tree]:
        value, gradients = jax.value_and_grad(loss)(parameters, tokens)
        return value, scattered(gradients)

    accumulate = chosen["accumulate"]
    return both if accumulate == 1 else _accumulated(both, accumulate, mesh)


def _accumulated(both: LossAndGradients, parts: int, mesh: Mesh | None) -> LossAndGradients:
    """`both` over `parts` equal micro-batches one after the other: the mean of losses and gradients.

    A micro-batch takes every parts-th sequence, so that no device's sequences move to another.
    """

    def function(parameters: Tree, tokens: jax.Array) -> tuple[jax.Array, Tree]:
        micro = jnp.moveaxis(tokens.reshape(-1, parts, tokens.shape[1]), 1, 0)
        if mesh is not None:
            micro = jax.lax.with_sharding_constraint(micro, NamedSharding(mesh, P(None, BATCH, None)))

        def step(sums: tuple[jax.Array, Tree], tokens: jax.Array) -> tuple[tuple[jax.Array, Tree], None]:
            return jax.tree.map(jnp.add, sums, both(parameters, tokens)), None

        zeros = jax.tree.map(jnp.zeros_like, parameters)
        if mesh is not None:
            zeros = jax.lax.with_sharding_constraint(zeros, parameter_shardings(zeros, mesh))
        sums, _ = jax.lax.scan(step, (jnp.zeros((), jnp.float32), zeros), micro)
        return jax.tree.map(lambda x: x / parts, sums)

    return function


def initial_state(problem: TrainProblem, seed: int = 0) -> dict[str, Tree]:
    """Parameters and the optimizer's state: what a train step takes and gives."""
    parameters = initial_parameters(problem.shape, seed)
    return {"parameters": parameters, "optimizer": optimizer().init(parameters)}


def train_step(
    problem: TrainProblem, config: Config | None, devices: Sequence[Any]
) -> tuple[Any, tuple[Tree, jax.ShapeDtypeStruct]]:
    """The jitted step ``(state, tokens) -> (state, loss)`` on a mesh of `devices`, and the shapes that it takes.

    The state is donated. `devices` may exist in a compiler only.

    Args:
        config: None is `PLAIN` in a loop over the layers (one after the other they would take minutes to compile),
            batch and parameters shared by as many devices as the batch divides over.
    """
    if config is None:
        config = {**PLAIN, **plain_axes(problem, len(devices)), "scan_layers": True}
    mesh = make_mesh(config, devices)
    gradients_of = loss_and_gradients(problem, config, mesh)

    def step(state: dict[str, Tree], tokens: jax.Array) -> tuple[dict[str, Tree], jax.Array]:
        loss, gradients = gradients_of(state["parameters"], tokens)
        updates, moments = optimizer().update(gradients, state["optimizer"], state["parameters"])
        return {"parameters": optax.apply_updates(state["parameters"], updates), "optimizer": moments}, loss

    parameters = parameter_shapes(problem.shape)
    state = {"parameters": parameters, "optimizer": jax.eval_shape(optimizer().init, parameters)}
    shardings = parameter_shardings(state, mesh)
    tokens = jax.ShapeDtypeStruct((problem.batch, problem.seq_len + 1), jnp.int32, sharding=batch_sharding(mesh))
    jitted = jax.jit(
        step,
        in_shardings=(shardings, tokens.sharding),
        out_shardings=(shardings, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    state = jax.tree.map(lambda x, lying: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lying), state, shardings)
    return jitted, (state, tokens)


def plain_axes(problem: TrainProblem, devices: int) -> dict[str, int]:
    """Axes of the plain step: fsdp over as many devices as share the batch evenly; the others have nothing to do."""
    fsdp = max(n for n in range(1, devices + 1) if devices % n == 0 and problem.batch % n == 0)
    return {"data": 1, "fsdp": fsdp, "tensor": 1, "sequence": 1}
