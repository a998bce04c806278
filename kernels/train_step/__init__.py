"""A sharded train step: model, mesh, remat and kernels as a config says. Importing this loads no jax."""

from __future__ import annotations

from kernels._exports import exported

__all__, __getattr__, __dir__ = exported(
    __name__,
    {
        "PROBLEMS": "problem",
        "Plan": "plans",
        "TrainProblem": "problem",
        "initial_state": "step",
        "loss_and_gradients": "step",
        "plan": "plans",
        "train_step": "step",
    },
)
