"""What an attention instance is, and instances from real models. Loads no jax."""

from __future__ import annotations

import dataclasses

from autotune.errors import UsageError, one_of
from autotune.problem import Problem
from autotune.space import aligned_divisors


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionProblem(Problem):
    """Softmax attention over ``q[batch, heads, q_len, head_dim]``, ``k`` and ``v[batch, kv_heads, kv_len, head_dim]``.

    Attributes:
        batch: Sequences.
        heads: Query heads.
        kv_heads: Key and value heads; each serves ``heads / kv_heads`` query heads in a row.
        q_len: Queries per sequence.
        kv_len: Keys per sequence.
        head_dim: Width of a head.
        dtype: ``bfloat16`` or ``float32``, of all arrays; the softmax is kept in float32 either way.
        causal: Query i sees the keys j ≤ i + kv_len - q_len: the last query sees all.
    """

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: str = "bfloat16"
    causal: bool = True

    def check(self) -> None:
        if self.heads % self.kv_heads:
            right = one_of(aligned_divisors(self.heads, 1))
            raise UsageError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}: use {right}")
        if self.causal and self.q_len > self.kv_len:
            raise UsageError(
                f"q_len={self.q_len} exceeds kv_len={self.kv_len}: with causal=true the first queries would see no "
                f"key; use q_len of {self.kv_len} at most, or causal=false"
            )


def _prefill(length: int, *, heads: int, kv_heads: int, head_dim: int = 128) -> AttentionProblem:
    return AttentionProblem(batch=1, heads=heads, kv_heads=kv_heads, q_len=length, kv_len=length, head_dim=head_dim)


# Sizes: each model's public config.json.
_MODELS = {
    "llama3-8b": {"heads": 32, "kv_heads": 8},
    "llama3-70b": {"heads": 64, "kv_heads": 8},
    "qwen3-8b": {"heads": 32, "kv_heads": 8},
    "qwen3-32b": {"heads": 64, "kv_heads": 8},
    "gemma2-9b": {"heads": 16, "kv_heads": 8, "head_dim": 256},
    "gemma3-27b": {"heads": 32, "kv_heads": 16},
    "gpt-oss-20b": {"heads": 64, "kv_heads": 8, "head_dim": 64},
}

PROBLEMS: dict[str, AttentionProblem] = {
    **{f"{model}-4k": _prefill(4096, **sizes) for model, sizes in _MODELS.items()},
    **{f"{model}-8k": _prefill(8192, **sizes) for model, sizes in _MODELS.items()},
    "llama3-8b-32k": _prefill(32768, **_MODELS["llama3-8b"]),
    "llama3-8b-chunk-2k-of-16k": AttentionProblem(
        batch=1, heads=32, kv_heads=8, q_len=2048, kv_len=16384, head_dim=128
    ),
    "vit-l-336": AttentionProblem(batch=16, heads=16, kv_heads=16, q_len=577, kv_len=577, head_dim=64, causal=False),
}
