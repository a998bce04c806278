"""The matmul's search space, and the matmul as the tuner sees it."""

from __future__ import annotations

import functools
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
    """``act(x[m, k] @ y[k, n] + bias[n])`` in tiles: see `kernels.matmul`."""

    name = "matmul"
    summary = "act(x[m, k] @ y[k, n] + bias): tiles of the result, float32 accumulator in VMEM, k innermost"
    problem_type = MatmulProblem
    problems = PROBLEMS
    sources = (
        "kernels.matmul.pallas",
        "kernels.matmul.reference",
        "kernels._activations",
        "kernels._grid",
        "kernels._precision",
        "kernels._compiler",
    )

    relatives = {"matmul": {f"block_{side}": side for side in ("m", "n", "k")}}

    def space(self, problem: MatmulProblem, chip: Chip) -> Space:
        params = [*tile_params(problem, chip), vmem_param(chip)]
        return Space(params, tile_constraints(problem, chip, model.vmem_lower_bound))

    def arguments(self, problem: MatmulProblem) -> tuple[ArraySpec, ...]:
        """x, y and, where there is one, the bias."""
        x, y = (problem.m, problem.k), (problem.k, problem.n)
        operands = (
            ArraySpec(x[::-1] if problem.transpose_lhs else x, problem.dtype),
            ArraySpec(y[::-1] if problem.transpose_rhs else y, problem.dtype),
        )
        return (*operands, ArraySpec((problem.n,), problem.result_dtype)) if problem.bias else operands

    def bind(self, problem: MatmulProblem, config: Config, *, interpret: Any = False) -> Callable[..., jax.Array]:
        from kernels.matmul.pallas import matmul_pallas

        return functools.partial(matmul_pallas, **problem.options, **config, interpret=interpret)

    def reference(self, problem: MatmulProblem) -> Callable[..., jax.Array]:
        from kernels.matmul.reference import matmul_reference

        return functools.partial(matmul_reference, **problem.options)

    def make_inputs(self, problem: MatmulProblem, seed: int) -> tuple[jax.Array, ...]:
        """Random operands, standard normal or all of int8's values; a bias that is as large as the sums."""
        import jax
        import jax.numpy as jnp

        if problem.dtype == "int8":
            keys = jax.random.split(jax.random.key(seed))
            specs = self.arguments(problem)
            return tuple(
                jax.random.randint(key, spec.shape, -128, 128, jnp.int8) for key, spec in zip(keys, specs, strict=True)
            )
        x, y, *bias = super().make_inputs(problem, seed)
        y = (y.astype(jnp.float32) * problem.k**-0.5).astype(y.dtype)  # keeps an activation out of its flat parts
        return x, y, *bias

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
