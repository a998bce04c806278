"""The search spaces of JAX's paged and ragged paged attention, and these as the tuner sees them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.chips import MIB, Chip
from autotune.kernel import ArraySpec, Cost
from autotune.outcome import Config
from autotune.problem import DTYPE_BYTES
from autotune.space import Constraint, Param, Space, aligned_divisors
from kernels._tpu_model import LANES, cdiv, dma_s, step_s, vpu_s
from kernels.stock.problem import PAGED_PROBLEMS, RAGGED_PROBLEMS, PagedProblem, RaggedPagedProblem
from search_spaces._common import vmem_limit_constraint, vmem_param
from search_spaces.stock._common import StockKernel, as_python, interpreted

if TYPE_CHECKING:
    import jax

SOFTMAX_OPERATIONS = 10.0  # per score, vector operations; not fitted
PAGE_S = 0.1e-6  # to start and to wait for one page's copy
MOST_PAGES = 512


class _PagedKernel(StockKernel):
    """What both have in common: every sequence has the same tokens, whose pages lie anywhere."""

    def _tables(self, problem: PagedProblem | RaggedPagedProblem, sequences: int, seed: int) -> np.ndarray:
        """``[sequences, pages_per_seq]`` int32: a page for each place, none twice."""
        order = np.random.default_rng(seed).permutation(sequences * problem.pages_per_seq)
        return order.reshape(sequences, problem.pages_per_seq).astype(np.int32)

    def _scores_ms(self, problem: Any, sequences: int, queries: float, pages: int, chip: Chip) -> float:
        """Time for `sequences` times `queries` tokens against kv_len keys, in blocks of so many pages."""
        tokens = pages * problem.page_size
        blocks = cdiv(problem.kv_len, tokens)
        dma = dma_s(2 * problem.kv_heads * tokens * problem.head_dim * DTYPE_BYTES[problem.dtype], chip)
        scores = queries * problem.heads * tokens
        compute = vpu_s(SOFTMAX_OPERATIONS * scores, chip) + PAGE_S * pages
        return 1e3 * sequences * blocks * step_s(compute, dma)


class StockPagedKernel(_PagedKernel):
    """``paged_attention(..., pages_per_compute_block=...)``."""

    name = "stock_paged_attention"
    summary = "JAX's paged attention (a decode step): pages_per_compute_block, megacore_mode"
    problem_type = PagedProblem
    problems = PAGED_PROBLEMS
    library = "paged_attention.paged_attention_kernel"

    def space(self, problem: PagedProblem, chip: Chip) -> Space:
        modes = ("none", "kv_head", "batch") if chip.cores > 1 else ("none",)
        pages = aligned_divisors(problem.pages_per_seq, 1)
        params = [
            Param(
                "pages_per_compute_block",
                tuple(count for count in pages if count <= MOST_PAGES),
                "pages fetched, and worked on, at a time",
            ),
            Param("megacore_mode", modes, "what the chip's two cores share out", "none"),
        ]
        constraints = [
            Constraint(
                f"pages_per_compute_block must divide pages_per_seq={problem.pages_per_seq}",
                lambda config: config["pages_per_compute_block"] in pages,
            ),
            Constraint(
                f"megacore_mode=kv_head needs an even kv_heads, not {problem.kv_heads}",
                lambda config: config["megacore_mode"] != "kv_head" or problem.kv_heads % 2 == 0,
            ),
            Constraint(
                f"megacore_mode=batch needs an even batch, not {problem.batch}",
                lambda config: config["megacore_mode"] != "batch" or problem.batch % 2 == 0,
            ),
        ]
        return Space(params, constraints)

    def arguments(self, problem: PagedProblem) -> tuple[ArraySpec, ...]:
        q = ArraySpec((problem.batch, problem.heads, problem.head_dim), problem.dtype)
        count = problem.batch * problem.pages_per_seq
        pages = ArraySpec((problem.kv_heads, count, problem.page_size, problem.head_dim), problem.dtype)
        lengths = np.full(problem.batch, problem.kv_len, np.int32)
        table = self._tables(problem, problem.batch, 0)
        return (
            q,
            pages,
            pages,
            ArraySpec(lengths.shape, "int32", example=lengths),
            ArraySpec(table.shape, "int32", example=table),
        )

    def make_inputs(self, problem: PagedProblem, seed: int) -> tuple[jax.Array, ...]:
        """Random arrays; sequences as long as the problem says, but the first of them one token shorter by one each."""
        import jax.numpy as jnp

        q, k_pages, v_pages, _, _ = super().make_inputs(problem, seed)
        shorter = np.minimum(np.arange(problem.batch), problem.kv_len - 1)[::-1]
        lengths = np.asarray(problem.kv_len - shorter, np.int32)
        table = self._tables(problem, problem.batch, seed)
        scaled = (q * problem.head_dim**-0.5).astype(q.dtype)
        return scaled, k_pages, v_pages, jnp.asarray(lengths), jnp.asarray(table)

    def bind(self, problem: PagedProblem, config: Config, *, interpret: Any = False) -> Callable[..., jax.Array]:
        from kernels.stock.paged import paged

        return interpreted(functools.partial(paged, config=config), interpret)

    def reference(self, problem: PagedProblem) -> Callable[..., jax.Array]:
        from kernels.stock.paged import paged_reference

        return paged_reference

    def baselines(self, problem: PagedProblem, chip: Chip) -> dict[str, Config]:
        """The library names no default: what its own benchmarks take, as far as the sequence goes."""
        space = self.space(problem, chip)
        count = max(count for count in space.params["pages_per_compute_block"].candidates if count <= 8)
        return {"default": space.parse({"pages_per_compute_block": count})}

    def cost(self, problem: PagedProblem) -> Cost:
        scores = problem.batch * problem.heads * problem.kv_len
        rows = 2 * problem.batch * (problem.heads + problem.kv_heads * problem.kv_len)
        return Cost(
            4.0 * scores * problem.head_dim, rows * problem.head_dim * DTYPE_BYTES[problem.dtype], problem.dtype
        )

    def estimate_ms(self, problem: PagedProblem, config: Config, chip: Chip) -> float:
        cores = 1 if config["megacore_mode"] == "none" else chip.cores
        return self._scores_ms(problem, problem.batch, 1, config["pages_per_compute_block"], chip) / cores

    def validation_problems(self, problem: PagedProblem, config: Config) -> list[PagedProblem]:
        """Three blocks of pages (or two) of which the last is not full, for two heads and three sequences, or two."""
        count = config["pages_per_compute_block"]
        blocks = min(3, problem.pages_per_seq // count)
        kv_heads = 2 if problem.kv_heads % 2 == 0 else 1
        sizes = {"batch": 2, "kv_heads": kv_heads, "heads": kv_heads * (problem.heads // problem.kv_heads)}
        length = max(1, blocks * count * problem.page_size - problem.page_size // 2 - 1)
        return [problem.replace({**sizes, "pages_per_seq": blocks * count, "kv_len": length})]

    def terms(self, problem: PagedProblem, config: Config) -> Mapping[str, str]:
        mode = None if config["megacore_mode"] == "none" else config["megacore_mode"]
        pages = config["pages_per_compute_block"]
        return {"paged_attention": f"pages_per_compute_block={pages}, megacore_mode={mode!r}"}


class StockRaggedPagedKernel(_PagedKernel):
    """``ragged_paged_attention(..., num_kv_pages_per_block=..., num_queries_per_block=...)``."""

    name = "stock_ragged_paged_attention"
    summary = "JAX's ragged paged attention (prefill and decode), to predict only: the TPU interpreter cannot run it"
    problem_type = RaggedPagedProblem
    problems = RAGGED_PROBLEMS
    library = "ragged_paged_attention.kernel"
    relatives = {"ragged_paged_attention": {"num_kv_pages_per_block": "pages", "num_queries_per_block": "queries"}}

    def space(self, problem: RaggedPagedProblem, chip: Chip) -> Space:
        powers = [1 << power for power in range(10)]
        pages = tuple(count for count in powers if count <= problem.pages_per_seq)
        queries = tuple(count for count in powers if 8 <= count <= problem.tokens) or (problem.tokens,)
        params = [
            Param("num_kv_pages_per_block", pages, "pages fetched, and worked on, at a time"),
            Param("num_queries_per_block", queries, "query tokens per block"),
            vmem_param(chip),
        ]
        constraints = [
            Constraint(
                f"num_kv_pages_per_block must be between 1 and pages_per_seq={problem.pages_per_seq}",
                lambda config: 1 <= config["num_kv_pages_per_block"] <= problem.pages_per_seq,
            ),
            Constraint(
                f"num_queries_per_block must be between 1 and tokens={problem.tokens}",
                lambda config: 1 <= config["num_queries_per_block"] <= problem.tokens,
            ),
            vmem_limit_constraint(chip),
            Constraint(
                "the blocks alone need more VMEM than vmem_limit_mib: take smaller blocks or a higher limit",
                lambda config: self._block_bytes(problem, config) <= config["vmem_limit_mib"] * MIB,
            ),
        ]
        return Space(params, constraints)

    def _block_bytes(self, problem: RaggedPagedProblem, config: Config) -> int:
        """For a kv head: two buffers of pages, of queries and of results; float32 sums and statistics."""
        item, dim = DTYPE_BYTES[problem.dtype], problem.head_dim
        rows = config["num_queries_per_block"] * problem.heads // problem.kv_heads
        pages = config["num_kv_pages_per_block"] * problem.page_size * 2
        return 2 * item * dim * (pages + 2 * rows) + 4 * rows * (dim + 2 * LANES)

    def arguments(self, problem: RaggedPagedProblem) -> tuple[ArraySpec, ...]:
        lengths = np.full(problem.sequences, problem.kv_len, np.int32)
        starts = np.arange(problem.sequences + 1, dtype=np.int32) * (problem.tokens // problem.sequences)
        table, count = self._tables(problem, problem.sequences, 0), np.array([problem.sequences], np.int32)
        pages = (problem.sequences * problem.pages_per_seq, problem.page_size, 2 * problem.kv_heads, problem.head_dim)
        return (
            ArraySpec((problem.tokens, problem.heads, problem.head_dim), problem.dtype),
            ArraySpec(pages, problem.dtype),
            *(ArraySpec(array.shape, "int32", example=array) for array in (lengths, table, starts, count)),
        )

    def make_inputs(self, problem: RaggedPagedProblem, seed: int) -> tuple[jax.Array, ...]:
        """Random arrays; the first sequence brings a single token, the others what is left; lengths differ."""
        import jax.numpy as jnp

        q, pages, *_ = super().make_inputs(problem, seed)
        each, count = problem.tokens // problem.sequences, problem.sequences
        new = np.full(count, each)
        if count > 1:
            new[0], new[-1] = 1, min(2 * each - 1, problem.kv_len)
            new[1] += problem.tokens - new.sum() if count > 2 else 0
        new = np.minimum(new, problem.kv_len)
        starts = np.concatenate([[0], np.cumsum(new)])
        lengths = np.maximum(problem.kv_len - np.arange(count)[::-1], new)
        arrays = (lengths, self._tables(problem, count, seed), starts, np.array([count]))
        scaled = (q * problem.head_dim**-0.5).astype(q.dtype)
        return scaled, pages, *(jnp.asarray(array, jnp.int32) for array in arrays)

    def bind(self, problem: RaggedPagedProblem, config: Config, *, interpret: Any = False) -> Callable[..., jax.Array]:
        from kernels.stock.paged import ragged

        if interpret:
            raise NotImplementedError(
                "jax's TPU interpreter (0.10 to 0.12) cannot run this kernel, which reshapes references to memory: "
                "its configs can be predicted, but not shown right, so that no preset is made of them"
            )
        return functools.partial(ragged, config=config)

    def reference(self, problem: RaggedPagedProblem) -> Callable[..., jax.Array]:
        from kernels.stock.paged import ragged_reference

        return ragged_reference

    def baselines(self, problem: RaggedPagedProblem, chip: Chip) -> dict[str, Config]:
        """What the library takes for shapes that its table does not have."""
        pages, queries = (32, 32) if chip.name == "v4" else (128, 32)
        sizes = {
            "num_kv_pages_per_block": min(problem.pages_per_seq, pages),
            "num_queries_per_block": min(problem.tokens, queries),
        }
        return {"default": self.space(problem, chip).parse(sizes)}

    def heuristic(self, problem: RaggedPagedProblem, chip: Chip) -> Config:
        """Blocks that fit the default VMEM limit: what the kernel needs beside them no estimate knows."""
        sizes = {
            "num_kv_pages_per_block": min(problem.pages_per_seq, max(1, 512 // problem.page_size)),
            "num_queries_per_block": min(problem.tokens, 32),
        }
        return self.space(problem, chip).parse(sizes)

    def cost(self, problem: RaggedPagedProblem) -> Cost:
        each = problem.tokens / problem.sequences
        pairs = problem.tokens * (problem.kv_len - (each - 1) / 2)
        rows = 2 * (problem.tokens * problem.heads + problem.sequences * problem.kv_heads * problem.kv_len)
        nbytes = rows * problem.head_dim * DTYPE_BYTES[problem.dtype]
        return Cost(4.0 * pairs * problem.heads * problem.head_dim, nbytes, problem.dtype)

    def estimate_ms(self, problem: RaggedPagedProblem, config: Config, chip: Chip) -> float:
        each = problem.tokens // problem.sequences
        queries = min(config["num_queries_per_block"], each)
        times = problem.sequences * cdiv(each, queries)
        return self._scores_ms(problem, times, queries, config["num_kv_pages_per_block"], chip)

    def validation_problems(self, problem: RaggedPagedProblem, config: Config) -> list[RaggedPagedProblem]:
        """Three sequences over a few blocks of queries and of pages, the last of which are not full."""
        count, queries = config["num_kv_pages_per_block"], config["num_queries_per_block"]
        blocks = min(3, cdiv(problem.pages_per_seq, count))
        pages = min(problem.pages_per_seq, blocks * count)
        length = max(1, pages * problem.page_size - problem.page_size // 2 - 1)
        each = min(length, max(2, 3 * queries // 4))
        sizes = {"tokens": 3 * each, "sequences": 3, "pages_per_seq": pages, "kv_len": length}
        return [problem.replace(sizes)]

    def terms(self, problem: RaggedPagedProblem, config: Config) -> Mapping[str, str]:
        fields = dict(config)
        fields["vmem_limit_bytes"] = fields.pop("vmem_limit_mib") * MIB
        return {"ragged_paged_attention": as_python("dict", fields)}
