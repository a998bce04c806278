"""RMSNorm and LayerNorm, forward and backward: ``from kernels.norm import rmsnorm``. Importing this loads no jax."""

from __future__ import annotations

from kernels._exports import exported

__all__, __getattr__, __dir__ = exported(
    __name__,
    {
        "NormProblem": "problem",
        "LAYERNORM_PROBLEMS": "problem",
        "layernorm": "api",
        "RMSNORM_PROBLEMS": "problem",
        "norm_reference": "reference",
        "rmsnorm": "api",
    },
)
