"""What a train step asks of a family of models, and which family a problem's model is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from autotune.outcome import Config
from kernels.train_step.models import ResNetShape, TransformerShape
from kernels.train_step.problem import TrainProblem

Tree = Any
Loss = Callable[[Tree, Tree], tuple[jax.Array, Tree]]
"""Of parameters and a batch: the mean loss (a float32 scalar), and what the batch's statistics are."""


class Family(Protocol):
    """Modules are families: `kernels.train_step.transformer`, `kernels.train_step.resnet`.

    Attributes:
        PLAIN: What configs are held against: plain JAX, the whole batch at once, nothing computed again, no loop.
        PLAIN_STEP: The same made fit to be compiled at full size.
    """

    PLAIN: Config
    PLAIN_STEP: Config

    def initial_parameters(self, shape: Any, seed: int) -> Tree:
        """Float32, as nested dicts; `kernels.train_step.mesh.DIMENSIONS` says how each lies."""

    def initial_statistics(self, shape: Any) -> Tree:
        """Running averages as training begins, of the form of what the loss gives; empty where there are none."""

    def batch_shapes(self, problem: TrainProblem) -> Tree:
        """`jax.ShapeDtypeStruct`s of what a step is given, the batch before all else."""

    def random_batch(self, problem: TrainProblem, seed: int) -> Tree:
        """Values for these."""

    def mean_loss_of(self, problem: TrainProblem, config: Config, mesh: Mesh | None, *, interpret: Any = False) -> Loss:
        """The loss as `config` says, on `mesh` (None is one device); `interpret` is passed to the Pallas kernels."""


def family_of(problem: TrainProblem) -> Family:
    """The family of the problem's model."""
    from kernels.train_step import resnet, transformer  # Here, as they import this module.

    families: dict[type, Family] = {TransformerShape: transformer, ResNetShape: resnet}
    return families[type(problem.shape)]


def parameter_shapes(problem: TrainProblem) -> Tree:
    """The initial parameters as `jax.ShapeDtypeStruct`s."""
    return jax.eval_shape(lambda: family_of(problem).initial_parameters(problem.shape, 0))
