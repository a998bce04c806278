"""What every kernel's public function shares: which config it takes, and where it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from autotune.chips import Chip, find_chip
from autotune.outcome import Config
from autotune.presets.sources import jit_context
from autotune.problem import Problem
from kernels import requests

T = TypeVar("T")
jit_context()  # before anything is traced


def choose_config(
    kernel: str, problem: Problem, config: Config | None, heuristic: Callable[[], Config], *, anywhere: bool = False
) -> Config:
    """The caller's config, or the preset for `problem` on the attached TPU, or the heuristic one.

    Args:
        anywhere: The kernel runs on other devices too: a preset that was measured on one holds there.
    """
    if config is not None:
        return config
    requests.note(kernel, problem)
    chip = _attached_device() if anywhere else attached_chip()
    if chip is None:
        return heuristic()  # Elsewhere only a caller who forces the kernel to run needs a config.
    from autotune import presets

    return presets.lookup(kernel, problem, device_kind=chip.device_kind)


def attached_chip() -> Chip | None:
    """The TPU that programs run on (in a `shard_map`, that of its mesh); None where it is another device."""
    device = _attached_device()
    return device if device is not None and device.platform == "tpu" else None


def _attached_device() -> Chip | None:
    """The TPU or other device that programs run on; None where nothing can be tuned for it.

    In a `shard_map` it is its mesh's, which may exist in a compiler only; else the default backend's.
    """
    mesh_device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return find_chip((mesh_device or jax.devices()[0]).device_kind)


def run(kernel: Callable[..., jax.Array], reference: Callable[..., jax.Array], interpret: Any, *args: jax.Array):
    """`kernel` where Mosaic exists, `reference` on any other platform; `interpret` forces the kernel.

    The choice is made when the program is lowered, so that one trace serves every platform.
    """
    if interpret:
        return kernel(*args)
    return jax.lax.platform_dependent(*args, tpu=kernel, default=reference)


def varying_alike(arrays: T) -> T:
    """A tree of arrays, each made to vary over all axes of a `shard_map` that any of them varies over.

    So a kernel's results do, and the gradient of an array that does not (a weight that all devices have) is summed.
    """
    every = frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in jax.tree.leaves(arrays)))

    def varying(array: jax.Array) -> jax.Array:
        missing = every - jax.typeof(array).manual_axis_type.varying
        return jax.lax.pcast(array, tuple(missing), to="varying") if missing else array

    return jax.tree.map(varying, arrays)
