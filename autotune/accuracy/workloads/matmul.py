"""Matrix products: the registered tiled kernel, and XLA's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.accuracy.workloads._program import Program
from autotune.chips import Chip
from autotune.kernel import get_kernel


def registered(row: Mapping[str, Any], chip: Chip) -> Program:
    """The registered kernel ``matmul``: the standard tiling, k innermost, float32 accumulator in VMEM."""
    kernel = get_kernel("matmul")
    problem = kernel.problem_type.from_dict({name: row[name] for name in ("m", "n", "k")})
    blocks = {"block_m": row["bm"], "block_n": row["bn"], "block_k": row["bk"]}
    config = kernel.space(problem, chip).parse(blocks)
    return Program(kernel.bind(problem, config), kernel.arguments(problem))
