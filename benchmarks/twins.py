"""A kernel each of whose configs exists twice: what is declared a gain of one over the other is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune.chips import Chip
from autotune.outcome import Config
from autotune.space import Param, Space
from search_spaces.chunked_attention import ChunkedAttentionKernel


class Twins(ChunkedAttentionKernel):
    """The chunked attention, with a parameter that does nothing."""

    name = "twins"

    def space(self, problem: Any, chip: Chip) -> Space:
        space = super().space(problem, chip)
        return Space([*space.params.values(), Param("twin", ("a", "b"), "no difference")], space.constraints)

    def bind(self, problem: Any, config: Config, *, interpret: Any = False) -> Callable[..., Any]:
        return super().bind(problem, {n: v for n, v in config.items() if n != "twin"}, interpret=interpret)

    def baselines(self, problem: Any, chip: Chip) -> dict[str, Config]:
        return {name: {**config, "twin": "a"} for name, config in super().baselines(problem, chip).items()}
