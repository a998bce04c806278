"""Softmax cross-entropy of a large vocabulary: ``from kernels.cross_entropy import cross_entropy``. Loads no jax."""

from __future__ import annotations

from kernels._exports import exported

__all__, __getattr__, __dir__ = exported(
    __name__,
    {
        "CrossEntropyProblem": "problem",
        "PROBLEMS": "problem",
        "cross_entropy": "api",
        "cross_entropy_reference": "reference",
    },
)
