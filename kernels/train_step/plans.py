"""A config of the train step as objects that plug into `jax.jit`, Flax NNX and `jax.checkpoint`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels.train_step.mesh import batch_sharding, make_mesh, parameter_shardings
from kernels.train_step.problem import TrainProblem
from kernels.train_step.remat import policy


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to train one problem on these devices.

    Attributes:
        problem: The model, its batch and the topology.
        config: What was tuned.
        mesh: Of the devices, with the axes data, fsdp, tensor and sequence.
    """

    problem: TrainProblem
    config: Mapping[str, Any]
    mesh: Mesh

    def shardings(self, tree: Any) -> Any:
        """A `NamedSharding` for each leaf of a tree of parameters, optimizer state or gradients.

        Leaves are known by the names in `kernels.train_step.mesh.DIMENSIONS`; what has none of them is replicated.
        """
        return parameter_shardings(tree, self.mesh)

    def specs(self, tree: Any) -> Any:
        """The same as `PartitionSpec`s: what `nnx.with_partitioning` and `jax.shard_map` take."""
        return jax.tree.map(lambda sharding: sharding.spec, self.shardings(tree), is_leaf=_is_sharding)

    @property
    def batch(self) -> NamedSharding:
        """Of what a step is given besides its state: tokens, or images and their classes."""
        return batch_sharding(self.mesh)

    @property
    def replicated(self) -> NamedSharding:
        """Of what every device has."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def checkpoint_policy(self) -> Callable[..., Any]:
        """What `jax.checkpoint` and `nnx.remat` take as ``policy``, for activations of the config's names."""
        return policy(self.config)


def plan(
    problem: TrainProblem, config: Mapping[str, Any] | None = None, devices: Sequence[jax.Device] | None = None
) -> Plan:
    """The plan that a config says, or where none is given the preset for `problem` on these devices.

    Args:
        problem: Its topology has as many devices as are used.
        config: As `presets.lookup("train_step", …)` gives it.
        devices: None for all of the process's.

    Raises:
        UsageError: The problem has no valid config.
    """
    devices = jax.devices() if devices is None else devices
    if config is None:
        from autotune import presets

        config = presets.lookup("train_step", problem, device_kind=devices[0].device_kind)
    return Plan(problem, dict(config), make_mesh(config, devices))


def _is_sharding(one: Any) -> bool:
    return isinstance(one, NamedSharding)
