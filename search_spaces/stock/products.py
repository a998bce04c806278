"""The search spaces of JAX's matmul and of megablox' grouped one, and these as the tuner sees them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autotune.chips import Chip
from autotune.kernel import ArraySpec, Cost
from autotune.outcome import Config
from autotune.space import Param, Space
from kernels._tpu_model import LANES
from kernels.grouped_matmul import cost as grouped_model
from kernels.matmul import cost as model
from kernels.stock.problem import GMM_PROBLEMS, MATMUL_PROBLEMS, StockGmmProblem, StockMatmulProblem
from search_spaces._common import block_candidates, block_constraint, few_blocks, small_tiles, uneven
from search_spaces.grouped_matmul import GroupedMatmulKernel
from search_spaces.stock._common import StockKernel, divides, fits, interpreted

if TYPE_CHECKING:
    import jax

LONGEST = 8192
BLOCKS = {"m": "tm", "k": "tk", "n": "tn"}  # what megablox calls those of each side


class StockMatmulKernel(StockKernel):
    """``matmul(x, y, block_shape=(block_m, block_n), block_k=block_k)``."""

    name = "stock_matmul"
    summary = "JAX's matmul: block_shape and block_k; all divide the sizes"
    problem_type = StockMatmulProblem
    problems = MATMUL_PROBLEMS
    library = "matmul"
    relatives = {"matmul": {f"block_{side}": side for side in ("m", "n", "k")}}

    def space(self, problem: StockMatmulProblem, chip: Chip) -> Space:
        sizes = {"block_m": (problem.m, problem.row_tile), "block_n": (problem.n, LANES), "block_k": (problem.k, LANES)}
        docs = ("rows of an output tile", "columns of an output tile", "contracted length per grid step")
        params = [
            Param(name, divisors(size, align), doc)
            for (name, (size, align)), doc in zip(sizes.items(), docs, strict=True)
        ]
        constraints = [divides(name, name[-1], *size) for name, size in sizes.items()]
        return Space(params, [*constraints, fits(problem, chip, functools.partial(model.vmem_lower_bound, problem))])

    def arguments(self, problem: StockMatmulProblem) -> tuple[ArraySpec, ...]:
        x, y = (problem.m, problem.k), (problem.k, problem.n)
        return ArraySpec(x, problem.dtype), ArraySpec(y, problem.dtype)

    def bind(self, problem: StockMatmulProblem, config: Config, *, interpret: Any = False) -> Callable[..., jax.Array]:
        from kernels.stock.products import product

        return interpreted(functools.partial(product, config=config), interpret)

    def reference(self, problem: StockMatmulProblem) -> Callable[..., jax.Array]:
        from kernels.matmul.reference import matmul_reference

        return matmul_reference

    def baselines(self, problem: StockMatmulProblem, chip: Chip) -> dict[str, Config]:
        """The library has no default of blocks: 128-wide ones, and its 256 of block_k where that divides."""
        space, blocks = self.space(problem, chip), small_tiles(problem)
        default = space.parse({**blocks, "block_k": 256})
        return {"default": default if space.why_invalid(default) is None else space.parse(blocks)}

    def cost(self, problem: StockMatmulProblem) -> Cost:
        return model.cost(problem)

    def estimate_ms(self, problem: StockMatmulProblem, config: Config, chip: Chip) -> float:
        return model.estimate_ms(problem, config, chip)

    def validation_problems(self, problem: StockMatmulProblem, config: Config) -> list[StockMatmulProblem]:
        blocks = {field: config[f"block_{field}"] for field in ("m", "n", "k")}
        lengths = {field: few_blocks(getattr(problem, field), block) for field, block in blocks.items()}
        return [problem.replace({field: min(size, getattr(problem, field)) for field, size in lengths.items()})]

    def terms(self, problem: StockMatmulProblem, config: Config) -> Mapping[str, str]:
        return {"matmul": f"block_shape=({config['block_m']}, {config['block_n']}), block_k={config['block_k']}"}


class StockGmmKernel(StockKernel, GroupedMatmulKernel):
    """``megablox.gmm(lhs, rhs, sizes, lhs.dtype, (tm, tk, tn))``."""

    name = "stock_gmm"
    summary = "JAX's megablox gmm: rows sorted by group, each times its group's matrix; tiling tm, tk, tn"
    problem_type = StockGmmProblem
    problems = GMM_PROBLEMS
    library = "megablox.gmm"
    relatives = {"gmm": {name: f"tile_{side}" for side, name in BLOCKS.items()}}

    def space(self, problem: StockGmmProblem, chip: Chip) -> Space:
        params = [
            Param("tm", divisors(problem.m, problem.row_tile, 2048), "rows fetched per grid step"),
            Param("tk", block_candidates(problem.k, LANES, largest=LONGEST), "contracted length per grid step"),
            Param("tn", block_candidates(problem.n, LANES, largest=LONGEST), "columns of a result's tile"),
        ]
        constraints = [
            divides("tm", "m", problem.m, problem.row_tile),
            block_constraint("tk", "k", problem.k, LANES),
            block_constraint("tn", "n", problem.n, LANES),
            fits(problem, chip, lambda config: grouped_model.vmem_lower_bound(problem, _tile(config))),
        ]
        return Space(params, constraints)

    def make_inputs(self, problem: StockGmmProblem, seed: int) -> tuple[jax.Array, ...]:
        """As the grouped matmul's, with a group for every row: others the kernel leaves as they were."""
        import jax.numpy as jnp

        lhs, rhs, sizes = super().make_inputs(problem, seed)
        return lhs, rhs, jnp.asarray(sizes).at[-1].add(problem.m - jnp.sum(sizes)).astype(jnp.int32)

    def bind(self, problem: StockGmmProblem, config: Config, *, interpret: Any = False) -> Callable[..., jax.Array]:
        from kernels.stock.products import grouped

        function = functools.partial(grouped, transpose_rhs=problem.transpose_rhs, config=config)
        return interpreted(function, interpret)

    def baselines(self, problem: StockGmmProblem, chip: Chip) -> dict[str, Config]:
        """The library's tiling; rows of a group that are fewer than a tile's it multiplies in vain."""
        tile = {name: min(getattr(problem, side), LANES) for side, name in BLOCKS.items()}
        return {"default": self.space(problem, chip).parse(tile)}

    def heuristic(self, problem: StockGmmProblem, chip: Chip) -> Config:
        """The best estimate: the analytic one of the grouped matmul."""
        space = self.space(problem, chip)
        return min(space, key=lambda config: self.estimate_ms(problem, config, chip))

    def estimate_ms(self, problem: StockGmmProblem, config: Config, chip: Chip) -> float:
        return grouped_model.estimate_ms(problem, _tile(config), chip)

    def validation_problems(self, problem: StockGmmProblem, config: Config) -> list[StockGmmProblem]:
        """A few blocks each way, the last of k and of n uneven as on the problem; and uneven ones."""
        blocks = {side: config[name] for side, name in BLOCKS.items()}
        sizes = {"k": problem.k, "n": problem.n}
        own = {field: min(size, few_blocks(size, blocks[field])) for field, size in sizes.items()}
        ragged = {field: blocks[field] + uneven(blocks[field]) // LANES * LANES for field in sizes}
        few = [own, {field: ragged[field] if blocks[field] < size else size for field, size in sizes.items()}]
        return list(dict.fromkeys(problem.replace({**one, "m": 3 * blocks["m"], "groups": 7}) for one in few))

    def terms(self, problem: StockGmmProblem, config: Config) -> Mapping[str, str]:
        return {"gmm": f"tiling=({config['tm']}, {config['tk']}, {config['tn']})"}


def divisors(size: int, align: int, largest: int = LONGEST) -> tuple[int, ...]:
    """Blocks worth trying that divide `size`."""
    return tuple(block for block in block_candidates(size, align, largest=largest) if size % block == 0)


def _tile(config: Config) -> dict[str, int]:
    """In the words of this project's grouped matmul."""
    return {f"block_{side}": config[name] for side, name in BLOCKS.items()}
