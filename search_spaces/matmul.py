"""The matmul's search space, and the matmul as the tuner sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autotune.chips import Chip
from autotune.kernel import ArraySpec, Cost, Kernel
from autotune.outcome import Config
from autotune.space import Space
from kernels.matmul import cost as model
from kernels.matmul.problem import PROBLEMS, MatmulProblem
from search_spaces._common import small_tiles, tile_constraints, tile_params, tile_validation_problems, vmem_param

if TYPE_CHECKING:
    import jax


class MatmulKernel(Kernel):
    """``x[m, k] @ y[k, n]`` in tiles: see `kernels.matmul`."""

    name = "matmul"
    summary = "x[m, k] @ y[k, n]: tiles of the result, float32 accumulator in VMEM, k innermost"
    problem_type = MatmulProblem
    problems = PROBLEMS
    sources = ("kernels.matmul.pallas", "kernels.matmul.reference", "kernels._precision", "kernels._compiler")

    def space(self, problem: MatmulProblem, chip: Chip) -> Space:
        params = [*tile_params(problem, chip), vmem_param(chip)]
        return Space(params, tile_constraints(problem, chip, model.vmem_lower_bound))

    def arguments(self, problem: MatmulProblem) -> tuple[ArraySpec, ...]:
        return (
            ArraySpec((problem.m, problem.k), problem.dtype),
            ArraySpec((problem.k, problem.n), problem.dtype),
        )

    def bind(self, problem: MatmulProblem, config: Config, *, interpret: Any = False) -> Callable[..., jax.Array]:
        from kernels.matmul.pallas import matmul_pallas

        return lambda x, y: matmul_pallas(x, y, **config, interpret=interpret)

    def reference(self, problem: MatmulProblem) -> Callable[..., jax.Array]:
        from kernels.matmul.reference import matmul_reference

        return matmul_reference

    def baselines(self, problem: MatmulProblem, chip: Chip) -> dict[str, Config]:
        return {"default": self.space(problem, chip).parse(small_tiles(problem))}

    def heuristic(self, problem: MatmulProblem, chip: Chip) -> Config:
        return self.space(problem, chip).parse(model.heuristic_config(problem))

    def cost(self, problem: MatmulProblem) -> Cost:
        return model.cost(problem)

    def estimate_ms(self, problem: MatmulProblem, config: Config, chip: Chip) -> float:
        return model.estimate_ms(problem, config, chip)

    def validation_problems(self, problem: MatmulProblem, config: Config) -> list[MatmulProblem]:
        return tile_validation_problems(problem, config)
