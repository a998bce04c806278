"""Kernels that move memory and hardly compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import pallas as pl

from autotune.accuracy.workloads._program import Program
from autotune.chips import Chip
from autotune.kernel import ArraySpec


def scale(row: Mapping[str, Any], chip: Chip) -> Program:
    """``2 x`` of an ``[m, n]`` array in blocks of ``[bm, bn]``, the grid walking rows of blocks."""
    shape, block = (row["m"], row["n"]), (row["bm"], row["bn"])

    def kernel(x_ref, out_ref) -> None:
        out_ref[...] = x_ref[...] * 2

    def function(x: jax.Array) -> jax.Array:
        blocks = pl.BlockSpec(block, lambda i, j: (i, j))
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(shape[0] // block[0], shape[1] // block[1]),
            in_specs=[blocks],
            out_specs=blocks,
            name="scale",
        )(x)

    return Program(function, (ArraySpec(shape, "bfloat16"),))
