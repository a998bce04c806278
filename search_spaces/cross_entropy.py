"""Cross-entropy's search spaces, and its kernels as the tuner sees them: the losses, and the gradients of x and w."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.chips import MIB, Chip
from autotune.kernel import ArraySpec, Cost, Kernel
from autotune.outcome import Config
from autotune.space import Constraint, Param, Space
from kernels._tpu_model import LANES, round_up
from kernels.cross_entropy import cost as model
from kernels.cross_entropy.problem import PROBLEMS, CrossEntropyProblem
from search_spaces._common import (
    block_candidates,
    block_constraint,
    few_blocks,
    uneven,
    vmem_limit_constraint,
    vmem_param,
)

if TYPE_CHECKING:
    import jax


class CrossEntropyKernel(Kernel):
    name = "cross_entropy"
    summary = "softmax cross-entropy of x @ w, losses and log-sum-exps: logits never leave VMEM"
    problem_type = CrossEntropyProblem
    problems = PROBLEMS
    sources = ("kernels.cross_entropy.pallas", "kernels.cross_entropy.reference", "kernels._precision", "kernels._compiler")

    def space(self, problem, chip):
        params = [
            Param("block_m", (128, 256, 512, 1024), ""),
            Param("block_n", (128, 256, 512, 1024), ""),
            Param("block_k", (problem.hidden,), "", default=problem.hidden),
            Param("block_n_compute", (128, 256, 512, 1024), ""),
            Param("held_buffers", (2, 1), "", 2),
            vmem_param(chip),
        ]
        return Space(params, [])

    def arguments(self, problem):
        return (ArraySpec((problem.tokens, problem.hidden), problem.dtype), ArraySpec((problem.hidden, problem.vocab), problem.dtype), ArraySpec((problem.tokens,), "int32"))

    def bind(self, problem, config, *, interpret=False):
        from kernels.cross_entropy.pallas import cross_entropy_pallas
        return functools.partial(cross_entropy_pallas, z_loss=problem.z_loss, **config, interpret=interpret)

    def reference(self, problem):
        from kernels.cross_entropy.reference import cross_entropy_reference
        return functools.partial(cross_entropy_reference, z_loss=problem.z_loss)

    def baselines(self, problem, chip):
        return {}

    def cost(self, problem):
        return model.forward_cost(problem)

    def estimate_ms(self, problem, config, chip):
        return model.forward_estimate_ms(problem, config, chip)

    def validation_problems(self, problem, config):
        return []
