"""The grouped matmuls' search spaces, and these as the tuner sees them: the product, and its gradient of rhs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from autotune.chips import MIB, Chip
from autotune.kernel import ArraySpec, Cost, Kernel
from autotune.outcome import Config
from autotune.problem import DTYPE_BYTES
from autotune.space import Constraint, Param, Space, aligned_divisors
from kernels._tpu_model import LANES, sublanes
from kernels.grouped_matmul import cost as model
from kernels.grouped_matmul.problem import DRHS_PROBLEMS, PROBLEMS, GroupedMatmulProblem, GroupedProblem, routed
from search_spaces._common import (
    block_candidates,
    block_constraint,
    few_blocks,
    small_tiles,
    spread,
    uneven,
    vmem_limit_constraint,
    vmem_param,
)

if TYPE_CHECKING:
    import jax

LARGEST_ROWS = 2048  # of a block: groups are hardly longer
SMALLEST_TILE = 32
MANY_TILES = 6
TRANSFERS = ("step", "early")


class _GroupedKernel(Kernel):
    """What both have in common.

    Attributes:
        drhs: Whether it is the gradient of rhs.
    """

    drhs: ClassVar[bool]
    sources = (
        "kernels.grouped_matmul.pallas",
        "kernels.grouped_matmul.drhs",
        "kernels.grouped_matmul.transfers",
        "kernels.grouped_matmul.visits",
        "kernels.grouped_matmul.reference",
        "kernels._precision",
        "kernels._compiler",
    )

    relatives = {"gmm": {f"block_{side}": f"tile_{side}" for side in ("m", "n", "k")}}

    def space(self, problem: GroupedProblem, chip: Chip) -> Space:
        align = sublanes(problem.dtype)
        most = chip.vmem_bytes // (2 * LANES * DTYPE_BYTES[problem.dtype])
        rows = block_candidates(problem.m, align, largest=min(LARGEST_ROWS, most))
        tiles = {part for block in rows for part in aligned_divisors(block, align, smallest=SMALLEST_TILE)}
        tiles = {tile for tile in tiles if not tile & (tile - 1)} | {block for block in rows if block % align}
        params = [
            Param("block_m", rows, "rows fetched per grid step"),
            Param("block_n", block_candidates(problem.n, LANES, largest=most), "columns of a result's tile"),
            Param(
                "block_k",
                block_candidates(problem.k, LANES, largest=most),
                "rows of a result's tile" if self.drhs else "contracted length per grid step",
            ),
            Param(
                "block_m_compute",
                spread(tiles or rows, MANY_TILES),
                "rows multiplied at a time, from the group's first one on",
                default=lambda config: config["block_m"],
            ),
            Param(
                "transfers",
                TRANSFERS,
                "fetches (drhs: and writes) beside one grid step, or beside all of one group",
                "step",
            ),
            vmem_param(chip),
        ]
        constraints = [
            block_constraint("block_m", "m", problem.m, align),
            block_constraint("block_n", "n", problem.n, LANES),
            block_constraint("block_k", "k", problem.k, LANES),
            Constraint(
                f"block_m_compute must be block_m itself, or a multiple of {align} that divides it",
                lambda config: (
                    config["block_m_compute"] == config["block_m"]
                    or (
                        config["block_m_compute"] > 0
                        and config["block_m_compute"] % align == 0
                        and config["block_m"] % config["block_m_compute"] == 0
                    )
                ),
            ),
            Constraint("transfers must be step or early", lambda config: config["transfers"] in TRANSFERS),
            Constraint(
                f"transfers=early needs blocks that divide m={problem.m}, n={problem.n} and k={problem.k}"
                + ("" if self.drhs else ", that of k the whole k"),
                lambda config: config["transfers"] == "step" or self._divide(problem, config),
            ),
            vmem_limit_constraint(chip),
            Constraint(
                "the blocks alone need more VMEM than vmem_limit_mib: take smaller blocks or a higher limit",
                lambda config: (
                    model.vmem_lower_bound(problem, config, drhs=self.drhs) <= config["vmem_limit_mib"] * MIB
                ),
            ),
        ]
        return Space(params, constraints)

    def _divide(self, problem: GroupedProblem, config: Config) -> bool:
        even = all(size % config[f"block_{field}"] == 0 for field, size in self._lengths(problem).items())
        return even and (self.drhs or config["block_k"] == problem.k)

    def _lengths(self, problem: GroupedProblem) -> dict[str, int]:
        return {"m": problem.m, "n": problem.n, "k": problem.k}

    def baselines(self, problem: GroupedProblem, chip: Chip) -> dict[str, Config]:
        return {"default": self.space(problem, chip).parse(small_tiles(problem))}

    def heuristic(self, problem: GroupedProblem, chip: Chip) -> Config:
        return self.space(problem, chip).parse(model.heuristic_config(problem, drhs=self.drhs, cores=chip.cores))

    def cost(self, problem: GroupedProblem) -> Cost:
        return model.cost(problem, drhs=self.drhs)

    def estimate_ms(self, problem: GroupedProblem, config: Config, chip: Chip) -> float:
        return model.estimate_ms(problem, config, chip, drhs=self.drhs)

    def make_inputs(self, problem: GroupedProblem, seed: int) -> tuple[jax.Array, ...]:
        """Random matrices; groups of every kind, as `mixed_sizes` says."""
        import jax.numpy as jnp

        *arrays, _ = super().make_inputs(problem, seed)
        return *arrays, jnp.asarray(mixed_sizes(problem.m, problem.groups, seed))

    def validation_problems(self, problem: GroupedProblem, config: Config) -> list[GroupedProblem]:
        """The problem's own path over a few blocks; uneven blocks of which many rows have no group; and uneven blocks
        with groups up to the last row. See `mixed_sizes`.

        A whole k (drhs: none) stays whole, as does an m that is one block no other m could have; and transfers that
        need even blocks get them.
        """
        sizes = self._lengths(problem)
        blocks = {field: min(size, config[f"block_{field}"]) for field, size in sizes.items()}
        whole = {"k": problem.k} if blocks["k"] == problem.k and not self.drhs else {}
        if blocks["m"] % sublanes(problem.dtype):
            whole["m"] = problem.m
        early = config.get("transfers") == "early"

        def own(**most: int) -> GroupedProblem:
            lengths = {field: few_blocks(size, blocks[field], most[field]) for field, size in sizes.items()}
            return problem.replace({**lengths, **whole, "groups": 7})

        def ragged(groups: int = 8, **full: int) -> GroupedProblem:
            edges = {field: block if early else uneven(block) for field, block in blocks.items()}
            lengths = {field: full[field] * block + edges[field] for field, block in blocks.items()}
            return problem.replace({**lengths, **whole, "groups": groups})

        exact = [own(m=3, n=2, k=3), own(m=3, n=2, k=2), own(m=2, n=2, k=2)]
        three = ragged(m=2, n=2, k=2)
        thin = [ragged(m=2, n=0, k=1), ragged(m=2, n=1, k=0), ragged(m=1, n=2, k=0), ragged(m=1, n=0, k=2)]
        found = [next(filter(_cheap, exact), exact[-1]), *([three] if _cheap(three) else thin)]
        # Groups as far as the uneven edge of the rows.
        return list(dict.fromkeys(found if early else [*found, ragged(7, m=1, n=0, k=0)]))

    def validation_reference(self, problem: GroupedProblem) -> Callable[..., jax.Array]:
        from kernels.grouped_matmul.reference import plain_drhs, plain_grouped_matmul

        if self.drhs:
            return plain_drhs
        return functools.partial(plain_grouped_matmul, transpose_rhs=problem.transpose_rhs)

    def _sizes(self, problem: GroupedProblem) -> ArraySpec:
        """The groups' rows, with those that a prediction is for."""
        example = np.array(routed(problem.m, problem.groups, problem.skew))
        return ArraySpec((problem.groups,), "int32", example=example)


class GroupedMatmulKernel(_GroupedKernel):
    """``out[i] = lhs[i] @ rhs[group of i]``: see `kernels.grouped_matmul`."""

    name = "grouped_matmul"
    summary = "rows sorted by group, each times its group's matrix (mixtures of experts); transposed for gradients"
    problem_type = GroupedMatmulProblem
    problems = PROBLEMS
    drhs = False

    def arguments(self, problem: GroupedMatmulProblem) -> tuple[ArraySpec, ...]:
        matrix = (problem.n, problem.k) if problem.transpose_rhs else (problem.k, problem.n)
        lhs = ArraySpec((problem.m, problem.k), problem.dtype)
        return lhs, ArraySpec((problem.groups, *matrix), problem.dtype), self._sizes(problem)

    def bind(
        self, problem: GroupedMatmulProblem, config: Config, *, interpret: Any = False
    ) -> Callable[..., jax.Array]:
        from kernels.grouped_matmul.pallas import grouped_matmul_pallas

        return functools.partial(
            grouped_matmul_pallas, transpose_rhs=problem.transpose_rhs, **config, interpret=interpret
        )

    def reference(self, problem: GroupedMatmulProblem) -> Callable[..., jax.Array]:
        from kernels.grouped_matmul.reference import grouped_matmul_reference

        return functools.partial(grouped_matmul_reference, transpose_rhs=problem.transpose_rhs)


class GroupedMatmulDrhsKernel(_GroupedKernel):
    """``out[g] = lhs[rows of g]ᵀ @ grad[rows of g]``, the gradient of a grouped matmul's right-hand sides."""

    name = "grouped_matmul_drhs"
    summary = "the grouped matmul's gradient with respect to its matrices: each group's lhsᵀ @ grad"
    problem_type = GroupedProblem
    problems = DRHS_PROBLEMS
    drhs = True

    def arguments(self, problem: GroupedProblem) -> tuple[ArraySpec, ...]:
        lhs, grad = (ArraySpec((problem.m, width), problem.dtype) for width in (problem.k, problem.n))
        return lhs, grad, self._sizes(problem)

    def bind(self, problem: GroupedProblem, config: Config, *, interpret: Any = False) -> Callable[..., jax.Array]:
        from kernels.grouped_matmul.drhs import grouped_matmul_drhs_pallas

        return functools.partial(grouped_matmul_drhs_pallas, **config, interpret=interpret)

    def reference(self, problem: GroupedProblem) -> Callable[..., jax.Array]:
        from kernels.grouped_matmul.reference import grouped_matmul_drhs_reference

        return grouped_matmul_drhs_reference


def mixed_sizes(m: int, groups: int, seed: int) -> np.ndarray:
    """``[groups]`` int32: what a kernel may get wrong: groups that are empty, short, or of several tiles.

    With an even count of groups the first and the last are empty, and nearly half of the rows have no group.
    """
    rng = np.random.default_rng(seed)
    share = rng.uniform(0.5, 1, groups)
    share[min(1 + groups % 2, groups - 1)] = 4  # neither empty nor short
    empty, short = (slice(0, None, 3), slice(2, -1, 9)) if groups % 2 == 0 else (slice(1, None, 3), slice(3, -1, 9))
    sizes = np.zeros(groups, np.int32)
    if groups > 2:
        share[empty] = share[short] = 0
        share[-1] *= groups % 2
        sizes[short] = 3 if m > 32 else 0
    total = m if groups % 2 else m - 45 * m // 100
    return sizes + rng.multinomial(total - sizes.sum(), share / share.sum()).astype(np.int32)


def _cheap(problem: GroupedProblem) -> bool:
    """Whether a CPU runs it in some seconds and little memory."""
    m, n, k = problem.m, problem.n, problem.k
    return m * n * k <= 1 << 33 and max(m * k, problem.groups * k * n, m * n) <= 1 << 27
