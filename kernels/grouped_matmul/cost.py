"""What a grouped matmul costs: its roofline, an analytic time per config, and configs to start with. Loads no jax."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from autotune.chips import MIB, Chip
from autotune.kernel import Cost
from autotune.outcome import Config
from autotune.problem import DTYPE_BYTES
from kernels._tpu_model import LANES, cdiv, dma_s, mxu_s, step_s, sublanes, vpu_s
from kernels.grouped_matmul.problem import GroupedProblem, routed
from kernels.matmul.cost import largest_divisor

VMEM = 12 * MIB  # of the 16 MiB that are the smallest default limit: the compiler adds its own


def cost(problem: GroupedProblem, *, drhs: bool = False) -> Cost:
    """The roofline: 2·m·n·k operations; rows once, and each group's matrix once if it has rows (drhs: in any case)."""
    m, n, k = problem.m, problem.n, problem.k
    matrices = problem.groups if drhs else np.count_nonzero(routed(m, problem.groups, problem.skew))
    nbytes = (m * k + m * n + int(matrices) * k * n) * DTYPE_BYTES[problem.dtype] + 4 * problem.groups
    return Cost(2.0 * m * n * k, nbytes, problem.dtype)


def estimate_ms(problem: GroupedProblem, config: Config, chip: Chip, *, drhs: bool = False) -> float:
    """Time of one call in milliseconds, from the visits' MXU passes, fetches and steps."""
    block_m, block_n, block_k, tile = blocks(problem, config)
    item = DTYPE_BYTES[problem.dtype]
    tiles_n, steps_k = cdiv(problem.n, block_n), cdiv(problem.k, block_k)
    visits, tiles = _work(problem.m, problem.groups, problem.skew, block_m, tile, sublanes(problem.dtype))
    per_visit, width = tiles / visits, block_m * item
    if drhs:
        outer = tiles_n * steps_k
        compute = per_visit * (mxu_s(block_k, block_n, tile, problem.dtype, chip) + vpu_s(block_k * block_n, chip))
        steps, rows = outer * visits, width * (block_k + block_n)
        matrices = outer * problem.groups * block_k * block_n * item
    else:
        compute = per_visit * mxu_s(tile, block_n, block_k, problem.dtype, chip)
        # The result goes through a select, and is added to the sums where there are several steps.
        compute += per_visit * vpu_s((2 if steps_k > 1 else 1) * tile * block_n, chip, slots=1)
        outer, steps, rows = tiles_n, tiles_n * visits * steps_k, width * (block_k + block_n / steps_k)
        fetches = visits * steps_k if steps_k > 1 else min(problem.groups, visits)
        matrices = tiles_n * fetches * block_k * block_n * item
    share = cdiv(outer, chip.cores) / outer
    steps *= share
    total = steps * step_s(compute, dma_s(rows + matrices / max(steps, 1), chip))
    if config.get("transfers") != "early" and (drhs or steps_k == 1):  # a matrix comes and goes beside one visit
        alone = max(dma_s(block_k * block_n * item, chip) - compute, 0.0)
        total += share * outer * min(problem.groups, visits) * alone
    return 1e3 * (total + dma_s(rows + block_k * block_n * item, chip))  # the first fetch has nothing to hide behind


@functools.lru_cache(maxsize=4096)
def _work(m: int, groups: int, skew: float, block_m: int, tile: int, align: int) -> tuple[int, int]:
    """Visits of the problem's own groups, and the compute tiles of all of them."""
    ends = np.cumsum(routed(m, groups, skew), dtype=np.int64)
    edges = np.union1d(ends, np.append(np.arange(0, m, block_m), m))  # where a visit ends and the next begins
    starts, ends = edges[:-1], edges[1:]
    first = starts if tile == block_m else starts // align * align
    parts = np.ones_like(starts) if tile == block_m else -(-(ends - first) // tile)
    return len(starts), int(parts.sum())


def vmem_lower_bound(problem: GroupedProblem, config: Config, *, drhs: bool = False) -> int:
    """Bytes of VMEM that the blocks cannot do without; what the compiler adds comes on top."""
    block_m, block_n, block_k, _ = blocks(problem, config)
    sides = block_m * block_k, block_k * block_n, block_m * block_n
    sums = block_k * block_n if drhs else block_m * block_n if block_k < problem.k else 0
    return 2 * sum(sides) * DTYPE_BYTES[problem.dtype] + 4 * sums


def blocks(problem: GroupedProblem, config: Config) -> tuple[int, int, int, int]:
    """block_m, block_n, block_k and block_m_compute as far as the problem goes."""
    block_m = min(problem.m, config["block_m"])
    tile = min(block_m, config.get("block_m_compute") or block_m)
    return block_m, min(problem.n, config["block_n"]), min(problem.k, config["block_k"]), tile


def heuristic_config(problem: GroupedProblem, *, drhs: bool = False, cores: int = 1) -> dict[str, Any]:
    """A good start on every chip: blocks that fit the smallest default VMEM limit, tiles as short as most groups.

    Args:
        drhs: Whether it is for the gradient of rhs.
        cores: Those that act as one device, and share the tiles of columns.
    """
    m, n, k = problem.m, problem.n, problem.k
    bfloat16 = DTYPE_BYTES[problem.dtype] == 2
    block_m = largest_divisor(m, sublanes(problem.dtype), 256)
    tile = LANES if block_m % LANES == 0 else block_m
    wide = 512 if bfloat16 else 256

    def config(columns: int, depth: int) -> dict[str, Any]:
        return {
            "block_m": block_m,
            "block_n": largest_divisor(n, LANES, columns),
            "block_k": largest_divisor(k, LANES, depth),
            "block_m_compute": tile,
        }

    # The whole k first (drhs: the largest tile of a result), as long as the columns keep the MXU busy.
    tried = [config(columns, k) for columns in (4 * wide, 2 * wide, wide, wide // 2)]
    tried += [config(wide, depth) for depth in (1024, 512, 256)]
    tried = [one for one in tried if vmem_lower_bound(problem, one, drhs=drhs) + _taken(one, drhs) <= VMEM]
    shared = [one for one in tried if cdiv(n, one["block_n"]) * (cdiv(k, one["block_k"]) if drhs else 1) >= cores]
    found = next(iter(shared or tried), None)
    if found is None:
        return config(LANES, LANES)
    even = all(size % found[f"block_{field}"] == 0 for field, size in (("m", m), ("n", n), ("k", k)))
    return {**found, "transfers": "early"} if even and (drhs or found["block_k"] == k) else found


def _taken(config: Config, drhs: bool) -> int:
    """Bytes of VMEM that the compiler takes for a product, or for operands made ready, beside the blocks."""
    tile, columns, depth = (config[name] for name in ("block_m_compute", "block_n", "block_k"))
    return 4 * (depth * columns + tile * (depth + columns) if drhs else tile * columns)
