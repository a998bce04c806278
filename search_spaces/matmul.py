"""The matmul's search space, and the matmul as the tuner sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autotune.chips import MIB, Chip
from autotune.kernel import ArraySpec, Cost, Kernel
from autotune.outcome import Config
from autotune.problem import DTYPE_BYTES
from autotune.space import Constraint, Param, Space
from kernels.matmul import cost as model
from kernels.matmul.problem import PROBLEMS, MatmulProblem
from search_spaces._common import (
    LANES,
    block_candidates,
    block_constraint,
    few_blocks,
    sublanes,
    uneven,
    vmem_limit_constraint,
    vmem_param,
)

if TYPE_CHECKING:
    import jax


class MatmulKernel(Kernel):
    """``x[m, k] @ y[k, n]`` in tiles: see `kernels.matmul`."""

    name = "matmul"
    summary = "x[m, k] @ y[k, n]: tiles of the result, float32 accumulator in VMEM, k innermost"
    problem_type = MatmulProblem
    problems = PROBLEMS
    sources = ("kernels.matmul.pallas", "kernels.matmul.reference", "kernels._precision")

    def space(self, problem: MatmulProblem, chip: Chip) -> Space:
        rows = sublanes(problem.dtype)
        # Two buffers of a longer block fill the VMEM even if it is only 128 wide.
        most = chip.vmem_bytes // (2 * LANES * DTYPE_BYTES[problem.dtype])
        params = [
            Param("block_m", block_candidates(problem.m, rows, largest=most), "rows of an output tile"),
            Param("block_n", block_candidates(problem.n, LANES, largest=most), "columns of an output tile"),
            Param("block_k", block_candidates(problem.k, LANES, largest=most), "contracted length per grid step"),
            Param("grid_order", ("mn", "nm"), "order of the outer two grid dimensions, the inner one last", "mn"),
            Param("held_buffers", (2, 1), "VMEM buffers of the operand that the inner tile loop holds still", 2),
            vmem_param(chip),
        ]
        constraints = [
            block_constraint("block_m", "m", problem.m, rows),
            block_constraint("block_n", "n", problem.n, LANES),
            block_constraint("block_k", "k", problem.k, LANES),
            Constraint("held_buffers must be 1 or 2", lambda config: config["held_buffers"] in (1, 2)),
            Constraint(
                f"held_buffers=1 needs block_k to be the whole k={problem.k}: with several k steps no operand is held",
                lambda config: config["held_buffers"] == 2 or config["block_k"] == problem.k,
            ),
            vmem_limit_constraint(chip),
            Constraint(
                "the blocks alone need more VMEM than vmem_limit_mib: take smaller blocks or a higher limit",
                lambda config: model.vmem_lower_bound(problem, config) <= config["vmem_limit_mib"] * MIB,
            ),
        ]
        return Space(params, constraints)

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
        blocks = {"block_m": problem.m, "block_n": problem.n, "block_k": problem.k}
        small = {name: model.clipped(size, LANES) for name, size in blocks.items()}
        return {"default": self.space(problem, chip).parse(small)}

    def heuristic(self, problem: MatmulProblem, chip: Chip) -> Config:
        return self.space(problem, chip).parse(model.heuristic_config(problem))

    def cost(self, problem: MatmulProblem) -> Cost:
        return model.cost(problem)

    def estimate_ms(self, problem: MatmulProblem, config: Config, chip: Chip) -> float:
        return model.estimate_ms(problem, config, chip)

    def validation_problems(self, problem: MatmulProblem, config: Config) -> list[MatmulProblem]:
        """The problem's own path over a few blocks (over one of a k that is whole), and three with uneven edges.

        Blocks too large for three each way have two, and three along one dimension at a time.
        """
        sizes = {"m": problem.m, "n": problem.n, "k": problem.k}
        blocks = {field: model.clipped(size, config[f"block_{field}"]) for field, size in sizes.items()}

        def own(most: int) -> MatmulProblem:
            lengths = {field: few_blocks(size, blocks[field], most) for field, size in sizes.items()}
            return problem.replace({**lengths, "k": problem.k if blocks["k"] == problem.k else lengths["k"]})

        def ragged(**full: int) -> MatmulProblem:
            """So many full blocks along each dimension, and part of one."""
            return problem.replace({f: full[f] * block + uneven(block) for f, block in blocks.items()})

        exact = own(3) if _cheap(own(3)) else own(2)
        if _cheap(three := ragged(m=2, n=2, k=2)):
            return [exact, three]
        thin = {"m": 0, "n": 0, "k": 0}
        return [*(ragged(**{**thin, field: 2}) for field in blocks), ragged(m=1, n=1, k=1), exact]


def _cheap(problem: MatmulProblem) -> bool:
    """Whether a CPU runs it in some seconds and little memory."""
    m, n, k = problem.m, problem.n, problem.k
    return m * n * k <= 1 << 36 and max(m * k, k * n, m * n) <= 1 << 26
