"""The gated MLP's search space, and the gated MLP as the tuner sees it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autotune.chips import Chip
from autotune.kernel import ArraySpec, Cost, Kernel
from autotune.outcome import Config
from autotune.space import Space
from kernels.gated_mlp import cost as model
from kernels.gated_mlp.problem import PROBLEMS, GatedMlpProblem
from search_spaces._common import small_tiles, tile_constraints, tile_params, tile_validation_problems, vmem_param

if TYPE_CHECKING:
    import jax


class GatedMlpKernel(Kernel):
    """``act(x[m, k] @ w_gate[k, n]) * (x @ w_up[k, n])`` in tiles: see `kernels.gated_mlp`."""

    name = "gated_mlp"
    summary = "act(x @ w_gate) * (x @ w_up), SwiGLU or GeGLU: one pass over x, two float32 accumulators in VMEM"
    problem_type = GatedMlpProblem
    problems = PROBLEMS
    sources = ("kernels.gated_mlp.pallas", "kernels.gated_mlp.reference", "kernels._precision", "kernels._compiler")

    def space(self, problem: GatedMlpProblem, chip: Chip) -> Space:
        params = [*tile_params(problem, chip), vmem_param(chip)]
        return Space(params, tile_constraints(problem, chip, model.vmem_lower_bound))

    def arguments(self, problem: GatedMlpProblem) -> tuple[ArraySpec, ...]:
        weight = ArraySpec((problem.k, problem.n), problem.dtype)
        return ArraySpec((problem.m, problem.k), problem.dtype), weight, weight

    def bind(self, problem: GatedMlpProblem, config: Config, *, interpret: Any = False) -> Callable[..., jax.Array]:
        from kernels.gated_mlp.pallas import gated_mlp_pallas

        return functools.partial(gated_mlp_pallas, activation=problem.activation, **config, interpret=interpret)

    def reference(self, problem: GatedMlpProblem) -> Callable[..., jax.Array]:
        from kernels.gated_mlp.reference import gated_mlp_reference

        return functools.partial(gated_mlp_reference, activation=problem.activation)

    def baselines(self, problem: GatedMlpProblem, chip: Chip) -> dict[str, Config]:
        return {"default": self.space(problem, chip).parse(small_tiles(problem))}

    def heuristic(self, problem: GatedMlpProblem, chip: Chip) -> Config:
        return self.space(problem, chip).parse(model.heuristic_config(problem))

    def cost(self, problem: GatedMlpProblem) -> Cost:
        return model.cost(problem)

    def estimate_ms(self, problem: GatedMlpProblem, config: Config, chip: Chip) -> float:
        return model.estimate_ms(problem, config, chip)

    def validation_problems(self, problem: GatedMlpProblem, config: Config) -> list[GatedMlpProblem]:
        return tile_validation_problems(problem, config)
