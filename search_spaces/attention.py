"""The attention's search space, and attention as the tuner sees it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from autotune.chips import MIB, Chip
from autotune.kernel import ArraySpec, Cost, Kernel
from autotune.outcome import Config
from autotune.space import Constraint, Param, Space, aligned_divisors
from kernels._tpu_model import LANES
from kernels.attention import cost as model
from kernels.attention.problem import PROBLEMS, AttentionProblem
from search_spaces._common import (
    block_candidates,
    block_constraint,
    few_blocks,
    spread,
    uneven,
    vmem_limit_constraint,
    vmem_param,
)

if TYPE_CHECKING:
    import jax

LARGEST_BLOCK, LARGEST_TILE = 4096, 1024
LARGEST_CODE = 1024 * 1024
SEQUENCES = 4  # that share a row in the inputs of packed problems
MANY_PARTS = 8  # candidates of a tile's side, beside each block's largest
LARGE = 100_000_000  # scores of a validation problem that a CPU works through in some seconds


class AttentionKernel(Kernel):
    """Flash attention, forward: see `kernels.attention`."""

    name = "attention"
    summary = "softmax attention: causal, windowed, capped, packed, grouped-query; forward flash kernel"
    problem_type = AttentionProblem
    problems = PROBLEMS
    sources = (
        "kernels.attention.pallas",
        "kernels.attention.tiles",
        "kernels.attention.blocks",
        "kernels.attention.reference",
        "kernels._precision",
        "kernels._compiler",
    )
    relatives = {"attention": {name: name for name in ("block_q", "block_kv", "block_kv_compute")}}

    def space(self, problem: AttentionProblem, chip: Chip) -> Space:
        rows = model.query_rows(problem)
        block_q = block_candidates(problem.q_len, rows, largest=LARGEST_BLOCK)
        block_kv = block_candidates(problem.kv_len, LANES, largest=LARGEST_BLOCK)
        params = [
            Param("block_q", block_q, "queries per block"),
            Param("block_kv", block_kv, "keys fetched per grid step"),
            Param(
                "block_q_compute",
                tile_sides(block_q, rows),
                "queries per tile of scores",
                default=lambda config: model.tile_part(config["block_q"], rows, LARGEST_TILE),
            ),
            Param(
                "block_kv_compute",
                tile_sides(block_kv, LANES),
                "keys per tile of scores",
                default=lambda config: model.tile_part(config["block_kv"], LANES, LARGEST_TILE),
            ),
            Param("unroll", (1, 2, 4), "unmasked tiles per pass of the loop over keys", 1),
            Param("row_sum", ("vpu", "mxu"), "the unit that sums the softmax's denominators", "vpu"),
            vmem_param(chip),
        ]
        constraints = [
            block_constraint("block_q", "q_len", problem.q_len, rows),
            block_constraint("block_kv", "kv_len", problem.kv_len, LANES),
            *part_constraints("block_q", rows),
            *part_constraints("block_kv", LANES),
            Constraint("unroll must be between 1 and 8", lambda config: 1 <= config["unroll"] <= 8),
            Constraint(
                f"unroll x block_q_compute x block_kv_compute must be at most {LARGEST_CODE} scores: the compiler "
                "takes minutes for more, and the chip fetches its code anew every pass",
                lambda config: (
                    config["unroll"] * config["block_q_compute"] * config["block_kv_compute"] <= LARGEST_CODE
                ),
            ),
            vmem_limit_constraint(chip),
            Constraint(
                "the blocks alone need more VMEM than vmem_limit_mib: take smaller blocks or a higher limit",
                lambda config: model.vmem_lower_bound(problem, config) <= config["vmem_limit_mib"] * MIB,
            ),
        ]
        return Space(params, constraints)

    def arguments(self, problem: AttentionProblem) -> tuple[ArraySpec, ...]:
        q = ArraySpec((problem.batch, problem.heads, problem.q_len, problem.head_dim), problem.dtype)
        k, v = (
            ArraySpec((problem.batch, problem.kv_heads, problem.kv_len, dim), problem.dtype)
            for dim in (problem.head_dim, problem.value_dim)
        )
        return q, k, v, *self._segments(problem)

    def _segments(self, problem: AttentionProblem) -> tuple[ArraySpec, ...]:
        lengths = (problem.q_len, problem.kv_len) if problem.packed else ()
        return tuple(ArraySpec((problem.batch, length), "int32") for length in lengths)

    def make_inputs(self, problem: AttentionProblem, seed: int) -> tuple[jax.Array, ...]:
        """Random arrays; packed sequences are of random lengths, and the queries are the last of the keys."""
        if not problem.packed:
            return super().make_inputs(problem, seed)
        import jax.numpy as jnp
        import numpy as np

        *arrays, _, _ = super().make_inputs(problem, seed)
        rng, length = np.random.default_rng(seed), max(problem.q_len, problem.kv_len)
        ends = rng.integers(0, length, (problem.batch, SEQUENCES - 1))
        labels = rng.permuted(np.tile(np.arange(SEQUENCES), (problem.batch, 1)), axis=1)
        ids = np.take_along_axis(labels, (np.arange(length) >= ends[:, :, None]).sum(1), axis=1)
        of_queries = ids[:, length - problem.q_len :].copy()
        lost = rng.integers(problem.q_len)
        of_queries[0, lost : lost + problem.q_len // 8] = SEQUENCES  # They see no key.
        return *arrays, *(jnp.asarray(x, jnp.int32) for x in (of_queries, ids[:, length - problem.kv_len :]))

    def bind(self, problem: AttentionProblem, config: Config, *, interpret: Any = False) -> Callable[..., jax.Array]:
        from kernels.attention.pallas import attention_pallas

        return functools.partial(attention_pallas, **problem.options, **config, interpret=interpret)

    def reference(self, problem: AttentionProblem) -> Callable[..., jax.Array]:
        from kernels.attention.reference import attention_reference

        return functools.partial(attention_reference, **problem.options)

    def validation_reference(self, problem: AttentionProblem) -> Callable[..., jax.Array]:
        from kernels.attention.reference import attention_in_pieces

        return functools.partial(attention_in_pieces, **problem.options)

    def baselines(self, problem: AttentionProblem, chip: Chip) -> dict[str, Config]:
        block_kv = min(problem.kv_len, LANES)
        small = {"block_q": min(problem.q_len, LANES), "block_kv": block_kv}
        return {"default": self.space(problem, chip).parse(small)}

    def heuristic(self, problem: AttentionProblem, chip: Chip) -> Config:
        return self.space(problem, chip).parse(model.heuristic_config(problem))

    def cost(self, problem: AttentionProblem) -> Cost:
        return model.cost(problem)

    def estimate_ms(self, problem: AttentionProblem, config: Config, chip: Chip) -> float:
        return model.estimate_ms(problem, config, chip)

    def validation_problems(self, problem: AttentionProblem, config: Config) -> list[AttentionProblem]:
        """The problem's own path over a few blocks each way; three with uneven edges; several of all heads.

        The diagonal cuts the blocks where it does on the problem: kv_len - q_len is kept modulo the blocks'
        common step, which is what the kernel's choice of branches depends on; and so is a window, which is made to
        end within these few blocks. Blocks too large for three of them
        under each of several heads have three under one or two, and the heads are tested on a few tiles.
        """
        blocks = model.blocks_of(problem, config)
        block_q, block_kv = blocks.block_q, blocks.block_kv
        most = 3
        if problem.window is not None:
            # Wide enough for a tile without a mask, where the problem's own is; a block more, for some before it.
            step = math.lcm(block_q, block_kv)
            step = step if step <= 2 * max(block_q, block_kv) else max(block_q, block_kv)
            tiles = min(blocks.block_q_compute + blocks.block_kv_compute, problem.window)
            problem = problem.replace({"window": problem.window - (problem.window - tiles) // step * step})
            most = 4
        group = problem.heads // problem.kv_heads
        one, two = ({"batch": 1, "kv_heads": 1, "heads": heads} for heads in (1, min(2, group)))
        kv_heads = min(2, problem.kv_heads)
        several = {"batch": min(2, problem.batch), "kv_heads": kv_heads, "heads": kv_heads * min(3, group)}

        def ragged(full_q: int, full_kv: int, heads: dict[str, int]) -> AttentionProblem:
            """So many full blocks, then a full tile (where a block has more than one), and part of a tile."""
            q_len = full_q * block_q + _edge(block_q, blocks.block_q_compute)
            kv_len = full_kv * block_kv + _edge(block_kv, blocks.block_kv_compute)
            if problem.causal and q_len > kv_len:
                step = block_kv if full_kv else blocks.block_kv_compute
                kv_len += -(-(q_len - kv_len) // step) * step
            return problem.replace({"q_len": q_len, "kv_len": kv_len, **heads})

        fewer = range(most, 1, -1)
        own = (_shrunk(problem.replace(heads), block_q, block_kv, count) for count in fewer for heads in (two, one))
        exact = _cheap(own)
        three = _cheap(
            ragged(count - 1, count - 1, heads) for count in range(most, 2, -1) for heads in (several, two, one)
        )
        every = _cheap(ragged(*full, several) for full in ((2, 2), (1, 1), (0, 1), (0, 0)))
        return list(dict.fromkeys([exact, every, three]))


def few_of_each(problem: AttentionProblem, block_q: int, block_kv: int) -> list[Any]:
    """For kernels whose blocks divide the lengths: three blocks each way, or two, and the fewest under several heads.

    The diagonal stays where it is within the blocks.
    """
    group = problem.heads // problem.kv_heads
    one = {"batch": 1, "kv_heads": 1, "heads": 1}
    kv_heads = min(2, problem.kv_heads)
    several = {"batch": min(2, problem.batch), "kv_heads": kv_heads, "heads": kv_heads * min(3, group)}
    if problem.window is not None:
        step = math.lcm(block_q, block_kv)
        problem = problem.replace({"window": (problem.window - 1) % step + 1})
    own = [_shrunk(problem.replace(one), block_q, block_kv, most) for most in (3, 2)]
    every = [_shrunk(problem.replace(several), block_q, block_kv, most) for most in (2, 1)]
    return list(dict.fromkeys([_cheap(own), _cheap(every)]))


def _cheap(problems: Iterable[AttentionProblem]) -> AttentionProblem:
    """The first, and so the most telling one that a CPU runs in some seconds; else the last."""
    for problem in problems:
        if problem.batch * problem.heads * problem.q_len * problem.kv_len <= LARGE:
            return problem
    return problem


def _edge(block: int, tile: int) -> int:
    return tile + uneven(tile) if 2 * tile <= block else uneven(block)


def _shrunk(problem: AttentionProblem, block_q: int, block_kv: int, most: int) -> AttentionProblem:
    """The problem with up to `most` blocks each way, its last blocks and its diagonal as long and as placed as before.

    Equal lengths stay equal where the blocks allow, so that some blocks lie above the diagonal.
    """
    both = max(block_q, block_kv)
    if problem.q_len == problem.kv_len and both % min(block_q, block_kv) == 0:
        length = min(problem.q_len, few_blocks(problem.q_len, both, most))
        return problem.replace({"q_len": length, "kv_len": length})
    q_len = min(problem.q_len, few_blocks(problem.q_len, block_q, most))
    kv_len = min(problem.kv_len, few_blocks(problem.kv_len, block_kv, most))
    if problem.causal and q_len > kv_len:
        kv_len += -(-(q_len - kv_len) // block_kv) * block_kv
    return problem.replace({"q_len": q_len, "kv_len": kv_len})


def tile_sides(blocks: tuple[int, ...], align: int) -> tuple[int, ...]:
    """Tile sides: aligned parts of the blocks. Which of them divides which block, a constraint says."""
    divisors = (aligned_divisors(block, align, smallest=LANES) for block in blocks)
    parts = {part for found in divisors for part in found if part <= LARGEST_TILE}
    return tuple(sorted({*spread(parts, MANY_PARTS), *(model.tile_part(b, align, LARGEST_TILE) for b in blocks)}))


def part_constraints(block: str, align: int) -> list[Constraint]:
    """What the side of a tile must be."""
    part = f"{block}_compute"
    return [
        Constraint(
            f"{part} must be {block} itself or a positive multiple of {align}",
            lambda config: config[part] == config[block] or (config[part] > 0 and config[part] % align == 0),
        ),
        Constraint(f"{part} must divide {block}", lambda config: config[block] % config[part] == 0),
    ]
