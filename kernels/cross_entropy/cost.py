"""What cross-entropy costs: its roofline, an analytic time per config, and a config to start with. Loads no jax."""

from __future__ import annotations

from typing import Any

from autotune.chips import MIB, Chip
from autotune.kernel import Cost
from autotune.outcome import Config
from autotune.problem import DTYPE_BYTES
from kernels._tpu_model import LANES, cdiv, dma_s, mxu_s, round_up, step_s, vpu_s
from kernels.cross_entropy.problem import CrossEntropyProblem

FORWARD_OPERATIONS = 9  # of the vector unit, for each logit


def forward_cost(problem: CrossEntropyProblem) -> Cost:
    """The roofline: 2·tokens·hidden·vocab operations; x, w and the labels read once, two float32 a token written."""
    return Cost(_product_flops(problem), _operand_bytes(problem) + 12 * problem.tokens, problem.dtype)


def _product_flops(problem: CrossEntropyProblem) -> float:
    return 2.0 * problem.tokens * problem.hidden * problem.vocab


def _operand_bytes(problem: CrossEntropyProblem) -> int:
    return (problem.tokens + problem.vocab) * problem.hidden * DTYPE_BYTES[problem.dtype]


def forward_estimate_ms(problem: CrossEntropyProblem, config: Config, chip: Chip) -> float:
    """Time of one call in milliseconds, from the blocks' MXU passes, vector work and fetches."""
    block_m, block_n, block_k = config["block_m"], config["block_n"], config["block_k"]
    item = DTYPE_BYTES[problem.dtype]
    steps = cdiv(problem.hidden, block_k)
    compute = mxu_s(block_m, block_n, block_k, problem.dtype, chip)
    vector = vpu_s(FORWARD_OPERATIONS * block_m * block_n, chip) / steps
    if steps > 1:  # the sums are loaded, added to and stored every step, beside the MXU but not for free
        vector += 0.2 * vpu_s(2 * block_m * block_n, chip, slots=1)
    tiles_m, tiles_n = cdiv(problem.tokens, block_m), cdiv(problem.vocab, block_n)
    x_s = dma_s(block_m * problem.hidden * item, chip)
    fetch = dma_s(block_k * block_n * item, chip)
    held = config["held_buffers"] == 2
    one = tiles_n * steps * step_s(compute + vector / 2, fetch + (x_s / (tiles_n * steps) if held else 0.0))
    one += 0.0 if held else x_s
    return 1e3 * (cdiv(tiles_m, chip.cores) * one + x_s + fetch)
