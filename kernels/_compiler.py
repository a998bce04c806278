"""What every Pallas kernel tells the compiler of its grid and its VMEM."""

from __future__ import annotations

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
