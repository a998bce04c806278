"""The search space of JAX's flash attention, and the kernel as the tuner sees it: its forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autotune.chips import Chip
from autotune.kernel import ArraySpec, Cost
from autotune.outcome import Config
from autotune.problem import DTYPE_BYTES
from autotune.space import Constraint, Param, Space, aligned_divisors
from kernels._tpu_model import LANES
from kernels.attention import cost as model
from kernels.stock.problem import FLASH_PROBLEMS, FlashProblem
from search_spaces.attention import few_of_each
from search_spaces.stock._common import (
    StockKernel,
    as_python,
    block_sizes,
    divides,
    fits,
    interpreted,
    longest,
    part_of,
    small_tile,
    tile_sizes,
)

if TYPE_CHECKING:
    import jax


class StockFlashKernel(StockKernel):
    """``flash_attention`` with `BlockSizes`; the blocks of its backward pass are not part of it."""

    name = "stock_flash"
    summary = "JAX's flash attention, forward: block_q, block_k_major, block_k, block_b of BlockSizes"
    problem_type = FlashProblem
    problems = FLASH_PROBLEMS
    library = "flash_attention"

    def space(self, problem: FlashProblem, chip: Chip) -> Space:
        params = [
            Param("block_q", block_sizes(problem.q_len), "queries per block"),
            Param("block_k_major", block_sizes(problem.kv_len), "keys fetched per grid step"),
            Param(
                "block_k",
                tile_sizes(problem.kv_len),
                "keys per tile of scores",
                default=lambda config: config["block_k_major"],
            ),
            Param("block_b", tuple(b for b in aligned_divisors(problem.batch, 1) if b <= 4), "sequences per block", 1),
        ]
        constraints = [
            divides("block_q", "q_len", problem.q_len, LANES),
            divides("block_k_major", "kv_len", problem.kv_len, LANES),
            part_of("block_k", "block_k_major", LANES),
            Constraint(
                f"block_b must divide batch={problem.batch}",
                lambda config: config["block_b"] > 0 and problem.batch % config["block_b"] == 0,
            ),
            small_tile("block_q", "block_k"),
            fits(problem, chip, functools.partial(_block_bytes, problem)),
        ]
        return Space(params, constraints)

    def arguments(self, problem: FlashProblem) -> tuple[ArraySpec, ...]:
        q, kv = (
            ArraySpec((problem.batch, problem.heads, length, problem.head_dim), problem.dtype)
            for length in (problem.q_len, problem.kv_len)
        )
        return q, kv, kv

    def bind(self, problem: FlashProblem, config: Config, *, interpret: Any = False) -> Callable[..., jax.Array]:
        from kernels.stock.flash import flash_forward

        return interpreted(functools.partial(flash_forward, causal=problem.causal, config=config), interpret)

    def reference(self, problem: FlashProblem) -> Callable[..., jax.Array]:
        from kernels.attention.reference import attention_reference

        return functools.partial(attention_reference, **problem.options)

    def validation_reference(self, problem: FlashProblem) -> Callable[..., jax.Array]:
        from kernels.attention.reference import attention_in_pieces

        return functools.partial(attention_in_pieces, **problem.options)

    def baselines(self, problem: FlashProblem, chip: Chip) -> dict[str, Config]:
        space = self.space(problem, chip)
        return {"default": space.parse(dict.fromkeys(space.required, LANES))}

    def heuristic(self, problem: FlashProblem, chip: Chip) -> Config:
        cap = 1024 * LANES // max(problem.head_dim, LANES)
        keys = longest(problem.kv_len, cap)
        config = {"block_q": longest(problem.q_len, cap), "block_k_major": keys, "block_k": longest(keys, cap // 2)}
        return self.space(problem, chip).parse(config)

    def cost(self, problem: FlashProblem) -> Cost:
        return model.cost(problem)

    def estimate_ms(self, problem: FlashProblem, config: Config, chip: Chip) -> float:
        sizes = {
            "block_q": config["block_q"],
            "block_kv": config["block_k_major"],
            "block_q_compute": config["block_q"],
            "block_kv_compute": config["block_k"],
        }
        return model.estimate_ms(problem, sizes, chip)

    def validation_problems(self, problem: FlashProblem, config: Config) -> list[FlashProblem]:
        """As attention's, the batch in blocks too: one with a head alone, two with several where there are two."""
        few, step = few_of_each(problem, config["block_q"], config["block_k_major"]), config["block_b"]
        return [small.replace({"batch": min(small.batch * step, problem.batch)}) for small in few]

    def terms(self, problem: FlashProblem, config: Config) -> Mapping[str, str]:
        return {"BlockSizes": as_python("BlockSizes", config)}


def _block_bytes(problem: FlashProblem, config: Config) -> int:
    """Two buffers of q, k, v and the result; float32 sums and statistics."""
    item, dim = DTYPE_BYTES[problem.dtype], problem.head_dim
    rows = config["block_b"] * config["block_q"]
    keys = config["block_b"] * config["block_k_major"]
    return 4 * item * dim * (rows + keys) + 4 * rows * (dim + 2 * LANES)
