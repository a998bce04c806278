"""Matmul of rows sorted by group (mixtures of experts): ``from kernels.grouped_matmul import grouped_matmul``.

Importing this loads no jax.
"""

from __future__ import annotations

from kernels._exports import exported

__all__, __getattr__, __dir__ = exported(
    __name__,
    {
        "GroupedMatmulProblem": "problem",
        "GroupedProblem": "problem",
        "PROBLEMS": "problem",
        "grouped_matmul": "api",
        "grouped_matmul_drhs_reference": "reference",
        "grouped_matmul_reference": "reference",
    },
)
