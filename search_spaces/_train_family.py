"""What the tuner asks of a family of models whose train step it tunes, and what their spaces share."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from autotune.chips import Chip
from autotune.outcome import Config
from autotune.space import Constraint, Param
from kernels.train_step.problem import TrainProblem
from kernels.train_step.remat import OFFLOAD, RECOMPUTE, SAVE

AXES = ("data", "fsdp", "tensor", "sequence")
# 32 was 6 % faster than the default on llama3-1b and took twice as long to compile, so that no ranking begins with it;
# 64 was hardly faster still, and took four times as long. Any other can be given.
SCOPED_VMEM_MIB = (32,)
KEPT = (RECOMPUTE, SAVE, OFFLOAD)
Division = tuple[str, Callable[[Config], bool]]


class Family(abc.ABC):
    """Transformers, resnets.

    Attributes:
        axes: Of `AXES`, those that its configs have; the others are one.
        sources: Modules whose text decides numerics or speed, besides what all families have.
        arithmetic: The module with its ``cost`` and ``estimate_ms``, as `Kernel` has them.
    """

    axes: ClassVar[tuple[str, ...]]
    sources: ClassVar[tuple[str, ...]]
    arithmetic: ClassVar[Any]

    @abc.abstractmethod
    def params(self, problem: TrainProblem, chip: Chip) -> list[Param]:
        """The mesh's axes and what else it has, besides `xla_params`."""

    def divisions(self, problem: TrainProblem) -> Iterator[Division]:
        """What of the model the axes must divide, with its text."""
        return iter(())

    def constraints(self, problem: TrainProblem) -> list[Constraint]:
        """What else must hold, besides what all families' configs must."""
        return []

    @abc.abstractmethod
    def heuristic(self, problem: TrainProblem, chip: Chip) -> dict[str, Any]:
        """The parameters' defaults together."""

    @abc.abstractmethod
    def small(self, problem: TrainProblem) -> dict[str, Any]:
        """A model of the same kind, small enough for a CPU to validate with, as fields of a problem."""

    @abc.abstractmethod
    def small_batch(self, config: Config) -> int:
        """How many examples it is validated on under `config`."""

    def refitted(self, problem: TrainProblem, config: Config) -> dict[str, Any]:
        """`config`, whose axes fit `problem`, with all else made to fit it too."""
        return dict(config)


def divisors(size: int, most: int) -> list[int]:
    """Of `size`, up to `most`."""
    return [n for n in range(1, min(size, most) + 1) if size % n == 0]


def dividing(problem: TrainProblem, *sizes: int) -> tuple[int, ...]:
    """Numbers of devices that divide all of these, and the devices."""
    return tuple(n for n in divisors(problem.devices, problem.devices) if all(size % n == 0 for size in sizes))


def left_after(problem: TrainProblem, others: Sequence[str]) -> Callable[[Config], int]:
    """An axis' default: the devices that the axes `others` leave, as far as the batch divides over them."""

    def default(config: Config) -> int:
        left = problem.devices // max(1, math.prod(config[name] for name in others))
        return max(n for n in dividing(problem, problem.batch) if left % n == 0)

    return default


def remat_params(named: dict[str, str], inputs: str, defaults: Config) -> list[Param]:
    """What becomes of each activation, whose names come with what they are; `inputs` says what a block begins with."""
    return [
        Param("remat_block_input", (SAVE, OFFLOAD), f"where {inputs} is kept", defaults["remat_block_input"]),
        *(
            Param(f"remat_{name}", KEPT, f"what becomes of {what}", defaults[f"remat_{name}"])
            for name, what in named.items()
        ),
    ]


def xla_params(chip: Chip) -> list[Param]:
    """Of XLA's options those that all families have."""
    vmem = tuple(size for size in SCOPED_VMEM_MIB if size * 2**20 < chip.vmem_bytes)
    return [
        Param("scoped_vmem_mib", (0, *vmem), "VMEM that one fusion may use; 0 is the compiler's default", 0),
        Param("async_collectives", (True, False), "whether collectives run beside compute", True),
    ]
