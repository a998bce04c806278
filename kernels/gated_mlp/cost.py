"""What a gated MLP and its gradients cost: matmuls with more operands, sums and tiles. Loads no jax."""

from __future__ import annotations

from typing import Any

from kernels._tpu_model import LANES
from kernels.matmul.cost import Form, largest_divisor
from kernels.matmul.problem import TiledProblem

FORWARD = Form(rights=2, sums=2)
BACKWARD = Form(rights=2, sums=2, tiles=3)  # the gradient in, those of gate and up out
DX = Form(lefts=2, rights=2)


def heuristic_config(problem: TiledProblem, form: Form = FORWARD) -> dict[str, Any]:
    """A good start on every chip: tiles that fit the smallest default VMEM limit (16 MiB)."""
    wide = 1024 if problem.dtype == "bfloat16" and form.tiles == 1 else 512
    return {
        "block_m": largest_divisor(problem.m, problem.row_tile, wide),
        "block_n": largest_divisor(problem.n, LANES, 512 if problem.dtype == "bfloat16" or form.tiles == 1 else 256),
        "block_k": largest_divisor(problem.k, LANES, 512),
    }
