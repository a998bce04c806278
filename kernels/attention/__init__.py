"""Flash attention, forward and backward: ``from kernels.attention import attention``. Importing this loads no jax."""

from __future__ import annotations

from kernels._exports import exported

__all__, __getattr__, __dir__ = exported(
    __name__,
    {
        "AttentionProblem": "problem",
        "PROBLEMS": "problem",
        "attention": "api",
        "attention_reference": "reference",
    },
)
