"""What an instance of the train step is: a model, a batch and the devices it is spread over. Loads no jax."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from autotune.chips import CHIPS, Links
from autotune.errors import UsageError, one_of
from autotune.problem import Problem
from kernels.train_step.models import MODELS

CPU = "cpu"
# What says how large one example is, with its usual value: a model takes one of them (its shape's `size_field`).
SIZES = {"seq_len": 4096, "image": 224}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainProblem(Problem):
    """One optimizer step of `model` on `batch` examples: sequences of tokens for a transformer, images for a resnet.

    Attributes:
        model: One of `MODELS`.
        batch: Examples of one step, over all devices.
        seq_len: Tokens of a sequence that are predicted; its text is one longer. None for a resnet.
        image: Side of an image, 224 where nothing is said. None for a transformer.
        topology: ``v5e:4x4``, ``v5p:2x2x1``, ``v7x:2x2x1``: chip and torus; ``cpu:8``: so many CPU devices.
        dtype: What is computed in; parameters and optimizer are float32.
    """

    model: str
    batch: int
    seq_len: int | None = None
    image: int | None = None
    topology: str = "v5e:2x2"
    dtype: str = "bfloat16"

    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float32")

    def __post_init__(self) -> None:
        shape = MODELS.get(str(self.model))
        if self.image is None and shape is not None and shape.size_field == "image":
            object.__setattr__(self, "image", SIZES["image"])  # so that it is one problem, said or not
        super().__post_init__()

    def check(self) -> None:
        if self.model not in MODELS:
            raise UsageError(f"model={self.model}: must be {one_of(MODELS)}")
        own = self.shape.size_field
        for name in (name for name in SIZES if name != own and getattr(self, name) is not None):
            right = f"{name}=none,{own}={getattr(self, own) or SIZES[own]}"
            raise UsageError(f"{name}={getattr(self, name)}: {self.model} has none: use {right}")
        if getattr(self, own) is None:
            raise UsageError(f"{own}=none: {self.model} needs it: give {own}, as in {own}={SIZES[own]}")
        _sides(self.topology)

    def replace(self, fields: Mapping[str, Any]) -> Self:
        """A copy with some fields changed; another model leaves behind the size that it has not."""
        model = MODELS.get(str(fields.get("model", self.model)))
        foreign = [name for name in SIZES if model is not None and name != model.size_field]
        return super().replace({**dict.fromkeys(foreign), **fields})

    @property
    def shape(self) -> Any:
        """The model's `TransformerShape` or `ResNetShape`."""
        return MODELS[self.model]

    @property
    def target(self) -> str:
        """The chip's name; ``cpu`` where there is none."""
        return self.topology.partition(":")[0]

    @property
    def devices(self) -> int:
        """How many JAX devices the topology has."""
        return math.prod(_sides(self.topology)) * _links(self.target).devices


def _links(target: str) -> Links:
    """How the target's devices hang together; CPU devices are in a row, as far as their topology's text goes."""
    known = CHIPS[target].links if target in CHIPS else None
    return known or Links(dimensions=1, gbps=0.0, ring=0, host_gbps=0.0)


def _sides(topology: str) -> tuple[int, ...]:
    """The sides of the torus (of ``cpu:8`` its 8); raises `UsageError` where there is no such topology."""
    target, _, form = topology.partition(":")
    if target != CPU and target not in CHIPS:
        raise UsageError(f"topology={topology}: must begin with {one_of([*CHIPS, CPU])}, as in v5e:4x4 or cpu:8")
    dimensions = _links(target).dimensions
    if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})*", form) or form.count("x") != dimensions - 1:
        example = {1: "cpu:8", 2: f"{target}:4x4", 3: f"{target}:2x2x1"}[dimensions]
        of = "a number of devices" if dimensions == 1 else f"{dimensions} sides"
        raise UsageError(f"topology={topology}: {target} takes {of}, as in {example}")
    return tuple(int(side) for side in form.split("x"))


def _train(model: str, batch: int, size: int, topology: str, dtype: str = "bfloat16") -> TrainProblem:
    fields: dict[str, Any] = {MODELS[model].size_field: size}
    return TrainProblem(model=model, batch=batch, topology=topology, dtype=dtype, **fields)


PROBLEMS: dict[str, TrainProblem] = {
    "llama3-1b": _train("llama3-1b", 64, 4096, "v5e:4x4"),
    "llama3-8b": _train("llama3-8b", 24, 8192, "v6e:2x4"),
    "llama3-70b": _train("llama3-70b", 128, 8192, "v6e:8x8"),
    "resnet50": _train("resnet50", 1024, 224, "v5e:2x4"),
    "tiny": _train("tiny", 8, 128, "v5e:2x2"),
    "tiny-cpu": _train("tiny", 16, 128, "cpu:8", "float32"),
    "resnet-tiny": _train("resnet-tiny", 64, 32, "v5e:2x2"),
    "resnet-tiny-cpu": _train("resnet-tiny", 64, 32, "cpu:8", "float32"),
}
