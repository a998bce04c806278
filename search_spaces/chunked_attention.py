"""The chunked attention's search space, and the chunked attention as the tuner sees it: on any platform."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.chips import GIB, Chip
from autotune.kernel import ArraySpec, Cost, Kernel
from autotune.outcome import Config
from autotune.space import Constraint, Param, Space
from kernels._tpu_model import cdiv
from kernels.chunked_attention import cost as model
from kernels.chunked_attention.problem import PROBLEMS, ChunkedAttentionProblem
from search_spaces._common import few_blocks, uneven

if TYPE_CHECKING:
    import jax

WITHOUT_LOOP = (("unroll", "none"), ("unroll", "kv_step"))
SMALLEST, MANY = 64, 6  # the shortest chunk, and how many lengths of one there are
FAINT = 2.0**-5  # times as long is the gradient of a result that one key alone decides
LARGE = 80_000_000  # scores of a validation problem that a CPU works through in some seconds and little memory


class ChunkedAttentionKernel(Kernel):
    """Attention in chunks, and its gradients by JAX: see `kernels.chunked_attention`."""

    name = "chunked_attention"
    summary = "softmax attention over chunks in plain JAX, forward and backward; for CPU, GPU and TPU"
    problem_type = ChunkedAttentionProblem
    problems = PROBLEMS
    platforms: ClassVar[Sequence[str]] = ("cpu", "gpu", "tpu")
    sources = (
        "kernels.chunked_attention.chunked",
        "kernels.chunked_attention.reference",
        "kernels.attention.reference",
        "kernels._precision",
    )

    def space(self, problem: ChunkedAttentionProblem, chip: Chip) -> Space:
        limit = model.memory_limit(problem, chip)
        params = [
            Param("q_chunk", chunk_candidates(problem.q_len), "queries that go over the keys together"),
            Param("kv_chunk", chunk_candidates(problem.kv_len), "keys per step"),
            Param(
                "q_loop",
                ("unroll", "scan"),
                "the loop over query chunks: a program part for each, or one",
                default=lambda config: "scan" if config["q_chunk"] < problem.q_len else "unroll",
            ),
            Param("remat", ("none", "kv_step", "q_chunk"), "what the backward pass computes again", "none"),
        ]
        constraints = [
            *(
                Constraint(
                    f"{name} must be between 1 and the {of} length of {length}",
                    lambda config, name=name, length=length: 1 <= config[name] <= length,
                )
                for name, of, length in (("q_chunk", "queries'", problem.q_len), ("kv_chunk", "keys'", problem.kv_len))
            ),
            Constraint(
                f"q_loop=unroll takes {model.MOST_UNROLLED} query chunks at most, as each is compiled by itself",
                lambda config: (
                    config["q_loop"] == "scan" or cdiv(problem.q_len, config["q_chunk"]) <= model.MOST_UNROLLED
                ),
            ),
            Constraint(
                "one query chunk is no loop: q_loop must be unroll, and remat none or kv_step",
                lambda config: config["q_chunk"] < problem.q_len or (config["q_loop"], config["remat"]) in WITHOUT_LOOP,
            ),
            Constraint(
                f"both passes need more than {limit / GIB:.2g} GiB beside the arrays: use smaller chunks or remat",
                lambda config: model.peak_bytes(problem, config) <= limit,
            ),
        ]
        return Space(params, constraints)

    def arguments(self, problem: ChunkedAttentionProblem) -> tuple[ArraySpec, ...]:
        """q, k, v and the result's gradient."""
        q = ArraySpec((problem.batch, problem.heads, problem.q_len, problem.head_dim), problem.dtype)
        kv = ArraySpec((problem.batch, problem.kv_heads, problem.kv_len, problem.head_dim), problem.dtype)
        return q, kv, kv, q

    def bind(self, problem: ChunkedAttentionProblem, config: Config, *, interpret: Any = False) -> Callable[..., Any]:
        """The training function: the result and the gradients of q, k and v. Nothing needs an interpreter."""
        from kernels.chunked_attention.chunked import chunked_attention_jax
        from kernels.chunked_attention.reference import with_gradients

        return with_gradients(functools.partial(chunked_attention_jax, causal=problem.causal, **config))

    def make_inputs(self, problem: ChunkedAttentionProblem, seed: int) -> tuple[jax.Array, ...]:
        """Random; the result's gradient is `FAINT` at a query that sees one key.

        Its query's own gradient is zero, and what rounding leaves of it would look large beside those of even weights.
        """
        *arrays, grad = super().make_inputs(problem, seed)
        if problem.causal and problem.q_len == problem.kv_len:
            grad = grad.at[:, :, 0].multiply(FAINT)
        return *arrays, grad

    def reference(self, problem: ChunkedAttentionProblem) -> Callable[..., Any]:
        from kernels.chunked_attention.reference import chunked_attention_reference, with_gradients

        return with_gradients(functools.partial(chunked_attention_reference, causal=problem.causal))

    def baselines(self, problem: ChunkedAttentionProblem, chip: Chip) -> dict[str, Config]:
        """``default``: chunks of 128 in the algorithm as published (Rabe and Staats, 2021): see `default_config`."""
        return {"default": model.default_config(problem, chip)}

    def heuristic(self, problem: ChunkedAttentionProblem, chip: Chip) -> Config:
        return model.heuristic_config(problem, chip)

    def cost(self, problem: ChunkedAttentionProblem) -> Cost:
        return model.cost(problem)

    def estimate_ms(self, problem: ChunkedAttentionProblem, config: Config, chip: Chip) -> float:
        return model.estimate_ms(problem, config, chip)

    def validation_problems(self, problem: ChunkedAttentionProblem, config: Config) -> list[ChunkedAttentionProblem]:
        """The problem's own path over a few chunks; three with uneven edges, of several heads and sequences.

        Chunks too large for that have fewer heads, then fewer chunks, and the heads are tested on parts of a chunk.
        """
        q_chunk, kv_chunk = min(config["q_chunk"], problem.q_len), min(config["kv_chunk"], problem.kv_len)
        kv_heads = min(2, problem.kv_heads)
        several = {"batch": min(2, problem.batch), "kv_heads": kv_heads, "heads": kv_heads * min(3, problem.group)}
        one = {"batch": 1, "kv_heads": 1, "heads": 1}

        def own(most: int, heads: dict[str, int]) -> ChunkedAttentionProblem:
            if problem.q_len == problem.kv_len:  # The diagonal stays where it is in the chunks.
                q_len = kv_len = min(problem.q_len, few_blocks(problem.q_len, max(q_chunk, kv_chunk), most))
            else:
                q_len = min(problem.q_len, few_blocks(problem.q_len, q_chunk, most))
                kv_len = min(problem.kv_len, few_blocks(problem.kv_len, kv_chunk, most))
            return lengths(q_len, kv_len, heads)

        def ragged(full: int, heads: dict[str, int]) -> ChunkedAttentionProblem:
            return lengths(full * q_chunk + uneven(q_chunk), full * kv_chunk + uneven(kv_chunk), heads)

        def lengths(q_len: int, kv_len: int, heads: dict[str, int]) -> ChunkedAttentionProblem:
            if problem.causal:  # No more queries than keys, and fewer where the problem has fewer.
                fewest = q_len + (problem.q_len < problem.kv_len)
                kv_len += cdiv(max(fewest - kv_len, 0), kv_chunk) * kv_chunk
            return problem.replace({"q_len": q_len, "kv_len": kv_len, **heads})

        exact = _cheap(own(most, heads) for most in (3, 2) for heads in (several, one))
        three = _cheap(ragged(full, heads) for full in (2, 1, 0) for heads in (several, one))
        every = _cheap(ragged(full, several) for full in (2, 1, 0))
        return list(dict.fromkeys([three, every, exact]))


def _cheap(problems: Iterable[ChunkedAttentionProblem]) -> ChunkedAttentionProblem:
    """The first, and so the most telling one that a CPU runs in some seconds; else the last."""
    for problem in problems:
        if problem.batch * problem.heads * problem.q_len * problem.kv_len <= LARGE:
            return problem
    return problem


def chunk_candidates(length: int) -> tuple[int, ...]:
    """Powers of two below `length`, the largest few, and the whole of it."""
    powers = [1 << exponent for exponent in range(length.bit_length()) if SMALLEST <= 1 << exponent < length]
    return *powers[1 - MANY :], length
