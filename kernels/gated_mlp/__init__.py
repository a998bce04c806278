"""Gate and up of an MLP (SwiGLU, GeGLU): ``from kernels.gated_mlp import gated_mlp``. Importing this loads no jax."""

from __future__ import annotations

from kernels._exports import exported

__all__, __getattr__, __dir__ = exported(
    __name__,
    {
        "GatedMlpProblem": "problem",
        "PROBLEMS": "problem",
        "gated_mlp": "api",
        "gated_mlp_reference": "reference",
    },
)
