"""The mesh of devices, and how parameters, batch and activations lie over it.

Axes: ``data`` and ``fsdp`` share the batch, and ``fsdp`` the parameters with it (they are gathered where they are used,
their gradients scattered); ``tensor`` shares heads, the MLP's columns and the vocabulary as Megatron-LM does (Shoeybi
et al., arXiv:1909.08053); ``sequence`` shares the length of the activations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autotune.errors import UsageError
from autotune.outcome import Config

AXES = ("data", "fsdp", "tensor", "sequence")
BATCH = ("data", "fsdp")

# Each parameter's dimensions by what they are. Those of a transformer's blocks have the layers before them.
DIMENSIONS: dict[str, tuple[str, ...]] = {
    "embed": ("vocab", "width"),
    "head": ("width", "vocab"),
    "final_norm": ("width",),
    "attention_norm": ("width",),
    "mlp_norm": ("width",),
    "wq": ("width", "heads"),
    "wk": ("width", "heads"),
    "wv": ("width", "heads"),
    "wo": ("heads", "width"),
    "w_gate": ("width", "mlp"),
    "w_up": ("width", "mlp"),
    "w_down": ("mlp", "width"),
    **dict.fromkeys(("stem", "conv1", "conv2", "conv3", "shortcut"), ("row", "column", "inputs", "width")),
    "classifier": ("width", "classes"),
}
TENSOR_DIMENSIONS = ("vocab", "heads", "mlp")


def make_mesh(config: Config, devices: Sequence[Any]) -> Mesh:
    """The mesh that `config` wants of as many of `devices`; an axis of which it says nothing is one.

    TPU devices are laid so that each axis runs along sides of the torus; others as they come.

    Raises:
        UsageError: There are fewer devices.
    """
    shape = tuple(config.get(axis, 1) for axis in AXES)
    if (wanted := math.prod(shape)) > len(devices):
        flag = f"--xla_force_host_platform_device_count={wanted}"
        raise UsageError(f"a mesh of {wanted} devices on {len(devices)}: for CPU devices, set XLA_FLAGS={flag}")
    used = list(devices)[: math.prod(shape)]
    if used[0].platform == "tpu" and len(used) > 1:
        array = mesh_utils.create_device_mesh(shape, devices=used, allow_split_physical_axes=True)
    else:
        array = np.array(used).reshape(shape)
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def parameter_spec(name: str, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """How the parameter `name` lies.

    `tensor` shares the dimension that it multiplies by columns or rows, `fsdp` the width, or where that does not divide
    another dimension that does. Norms are a vanishing part: all devices have them.

    Args:
        name: One of `DIMENSIONS`.
        shape: With the layers before it, where it is a block's.
        sizes: Of the mesh's axes.
    """
    dimensions = DIMENSIONS[name]
    stacked = len(shape) - len(dimensions)
    axes: list[tuple[str, ...]] = [()] * len(shape)
    if len(dimensions) == 1 or stacked < 0:  # A vector; or an optimizer's own, of another form than the parameter.
        return PartitionSpec(*[None] * len(shape))
    for place, what in enumerate(dimensions, stacked):
        if what in TENSOR_DIMENSIONS and sizes["tensor"] > 1 and shape[place] % sizes["tensor"] == 0:
            axes[place] = ("tensor",)
    for place in sorted(range(stacked, len(shape)), key=lambda place: dimensions[place - stacked] != "width"):
        shards = math.prod(sizes[axis] for axis in axes[place]) * sizes["fsdp"]
        if sizes["fsdp"] > 1 and shape[place] % shards == 0:
            axes[place] = (*axes[place], "fsdp")
            break
    return PartitionSpec(*(one or None for one in axes))


def without(spec: PartitionSpec, axis: str) -> PartitionSpec:
    """`spec` with all of what `axis` shares gathered."""

    def rest(entry: Any) -> Any:
        names = entry if isinstance(entry, tuple) else (entry,)
        return tuple(name for name in names if name not in (axis, None)) or None

    return PartitionSpec(*(rest(entry) for entry in spec))


def parameter_shardings(parameters: Any, mesh: Mesh) -> Any:
    """A `NamedSharding` for each leaf of a tree of parameters (or of shapes of them, or of their moments)."""

    def of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = next((key for key in map(key_name, reversed(path)) if key in DIMENSIONS), None)
        spec = PartitionSpec() if name is None else parameter_spec(name, leaf.shape, mesh.shape)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(of, parameters)


def key_name(key: Any) -> str:
    """The name in one step of a tree's path."""
    return str(getattr(key, "key", getattr(key, "name", key)))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of tokens, images and labels: all have the batch first."""
    return NamedSharding(mesh, PartitionSpec(BATCH))
