"""What an instance of a kernel that JAX ships is, and instances from real models. Loads no jax."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from autotune.errors import UsageError
from autotune.problem import Problem
from kernels._tpu_model import LANES
from kernels.attention.problem import AttentionProblem, HeadsProblem
from kernels.grouped_matmul.problem import GroupedMatmulProblem
from kernels.matmul.problem import TiledProblem

# On a TPU these kernels multiply float32 in one bfloat16 pass, which a CPU's interpreter does not show.
BFLOAT16 = ("bfloat16",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StockProblem(Problem):
    """What all of them have: they set no VMEM limit of their own.

    Attributes:
        scoped_vmem_mib: VMEM that the whole program is compiled with, MiB: what ``--xla_tpu_scoped_vmem_limit_kib``
            says in ``LIBTPU_INIT_ARGS`` (98304 KiB there are 96 here). None is the chip's default.
    """

    dtypes: ClassVar[tuple[str, ...]] = BFLOAT16

    scoped_vmem_mib: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplashProblem(StockProblem, AttentionProblem):
    """Splash attention: causal or a window's mask, grouped queries, soft cap, segments. Lengths are multiples of 128.

    The kernel does not scale the scores: q comes scaled, as MaxText gives it.
    """

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "scale": 1.0}

    def check(self) -> None:
        super().check()
        _check_lengths(self)
        if self.packed and self.q_len > self.kv_len:
            raise UsageError(f"q_len={self.q_len}: with packed=true at most kv_len={self.kv_len}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashProblem(StockProblem, HeadsProblem):
    """Flash attention: causal or not, as many kv heads as heads."""

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def options(self) -> dict[str, Any]:
        """What the reference takes as keyword arguments."""
        return {"causal": self.causal}

    # What attention's cost model asks of a problem.
    window: ClassVar[None] = None
    soft_cap: ClassVar[None] = None
    packed: ClassVar[bool] = False

    def check(self) -> None:
        super().check()
        _check_lengths(self)
        if self.heads != self.kv_heads:
            raise UsageError(f"kv_heads={self.kv_heads}: flash_attention takes as many as heads={self.heads}")
        if self.causal and self.q_len != self.kv_len:
            raise UsageError(
                f"q_len={self.q_len}: with causal=true as long as kv_len={self.kv_len}: flash_attention aligns the "
                "first query with the first key"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokamaxAttentionProblem(StockProblem, HeadsProblem):
    """tokamax' attention: causal or not, grouped queries, soft cap; arrays are ``[batch, length, heads, head_dim]``.

    Attributes:
        soft_cap: Scores s become soft_cap · tanh(s / soft_cap); None leaves them.
    """

    soft_cap: float | None = None

    # What attention's cost model asks of a problem.
    window: ClassVar[None] = None
    packed: ClassVar[bool] = False

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def options(self) -> dict[str, Any]:
        """What the reference takes as keyword arguments."""
        return {"causal": self.causal, "soft_cap": self.soft_cap}

    def check(self) -> None:
        super().check()
        _check_lengths(self)
        if self.causal and self.q_len != self.kv_len:
            raise UsageError(f"q_len={self.q_len}: with causal=true as long as kv_len={self.kv_len} in tokamax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StockGmmProblem(StockProblem, GroupedMatmulProblem):
    """megablox' gmm: ``out[i] = lhs[i] @ rhs[group of i]``, in lhs' dtype; every row has a group."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StockMatmulProblem(StockProblem, TiledProblem):
    """``out[m, n] = x[m, k] @ y[k, n]``, in x's dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedProblem(StockProblem):
    """One new token's attention over keys and values that lie in pages: the decode step of a server.

    Attributes:
        batch: Sequences.
        heads: Query heads.
        kv_heads: Key and value heads; each serves ``heads / kv_heads`` query heads in a row.
        head_dim: Width of a head.
        page_size: Tokens of a page.
        pages_per_seq: Pages that a sequence may have: its longest length over the page's.
        kv_len: Tokens that each sequence has, for which a time is.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages_per_seq: int
    kv_len: int
    dtype: str = "bfloat16"

    def check(self) -> None:
        _check_pages(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedPagedProblem(StockProblem):
    """Attention of a batch in which some sequences bring many tokens (prefill) and others one (decode).

    Attributes:
        tokens: Query tokens of all sequences together, as many as the server's batch holds.
        sequences: Sequences, as many as the server's batch holds; the tokens are spread over them evenly.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head.
        page_size: Tokens of a page.
        pages_per_seq: Pages that a sequence may have.
        kv_len: Tokens that each sequence has, for which a time is.
    """

    tokens: int
    sequences: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages_per_seq: int
    kv_len: int
    dtype: str = "bfloat16"

    def check(self) -> None:
        _check_pages(self)
        if self.tokens % self.sequences:
            raise UsageError(f"tokens={self.tokens}: must be a multiple of sequences={self.sequences}")
        if self.tokens // self.sequences > self.kv_len:
            raise UsageError(
                f"kv_len={self.kv_len}: must be at least the {self.tokens // self.sequences} new tokens of a sequence"
            )


def _check_lengths(problem: HeadsProblem) -> None:
    for name in ("q_len", "kv_len"):
        if (length := getattr(problem, name)) % LANES:
            raise UsageError(f"{name}={length}: must be a multiple of {LANES}; pad the sequences, as its callers do")


def _check_pages(problem: PagedProblem | RaggedPagedProblem) -> None:
    if problem.heads % problem.kv_heads:
        raise UsageError(f"kv_heads={problem.kv_heads}: must divide heads={problem.heads}")
    if problem.head_dim % LANES:
        raise UsageError(f"head_dim={problem.head_dim}: must be a multiple of {LANES}")
    if problem.kv_len > (most := problem.page_size * problem.pages_per_seq):
        raise UsageError(f"kv_len={problem.kv_len}: at most page_size x pages_per_seq = {most}")


def _heads(length: int, batch: int = 1, *, heads: int, kv_heads: int) -> dict[str, int]:
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": 128}
    return {**sizes, "q_len": length, "kv_len": length}


SPLASH_PROBLEMS = {
    "jaxbench-4k": SplashProblem(**_heads(4096, 4, heads=64, kv_heads=64)),
    "llama3-8b-4k": SplashProblem(**_heads(4096, heads=32, kv_heads=8)),
    "llama3-8b-8k": SplashProblem(**_heads(8192, heads=32, kv_heads=8)),
    "llama3-70b-8k": SplashProblem(**_heads(8192, heads=64, kv_heads=8)),
    "llama3-8b-8k-packed": SplashProblem(**_heads(8192, heads=32, kv_heads=8), packed=True),
    "llama3-8b-8k-96mib": SplashProblem(**_heads(8192, heads=32, kv_heads=8), scoped_vmem_mib=96),
}
FLASH_PROBLEMS = {
    "jaxbench-4k": FlashProblem(**_heads(4096, 4, heads=64, kv_heads=64)),
    "mha-8k": FlashProblem(**_heads(8192, heads=32, kv_heads=32)),
}
TOKAMAX_ATTENTION_PROBLEMS = {
    "llama3-8b-4k": TokamaxAttentionProblem(**_heads(4096, heads=32, kv_heads=8)),
    "llama3-8b-8k": TokamaxAttentionProblem(**_heads(8192, heads=32, kv_heads=8)),
    "llama3-70b-8k": TokamaxAttentionProblem(**_heads(8192, heads=64, kv_heads=8)),
}
GMM_PROBLEMS = {
    "jaxbench": StockGmmProblem(m=32768, groups=128, k=4096, n=1536, skew=0.0),
    "qwen3-30b-a3b-up": StockGmmProblem(m=32768, groups=128, k=2048, n=768),
    "mixtral-8x7b-up": StockGmmProblem(m=16384, groups=8, k=4096, n=14336),
}
MATMUL_PROBLEMS = {
    "jaxbench": StockMatmulProblem(m=8192, n=28672, k=8192),
    "8192": StockMatmulProblem(m=8192, n=8192, k=8192),
}
PAGED_PROBLEMS = {
    "jaxbench": PagedProblem(
        batch=64, heads=64, kv_heads=8, head_dim=128, page_size=16, pages_per_seq=128, kv_len=2048
    ),
}
RAGGED_PROBLEMS = {
    "jaxbench": RaggedPagedProblem(
        tokens=4096, sequences=32, heads=64, kv_heads=8, head_dim=128, page_size=16, pages_per_seq=128, kv_len=2048
    ),
}
