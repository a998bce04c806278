"""What cross-entropy costs: rooflines, analytic times per config, and configs to start with. Loads no jax.

Three passes: ``forward`` (the losses), ``dx`` and ``dw``, the gradients of x and of w.
"""

from __future__ import annotations

from typing import Any, Literal

from autotune.chips import MIB, Chip
from autotune.kernel import Cost
from autotune.outcome import Config
from autotune.problem import DTYPE_BYTES
from kernels._tpu_model import LANES, SUBLANES, cdiv, dma_s, mxu_s, round_up, step_s, vpu_s
from kernels.cross_entropy.problem import CrossEntropyProblem

Pass = Literal["forward", "dx", "dw"]
OPERATIONS = {"forward": 9, "dx": 12, "dw": 12}  # of the vector unit, for each logit
VISIBLE = 0.3  # of the vector work: the rest hides behind the MXU
SMALLEST_VMEM = 16 * MIB  # of the chips' default limits
USABLE = 13 / 16  # of a limit: the compiler adds its own
# Multiplications of a step's products, in one bfloat16 pass: more take the compiler minutes.
LARGEST_PRODUCT = {"forward": 4 * 2**30, "dx": 3 * 2**30, "dw": 3 * 2**30}
FLOAT32_WORK = 4  # as much code as that many bfloat16 products


def cost(problem: CrossEntropyProblem, which: Pass) -> Cost:
    """The roofline: 2·tokens·hidden·vocab operations a product, each array moved once.

    A gradient takes two products, as the logits are computed again.
    """
    products = 1 if which == "forward" else 2
    x, w = (size * problem.hidden * DTYPE_BYTES[problem.dtype] for size in (problem.tokens, problem.vocab))
    moved = x + w + {"forward": 0, "dx": x, "dw": w}[which] + 12 * problem.tokens
    return Cost(2.0 * products * problem.tokens * problem.hidden * problem.vocab, moved, problem.dtype)


def estimate_ms(problem: CrossEntropyProblem, config: Config, chip: Chip, which: Pass) -> float:
    """Time of one call in milliseconds, from the blocks' MXU passes, vector work and fetches."""
    block_m, block_n = config["block_m"], config["block_n"]
    hidden, item = problem.hidden, DTYPE_BYTES[problem.dtype]
    block_k = min(config.get("block_k", hidden), hidden)
    steps = cdiv(hidden, block_k)
    products = 1 if which == "forward" else 2
    compute = products * mxu_s(block_m, block_n, block_k, problem.dtype, chip)
    vector = VISIBLE * vpu_s(OPERATIONS[which] * block_m * block_n, chip) / steps
    added_to = block_m * block_n if which == "forward" else hidden * (block_m if which == "dx" else block_n)
    if which != "forward" or steps > 1:  # loaded, added to and stored every step, beside the MXU but not for free
        vector += 0.2 * vpu_s(2 * added_to, chip, slots=1)

    tiles_m, tiles_n = cdiv(problem.tokens, block_m), cdiv(problem.vocab, block_n)
    x_s, w_s = (dma_s(block * hidden * item, chip) for block in (block_m, block_n))
    (outer, inner), (held, moving) = ((tiles_m, tiles_n), (x_s, w_s))
    if which == "dw":
        (outer, inner), (held, moving) = ((tiles_n, tiles_m), (w_s, x_s))
    once = held if which == "forward" else 2 * held  # a gradient is as large as what it is the gradient of
    ahead = config["held_buffers"] == 2
    moved = moving / steps + (once / (inner * steps) if ahead else 0.0)
    one = inner * steps * step_s(compute + vector, moved) + (0.0 if ahead else once)
    return 1e3 * (cdiv(outer, chip.cores) * one + once + moving)


def vmem_lower_bound(problem: CrossEntropyProblem, config: Config, which: Pass) -> int:
    """Bytes of VMEM that the blocks cannot do without; what the compiler adds comes on top.

    A block that changes along the grid has two buffers; one that never does may get away with one.
    """
    block_m, block_n = config["block_m"], config["block_n"]
    hidden, item = problem.hidden, DTYPE_BYTES[problem.dtype]
    wide, block_k = round_up(hidden, LANES), min(config.get("block_k", hidden), hidden)
    one_m, one_n = block_m >= problem.tokens, block_n >= problem.vocab
    held = config["held_buffers"]
    x, w = block_m * wide * item, round_up(block_k, SUBLANES) * block_n * item
    if which == "dw":
        blocks = x * (1 if one_m else 2) + w * (1 if one_n else held) + w * (1 if one_n else 2)
        return blocks + block_n * wide * (4 if problem.tied else item + 4)
    blocks = x * (1 if one_m else held) + w * (1 if one_n and block_k == hidden else 2)
    columns = 4 * block_m * LANES * 4  # what is kept of each token in every lane
    if which == "dx":
        return blocks + columns + x * (1 if one_m else 2) + 4 * block_m * wide
    return blocks + columns + (4 * block_m * block_n if block_k < hidden else 0)


def small_config(problem: CrossEntropyProblem, which: Pass) -> dict[str, Any]:
    """The 128-wide blocks that libraries ship with."""
    config = {"block_m": LANES, "block_n": LANES, "held_buffers": 2}
    return {**config, "block_k": min(problem.hidden, LANES)} if which == "forward" else config


def heuristic_config(problem: CrossEntropyProblem, which: Pass, vmem: int = SMALLEST_VMEM) -> dict[str, Any]:
    """A good start: of the blocks that fit a VMEM limit of so many bytes, those that fetch least.

    Where not even the smallest fit, these with the limit that they need; a chip has that much if it has
    `smallest_need`.
    """
    block_ms, block_ns = (
        [block for block in blocks if block == LANES or block <= round_up(size, LANES)]
        for size, blocks in ((problem.tokens, (1024, 512, 256, LANES)), (problem.vocab, (1024, 768, 512, 256, LANES)))
    )
    most = largest_product(problem, which)
    fitting = []
    for block_m in block_ms:
        for block_n in block_ns:
            for buffers in (2, 1):
                config = {"block_m": block_m, "block_n": block_n, "held_buffers": buffers}
                if which == "forward":
                    config["block_k"] = problem.hidden
                if _needs(problem, config, which) <= USABLE * vmem and products(problem, config, which) <= most:
                    fitting.append(config)
    if fitting:
        moved = "block_n" if which == "dw" else "block_m"
        best = max(fitting, key=lambda c: (c[moved] * min(c["block_m"], c["block_n"]), c[moved], c["held_buffers"]))
        return best if vmem == SMALLEST_VMEM else {**best, "vmem_limit_mib": vmem // MIB}
    config = {**small_config(problem, which), "held_buffers": 1}
    need = _needs(problem, config, which)
    return config if need <= USABLE * vmem else {**config, "vmem_limit_mib": cdiv(int(need / USABLE), MIB)}


def largest_product(problem: CrossEntropyProblem, which: Pass) -> int:
    """Multiplications that a step may have."""
    return LARGEST_PRODUCT[which] // (1 if problem.dtype == "bfloat16" else FLOAT32_WORK)


def products(problem: CrossEntropyProblem, config: Config, which: Pass) -> int:
    """Multiplications of one step."""
    depth = min(config.get("block_k", problem.hidden), problem.hidden)
    return (1 if which == "forward" else 2) * config["block_m"] * config["block_n"] * depth


def _needs(problem: CrossEntropyProblem, config: Config, which: Pass) -> int:
    """Bytes of VMEM that a config takes, about: the blocks, a tile of logits and what becomes of it, the product."""
    block_m, block_n, depth = config["block_m"], config["block_n"], config.get("block_k", problem.hidden)
    temporaries = (8 if problem.soft_cap is None else 16) * block_m * block_n
    if problem.tied:  # a block of w is turned on its way to the MXU
        temporaries += DTYPE_BYTES[problem.dtype] * depth * block_n
    summed = 0 if which == "forward" else block_n if which == "dw" else block_m
    if block_m == block_n == LANES or problem.dtype == "bfloat16":
        temporaries += 4 * depth * summed
        if which == "forward" and block_n > LANES:  # x goes through the MXU more than once, laid out for it
            temporaries += 2 * depth * block_m
    else:  # operands that go through the MXU more than once are kept in parts of 16 bits
        temporaries += 8 * depth * (block_m + block_n + summed)
    return vmem_lower_bound(problem, config, which) + temporaries


def smallest_need(problem: CrossEntropyProblem, which: Pass) -> int:
    """Bytes of VMEM without which not even the smallest blocks compile.

    Gradients keep whole rows of 128 tokens and of 128 columns: with buffers, sums and what is turned, up to nine
    such blocks.
    """
    if which == "forward":
        return _needs(problem, {**small_config(problem, which), "held_buffers": 1}, which)
    return 9 * LANES * round_up(problem.hidden, LANES) * DTYPE_BYTES[problem.dtype]
