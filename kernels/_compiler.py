"""What every Pallas kernel tells jax and the compiler: of its results, its grid and its VMEM."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

MIB = 1024**2


def compiler_params(*dimension_semantics: str, vmem_limit_mib: int | None) -> pltpu.CompilerParams:
    """What `pallas_call` takes as such.

    Args:
        dimension_semantics: ``parallel`` or ``arbitrary``, for each dimension of the grid.
        vmem_limit_mib: VMEM the compiler may use for the kernel, MiB; None is its default.
    """
    limit = vmem_limit_mib * MIB if vmem_limit_mib else None
    return pltpu.CompilerParams(dimension_semantics=dimension_semantics, vmem_limit_bytes=limit)


def output_like(shape: tuple[int, ...], dtype: Any, operand: jax.Array) -> jax.ShapeDtypeStruct:
    """A kernel's result, which varies over those axes of a `shard_map` that its operand varies over."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(operand).manual_axis_type)
