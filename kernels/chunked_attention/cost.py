"""What the chunked attention costs: its roofline, its memory, and an analytic time per config. Loads no jax."""

from __future__ import annotations

import dataclasses
from typing import Any

from autotune.chips import GIB, Chip
from autotune.kernel import Cost
from autotune.outcome import Config
from autotune.problem import DTYPE_BYTES
from kernels._tpu_model import cdiv
from kernels.chunked_attention.problem import ChunkedAttentionProblem

FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 4
PRODUCTS = {"none": 6, "kv_step": 7, "q_chunk": 8}  # of each tile of scores, those computed again included
PASSES = {"none": 10, "kv_step": 11, "q_chunk": 12}  # over a tile's scores, read or written, of all that is no product
CPU_BYTES = GIB  # what a config may need where nothing is known of the device
MOST_UNROLLED = 4  # query chunks: each is compiled by itself, at half a second and more on a CPU


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the estimate assumes of one.

    Attributes:
        flops: Of float32 (on a TPU: of the problem's dtype) products, per second.
        nbytes: Per second, of what does not stay in `cache`.
        cached: Per second, of what does.
        cache: Bytes of a tile of scores that stays close from one operation to the next.
        step_s: Seconds that a step of a loop takes, both passes, whatever it computes.
    """

    flops: float
    nbytes: float
    cached: float
    cache: float
    step_s: float


# Fitted, with the passes below, to the times of 61 configs of the default problem on two x86-64 cores that others used
# too (mean error 12%). How it is split between products and passes is assumed: one cannot be told from the other.
CPU = Machine(flops=200e9, nbytes=3.3e9, cached=13e9, cache=2e6, step_s=10e-6)
STATE_PASSES = 2  # over the running sums, at each step
GRADIENT_PASSES = 6  # over keys, as each query chunk of a loop adds to the gradients of all keys and values
BRANCH_PASSES = 5.5  # over all tiles of scores that are kept beyond a branch: of those passed over, zeros


def machine_of(chip: Chip, dtype: str) -> Machine:
    """The chip's own figures; the assumed ones where it has none, which is a CPU."""
    if not chip.known:
        return CPU
    hbm = chip.hbm_gbps * 1e9
    return Machine(chip.peak_tflops(dtype) * 1e12, hbm, 10 * hbm, chip.vmem_bytes / 4, 5e-6)


def memory_limit(problem: ChunkedAttentionProblem, chip: Chip | None = None) -> float:
    """Bytes that a config may need beside the arrays; chunks of 128 with the strongest remat always may."""
    limit = chip.hbm_bytes / 2 if chip is not None and chip.known else CPU_BYTES
    return max(limit, peak_bytes(problem, _config(problem, 128, "scan", "q_chunk")))


def cost(problem: ChunkedAttentionProblem) -> Cost:
    """The roofline of both passes: six products over the scores that the mask leaves; each array moved once."""
    q_len, kv_len = problem.q_len, problem.kv_len
    pairs = q_len * kv_len - (q_len * (q_len - 1) // 2 if problem.causal else 0)
    products = FORWARD_PRODUCTS + BACKWARD_PRODUCTS
    flops = 2.0 * products * problem.batch * problem.heads * pairs * problem.head_dim
    queries, keys = problem.heads * q_len, problem.kv_heads * kv_len  # q, o, do, dq; k, v, dk, dv
    nbytes = 4.0 * problem.batch * (queries + keys) * problem.head_dim * DTYPE_BYTES[problem.dtype]
    return Cost(flops, nbytes, problem.dtype)


@dataclasses.dataclass(frozen=True)
class Work:
    """What the loops do.

    Attributes:
        q_chunks: Query chunks.
        steps: Pairs of a query chunk and a key chunk that a loop visits.
        tiles: Those of them that are computed, the others lying beyond the diagonal.
        tile: Scores of one, over batch and heads.
    """

    q_chunks: int
    steps: int
    tiles: int
    tile: int


def work(problem: ChunkedAttentionProblem, config: Config) -> Work:
    q_chunk, kv_chunk = config["q_chunk"], config["kv_chunk"]
    q_chunks, kv_chunks = cdiv(problem.q_len, q_chunk), cdiv(problem.kv_len, kv_chunk)
    tiles = steps = q_chunks * kv_chunks
    if problem.causal:
        offset = problem.kv_len - problem.q_len
        ends = (min((i + 1) * q_chunk, problem.q_len) + offset for i in range(q_chunks))
        tiles = sum(cdiv(end, kv_chunk) for end in ends)
    steps = steps if config["q_loop"] == "scan" else tiles
    return Work(q_chunks, steps, tiles, problem.batch * problem.heads * q_chunk * kv_chunk)


def kept_bytes(problem: ChunkedAttentionProblem, config: Config) -> float:
    """Bytes that the forward pass keeps for the backward one; of a query chunk, where that is computed again."""
    done = work(problem, config)
    state = 4.0 * problem.batch * problem.heads * config["q_chunk"] * (problem.head_dim + 2)
    scores = 4.0 * done.tile if config["remat"] != "kv_step" else 0.0
    chunks = done.q_chunks if config["remat"] == "q_chunk" else 1
    return done.steps / chunks * (state + scores)


def peak_bytes(problem: ChunkedAttentionProblem, config: Config) -> float:
    """Bytes in use at once beside the arrays and their gradients: what is kept, and three tiles in work."""
    return kept_bytes(problem, config) + 3 * 4.0 * work(problem, config).tile


def estimate_ms(problem: ChunkedAttentionProblem, config: Config, chip: Chip) -> float:
    """One after the other: products, passes over the scores, what else the loops move, and their steps."""
    machine, done, remat = machine_of(chip, problem.dtype), work(problem, config), config["remat"]
    flops = 2.0 * PRODUCTS[remat] * done.tiles * done.tile * problem.head_dim
    near = min(1.0, machine.cache / (4.0 * done.tile))
    rate = 1.0 / (near / machine.cached + (1.0 - near) / machine.nbytes)
    passes = 4.0 * PASSES[remat] * done.tiles * done.tile
    moved = STATE_PASSES * 4.0 * done.steps * problem.batch * problem.heads * config["q_chunk"] * problem.head_dim
    if config["q_loop"] == "scan":
        keys = 4.0 * problem.batch * problem.kv_heads * problem.kv_len * problem.head_dim
        moved += GRADIENT_PASSES * done.q_chunks * keys
        if problem.causal and remat == "none":
            moved += BRANCH_PASSES * 4.0 * done.steps * done.tile
    return 1e3 * (flops / machine.flops + passes / rate + moved / machine.nbytes + done.steps * machine.step_s)


def default_config(problem: ChunkedAttentionProblem, chip: Chip | None = None) -> dict[str, Any]:
    """Chunks of 128 in the loops of the published algorithm, which computes each key step's weights again.

    Where the sums that it keeps of each step do not fit, whole query chunks are computed again.
    """
    return _first_that_fits(problem, chip, [_config(problem, 128, "scan", remat) for remat in ("kv_step", "q_chunk")])


def heuristic_config(problem: ChunkedAttentionProblem, chip: Chip | None = None) -> dict[str, Any]:
    """Chunks of 256, fewer queries' ones unrolled; the least that is computed again as memory allows."""
    q_loop = "unroll" if cdiv(problem.q_len, 256) <= MOST_UNROLLED else "scan"
    remats = ("none", "kv_step", "q_chunk") if q_loop == "unroll" else ("kv_step", "q_chunk")
    configs = [_config(problem, 256, q_loop, remat) for remat in remats]
    return _first_that_fits(problem, chip, [*configs, _config(problem, 128, "scan", "q_chunk")])


def _config(problem: ChunkedAttentionProblem, chunk: int, q_loop: str, remat: str) -> dict[str, Any]:
    one = problem.q_len <= chunk  # A single query chunk needs no loop, and computing it again would spare nothing.
    return {
        "q_chunk": min(problem.q_len, chunk),
        "kv_chunk": min(problem.kv_len, chunk),
        "q_loop": "unroll" if one else q_loop,
        "remat": "kv_step" if one and remat == "q_chunk" else remat,
    }


def _first_that_fits(
    problem: ChunkedAttentionProblem, chip: Chip | None, configs: list[dict[str, Any]]
) -> dict[str, Any]:
    limit = memory_limit(problem, chip)
    return next((config for config in configs if peak_bytes(problem, config) <= limit), configs[-1])
