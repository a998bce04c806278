"""The matmul and the grouped one (megablox) that JAX ships: their blocks from presets.

Source: ``jax.experimental.pallas.ops.tpu.matmul`` and ``.megablox``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu import megablox
from jax.experimental.pallas.ops.tpu.matmul import matmul

from kernels.stock.lookups import found
from kernels.stock.problem import StockGmmProblem, StockMatmulProblem


def gmm_tiling(problem: StockGmmProblem, *, device_kind: str | None = None) -> tuple[int, int, int]:
    """The tuned ``tiling`` (tm, tk, tn) for `megablox.gmm`, from the presets of ``stock_gmm``.

    Args:
        device_kind: For which chip (``"TPU v6 lite"``); None is the one attached.
    """
    config = found("stock_gmm", problem, device_kind)
    return config["tm"], config["tk"], config["tn"]


def matmul_blocks(problem: StockMatmulProblem, *, device_kind: str | None = None) -> dict[str, Any]:
    """The tuned ``block_shape`` and ``block_k`` for `matmul`, from the presets of ``stock_matmul``."""
    config = found("stock_matmul", problem, device_kind)
    return {"block_shape": (config["block_m"], config["block_n"]), "block_k": config["block_k"]}


def grouped(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *, transpose_rhs: bool, config: Mapping[str, Any]
) -> jax.Array:
    """``[m, n]``: each row of ``lhs[m, k]`` times its group's matrix, in lhs' dtype; `sizes` are rows by group."""
    tiling = (config["tm"], config["tk"], config["tn"])
    return megablox.gmm(lhs, rhs, sizes, lhs.dtype, tiling, transpose_rhs=transpose_rhs)


def product(x: jax.Array, y: jax.Array, *, config: Mapping[str, Any]) -> jax.Array:
    """``x[m, k] @ y[k, n]`` in x's dtype."""
    return matmul(x, y, block_shape=(config["block_m"], config["block_n"]), block_k=config["block_k"])
