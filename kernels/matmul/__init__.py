"""Tiled matrix multiplication: ``from kernels.matmul import matmul``. Importing this loads no jax."""

from __future__ import annotations

from kernels._exports import exported

__all__, __getattr__, __dir__ = exported(
    __name__,
    {
        "MatmulProblem": "problem",
        "PROBLEMS": "problem",
        "matmul": "api",
        "matmul_reference": "reference",
    },
)
