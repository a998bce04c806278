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
from kernels.train_step.families import Tree, family_of
from kernels.train_step.mesh import BATCH, batch_sharding, make_mesh, parameter_shardings
from kernels.train_step.problem import TrainProblem

LossAndGradients = Callable[[Tree, Tree], tuple[jax.Array, Tree, Tree]]
MOMENTUM = 0.9  # of the running averages of a batch's statistics


def optimizer() -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) with float32 moments."""
    return optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)


def loss_and_gradients(
    problem: TrainProblem, config: Config | None = None, mesh: Mesh | None = None, *, interpret: Any = False
) -> LossAndGradients:
    """A function of the parameters' tree and a batch (`Family.batch_shapes`).

    It gives the mean loss (float32), its gradients (float32, the parameters' tree) and the batch's statistics (float32,
    the tree of `Family.initial_statistics`), of which there is no gradient.

    Args:
        config: None is the family's `PLAIN`.
        mesh: What the config's axes are; None is one device.
        interpret: Passed to the Pallas kernels.
    """
    family = family_of(problem)
    chosen = family.PLAIN if config is None else config
    loss = family.mean_loss_of(problem, chosen, mesh, interpret=interpret)

    def scattered(gradients: Tree) -> Tree:
        """As the parameters lie: each device adds up its own part."""
        if mesh is None:
            return gradients
        return jax.lax.with_sharding_constraint(gradients, parameter_shardings(gradients, mesh))

    def both(parameters: Tree, batch: Tree) -> tuple[jax.Array, Tree, Tree]:
        (value, observed), gradients = jax.value_and_grad(loss, has_aux=True)(parameters, batch)
        return value, scattered(gradients), observed

    # Not of a model with batch statistics: those of a part of the batch are others, and so would the numbers be.
    accumulate = chosen.get("accumulate", 1)
    return both if accumulate == 1 else _accumulated(both, accumulate, mesh)


def _accumulated(both: LossAndGradients, parts: int, mesh: Mesh | None) -> LossAndGradients:
    """`both` over `parts` equal micro-batches one after the other: the mean of losses and gradients.

    A micro-batch takes every parts-th sequence, so that no device's sequences move to another.
    """

    def function(parameters: Tree, tokens: jax.Array) -> tuple[jax.Array, Tree, Tree]:
        micro = jnp.moveaxis(tokens.reshape(-1, parts, tokens.shape[1]), 1, 0)
        if mesh is not None:
            micro = jax.lax.with_sharding_constraint(micro, NamedSharding(mesh, P(None, BATCH, None)))

        def step(sums: tuple[jax.Array, Tree], tokens: jax.Array) -> tuple[tuple[jax.Array, Tree], None]:
            return jax.tree.map(jnp.add, sums, both(parameters, tokens)[:2]), None

        zeros = jax.tree.map(jnp.zeros_like, parameters)
        if mesh is not None:
            zeros = jax.lax.with_sharding_constraint(zeros, parameter_shardings(zeros, mesh))
        sums, _ = jax.lax.scan(step, (jnp.zeros((), jnp.float32), zeros), micro)
        return *jax.tree.map(lambda x: x / parts, sums), {}

    return function


def initial_state(problem: TrainProblem, seed: int = 0) -> dict[str, Tree]:
    """What a train step takes and gives: parameters, the optimizer's state, running averages of batch statistics."""
    family = family_of(problem)
    parameters = family.initial_parameters(problem.shape, seed)
    statistics = family.initial_statistics(problem.shape)
    return {"parameters": parameters, "optimizer": optimizer().init(parameters), "statistics": statistics}


def train_step(problem: TrainProblem, config: Config | None, devices: Sequence[Any]) -> tuple[Any, tuple[Tree, Tree]]:
    """The jitted step ``(state, batch) -> (state, loss)`` on a mesh of `devices`, and the shapes that it takes.

    The state is donated. `devices` may exist in a compiler only.

    Args:
        config: None is the family's `PLAIN_STEP`, batch and parameters shared by as many devices as the batch divides
            over.
    """
    family = family_of(problem)
    if config is None:
        config = {**family.PLAIN_STEP, **plain_axes(problem, len(devices))}
    mesh = make_mesh(config, devices)
    gradients_of = loss_and_gradients(problem, config, mesh)

    def step(state: dict[str, Tree], batch: Tree) -> tuple[dict[str, Tree], jax.Array]:
        loss, gradients, observed = gradients_of(state["parameters"], batch)
        updates, moments = optimizer().update(gradients, state["optimizer"], state["parameters"])
        parameters = optax.apply_updates(state["parameters"], updates)
        return {"parameters": parameters, "optimizer": moments, "statistics": _averaged(state, observed)}, loss

    state = jax.eval_shape(lambda: initial_state(problem))
    shardings, lying = parameter_shardings(state, mesh), batch_sharding(mesh)
    jitted = jax.jit(
        step,
        in_shardings=(shardings, lying),
        out_shardings=(shardings, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lying), family.batch_shapes(problem))
    state = jax.tree.map(lambda x, lying: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lying), state, shardings)
    return jitted, (state, batch)


def _averaged(state: dict[str, Tree], observed: Tree) -> Tree:
    """The running averages, with the batch's own statistics in them."""
    return jax.tree.map(lambda old, new: MOMENTUM * old + (1 - MOMENTUM) * new, state["statistics"], observed)


def plain_axes(problem: TrainProblem, devices: int) -> dict[str, int]:
    """Axes of the plain step: fsdp over as many devices as share the batch evenly; the others have nothing to do."""
    fsdp = max(n for n in range(1, devices + 1) if devices % n == 0 and problem.batch % n == 0)
    return {"data": 1, "fsdp": fsdp}
