"""What an instance of the chunked attention is, a small one for CPUs and some from real models. Loads no jax."""

from __future__ import annotations

import dataclasses

from autotune.errors import UsageError, one_of
from autotune.problem import Problem
from autotune.space import aligned_divisors


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedAttentionProblem(Problem):
    """Softmax attention over ``q[batch, heads, q_len, head_dim]``, ``k[batch, kv_heads, kv_len, head_dim]`` and ``v``.

    Attributes:
        batch: Sequences.
        heads: Query heads.
        kv_heads: Key and value heads; each serves ``heads / kv_heads`` query heads in a row.
        q_len: Queries per sequence.
        kv_len: Keys per sequence.
        head_dim: Width of a head.
        dtype: ``bfloat16`` or ``float32``, of all arrays; the softmax and all sums are float32 either way.
        causal: Query i sees the keys j ≤ i + kv_len - q_len: the last query sees all.
    """

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: str = "float32"
    causal: bool = True

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    def check(self) -> None:
        if self.heads % self.kv_heads:
            right = one_of(aligned_divisors(self.heads, 1))
            raise UsageError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}: use {right}")
        if self.causal and self.q_len > self.kv_len:
            raise UsageError(
                f"q_len={self.q_len} exceeds kv_len={self.kv_len}: with causal=true the first queries would see no "
                f"key; use q_len of {self.kv_len} at most, or causal=false"
            )


def _self_attention(
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    batch: int = 1,
    dtype: str = "bfloat16",
    causal: bool = True,
) -> ChunkedAttentionProblem:
    return ChunkedAttentionProblem(
        batch=batch, heads=heads, kv_heads=kv_heads, q_len=length, kv_len=length, head_dim=head_dim, dtype=dtype,
        causal=causal,
    )  # fmt: skip


# Sizes: each model's public config.json. The first is small enough for a CPU, the bfloat16 ones are for accelerators.
PROBLEMS: dict[str, ChunkedAttentionProblem] = {
    "small-1k": _self_attention(1024, 4, 4, 64, dtype="float32"),
    "gpt2-1k": _self_attention(1024, 12, 12, 64, dtype="float32"),
    "smollm2-135m-2k": _self_attention(2048, 9, 3, 64, dtype="float32"),
    "bert-base-512": _self_attention(512, 12, 12, 64, batch=4, dtype="float32", causal=False),
    "llama3-8b-4k": _self_attention(4096, 32, 8, 128),
    "llama3-8b-8k": _self_attention(8192, 32, 8, 128),
    "qwen3-32b-8k": _self_attention(8192, 64, 8, 128),
}
