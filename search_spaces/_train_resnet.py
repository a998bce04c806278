"""The train step's search space for resnets.

It has no micro-batches: statistics of a part of the batch are others than the whole's, and so would the gradients be.
"""

from __future__ import annotations

from typing import Any, ClassVar

from autotune.chips import Chip
from autotune.outcome import Config
from autotune.space import Param
from kernels.train_step import resnet_cost as model
from kernels.train_step.problem import TrainProblem
from search_spaces._train_family import Family, dividing, left_after, remat_params

NAMED = {
    "conv1": "the first 1x1 convolutions' results",
    "conv2": "the 3x3 convolutions' results",
    "conv3": "the last 1x1 convolutions' results, and the shortcuts'",
    "normed": "the first two results, normalized and activated",
}


class ResNetFamily(Family):
    """With BatchNorm: see `kernels.train_step.resnet`."""

    axes: ClassVar[tuple[str, ...]] = ("data", "fsdp")
    arithmetic: ClassVar[Any] = model
    sources: ClassVar[tuple[str, ...]] = ("kernels.train_step.resnet", "kernels._precision")

    def params(self, problem: TrainProblem, chip: Chip) -> list[Param]:
        shares = dividing(problem, problem.batch)
        return [
            Param("fsdp", shares, "devices that share batch and parameters", 1),
            Param("data", shares, "devices that share the batch", left_after(problem, ("fsdp",))),
            *remat_params(NAMED, "the input of each block", model.default_policy(problem, chip)),
        ]

    def heuristic(self, problem: TrainProblem, chip: Chip) -> dict[str, Any]:
        return {
            "data": problem.devices,
            "fsdp": 1,
            **model.default_policy(problem, chip),
            "scoped_vmem_mib": 0,
            "async_collectives": True,
        }

    def small(self, problem: TrainProblem) -> dict[str, Any]:
        return {"model": "resnet-tiny", "image": 32}

    def small_batch(self, config: Config) -> int:
        """As many images on whatever mesh: of fewer, batch statistics make more of rounding."""
        return 16
