"""What a gated MLP costs: as a matmul with two right-hand sides, and the activation. Loads no jax."""

from __future__ import annotations

from typing import Any

from autotune.chips import Chip
from autotune.kernel import Cost
from autotune.outcome import Config
from kernels._tpu_model import LANES, sublanes
from kernels.gated_mlp.problem import GatedMlpProblem
from kernels.matmul import cost as matmul

PRODUCTS = 2


def cost(problem: GatedMlpProblem) -> Cost:
    """The roofline: 4·m·n·k operations; each operand read once, the result written once."""
    return matmul.cost(problem, products=PRODUCTS)


def estimate_ms(problem: GatedMlpProblem, config: Config, chip: Chip) -> float:
    """Time of one call in milliseconds, from the blocks' MXU passes, fetches and steps."""
    return matmul.estimate_ms(problem, config, chip, products=PRODUCTS)


def vmem_lower_bound(problem: GatedMlpProblem, config: Config) -> int:
    """Bytes of VMEM that the blocks cannot do without; what the compiler adds comes on top."""
    return matmul.vmem_lower_bound(problem, config, products=PRODUCTS)


def heuristic_config(problem: GatedMlpProblem) -> dict[str, Any]:
    """A good start on every chip: tiles that fit the smallest default VMEM limit (16 MiB)."""
    wide = 1024 if problem.dtype == "bfloat16" else 512
    return {
        "block_m": matmul.largest_divisor(problem.m, sublanes(problem.dtype), wide),
        "block_n": matmul.largest_divisor(problem.n, LANES, 512),
        "block_k": matmul.largest_divisor(problem.k, LANES, 512),
    }
