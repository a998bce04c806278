"""The search spaces of the gated MLP and of its backward kernels, and these as the tuner sees them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.chips import Chip
from autotune.kernel import ArraySpec, Cost, Kernel
from autotune.outcome import Config
from autotune.space import Space
from kernels.gated_mlp import cost as model
from kernels.gated_mlp.problem import DX_PROBLEMS, PROBLEMS, GatedMlpDxProblem, GatedMlpProblem
from kernels.matmul import cost as tiles
from kernels.matmul.problem import TiledProblem
from search_spaces._common import small_tiles, tile_constraints, tile_params, tile_validation_problems, vmem_param

if TYPE_CHECKING:
    import jax


class _TiledKernel(Kernel):
    """What all three have in common: a matmul's blocks, over as many arrays as `form` says."""

    sources = (
        "kernels.gated_mlp.pallas",
        "kernels.gated_mlp.reference",
        "kernels._activations",
        "kernels._grid",
        "kernels._precision",
        "kernels._compiler",
    )
    form: ClassVar[tiles.Form]

    def space(self, problem: TiledProblem, chip: Chip) -> Space:
        params = [*tile_params(problem, chip), vmem_param(chip)]
        lower_bound = functools.partial(tiles.vmem_lower_bound, form=self.form)
        return Space(params, tile_constraints(problem, chip, lower_bound))

    def baselines(self, problem: TiledProblem, chip: Chip) -> dict[str, Config]:
        return {"default": self.space(problem, chip).parse(small_tiles(problem))}

    def heuristic(self, problem: TiledProblem, chip: Chip) -> Config:
        return self.space(problem, chip).parse(model.heuristic_config(problem, self.form))

    def cost(self, problem: TiledProblem) -> Cost:
        return tiles.cost(problem, self.form)

    def estimate_ms(self, problem: TiledProblem, config: Config, chip: Chip) -> float:
        return tiles.estimate_ms(problem, config, chip, self.form)

    def validation_problems(self, problem: TiledProblem, config: Config) -> list[TiledProblem]:
        return tile_validation_problems(problem, config)


class GatedMlpKernel(_TiledKernel):
    """``act(x[m, k] @ w_gate[k, n]) * (x @ w_up[k, n])`` in tiles: see `kernels.gated_mlp`."""

    name = "gated_mlp"
    summary = "act(x @ w_gate) * (x @ w_up), SwiGLU or GeGLU: one pass over x, two float32 accumulators in VMEM"
    problem_type = GatedMlpProblem
    problems = PROBLEMS
    form = model.FORWARD

    def arguments(self, problem: GatedMlpProblem) -> tuple[ArraySpec, ...]:
        weight = ArraySpec((problem.k, problem.n), problem.dtype)
        return ArraySpec((problem.m, problem.k), problem.dtype), weight, weight

    def bind(self, problem: GatedMlpProblem, config: Config, *, interpret: Any = False) -> Callable[..., jax.Array]:
        from kernels.gated_mlp.pallas import gated_mlp_pallas

        return functools.partial(gated_mlp_pallas, activation=problem.activation, **config, interpret=interpret)

    def reference(self, problem: GatedMlpProblem) -> Callable[..., jax.Array]:
        from kernels.gated_mlp.reference import gated_mlp_reference

        return functools.partial(gated_mlp_reference, activation=problem.activation)


class GatedMlpBackwardKernel(GatedMlpKernel):
    """The gradients of gate and up, which it computes again: see `kernels.gated_mlp.pallas`."""

    name = "gated_mlp_bwd"
    summary = "the gated MLP's gradients with respect to gate and up, recomputed in one pass over x"
    form = model.BACKWARD

    def arguments(self, problem: GatedMlpProblem) -> tuple[ArraySpec, ...]:
        return *super().arguments(problem), ArraySpec((problem.m, problem.n), problem.dtype)

    def bind(self, problem: GatedMlpProblem, config: Config, *, interpret: Any = False) -> Callable[..., Any]:
        from kernels.gated_mlp.pallas import gated_mlp_bwd_pallas

        return functools.partial(gated_mlp_bwd_pallas, activation=problem.activation, **config, interpret=interpret)

    def reference(self, problem: GatedMlpProblem) -> Callable[..., Any]:
        from kernels.gated_mlp.reference import gated_mlp_bwd_reference

        return functools.partial(gated_mlp_bwd_reference, activation=problem.activation)

    def make_inputs(self, problem: GatedMlpProblem, seed: int) -> tuple[jax.Array, ...]:
        """Random, with weights that make gate and up of standard size: a steep gate has no slope but 0 and 1."""
        import jax.numpy as jnp

        x, *weights, grad = super().make_inputs(problem, seed)
        return x, *((w.astype(jnp.float32) * problem.k**-0.5).astype(w.dtype) for w in weights), grad


class GatedMlpDxKernel(_TiledKernel):
    """The gradient with respect to x, of those of gate and up: see `kernels.gated_mlp.pallas`."""

    name = "gated_mlp_dx"
    summary = "the gated MLP's gradient with respect to x: two products, one float32 accumulator in VMEM"
    problem_type = GatedMlpDxProblem
    problems = DX_PROBLEMS
    form = model.DX

    def arguments(self, problem: GatedMlpDxProblem) -> tuple[ArraySpec, ...]:
        grad = ArraySpec((problem.m, problem.k), problem.dtype)
        weight = ArraySpec((problem.n, problem.k), problem.dtype)
        return grad, grad, weight, weight

    def bind(self, problem: GatedMlpDxProblem, config: Config, *, interpret: Any = False) -> Callable[..., jax.Array]:
        from kernels.gated_mlp.pallas import gated_mlp_dx_pallas

        return functools.partial(gated_mlp_dx_pallas, **config, interpret=interpret)

    def reference(self, problem: GatedMlpDxProblem) -> Callable[..., jax.Array]:
        from kernels.gated_mlp.reference import gated_mlp_dx_reference

        return gated_mlp_dx_reference
