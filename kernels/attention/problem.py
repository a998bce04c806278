"""What an attention instance is, and instances from real models. Loads no jax."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from autotune.errors import UsageError, one_of
from autotune.problem import Problem
from autotune.space import aligned_divisors


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsProblem(Problem):
    """The sizes of any attention: ``q[batch, heads, q_len, head_dim]``, ``k[batch, kv_heads, kv_len, head_dim]``.

    Attributes:
        batch: Sequences.
        heads: Query heads.
        kv_heads: Key and value heads; each serves ``heads / kv_heads`` query heads in a row.
        q_len: Queries per sequence.
        kv_len: Keys per sequence.
        head_dim: Width of a head's queries and keys.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionProblem(HeadsProblem):
    """Softmax attention, with what the Pallas kernels add to it.

    Attributes:
        window: Of the keys that causal leaves, a query sees the last so many, itself included; None for all.
        soft_cap: Scores s become soft_cap · tanh(s / soft_cap); None leaves them.
        v_head_dim: Width of a head's values; None is head_dim.
        packed: Whether several sequences share a row: a query sees only keys with its own segment id.
    """

    window: int | None = None
    soft_cap: float | None = None
    v_head_dim: int | None = None
    packed: bool = False

    @property
    def value_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    @property
    def options(self) -> dict[str, Any]:
        """What kernel and reference take as keyword arguments."""
        return {"causal": self.causal, "window": self.window, "soft_cap": self.soft_cap}

    def check(self) -> None:
        super().check()
        if self.window is not None and not self.causal:
            raise UsageError(f"window={self.window}: needs causal=true, as a query sees the last so many keys up to it")
        if self.soft_cap is not None and not 0 < self.soft_cap < math.inf:
            raise UsageError(f"soft_cap={self.soft_cap}: must be a positive number, or none")
        # One way to write each instance, so that its preset is found.
        if self.window is not None and self.window >= self.kv_len:
            object.__setattr__(self, "window", None)
        if self.v_head_dim == self.head_dim:
            object.__setattr__(self, "v_head_dim", None)


def _prefill(length: int, *, heads: int, kv_heads: int, head_dim: int = 128, **options: Any) -> AttentionProblem:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return AttentionProblem(batch=1, q_len=length, kv_len=length, **sizes, **options)


# Sizes: each model's public config.json.
_MODELS = {
    "llama3-8b": {"heads": 32, "kv_heads": 8},
    "llama3-70b": {"heads": 64, "kv_heads": 8},
    "qwen3-8b": {"heads": 32, "kv_heads": 8},
    "qwen3-32b": {"heads": 64, "kv_heads": 8},
    "gemma2-9b": {"heads": 16, "kv_heads": 8, "head_dim": 256, "soft_cap": 50.0},
    "gemma3-27b": {"heads": 32, "kv_heads": 16},
    "gpt-oss-20b": {"heads": 64, "kv_heads": 8, "head_dim": 64},
    "deepseek-v3": {"heads": 128, "kv_heads": 128, "head_dim": 192, "v_head_dim": 128},
}
# The windows of those models whose layers see all keys and a window's by turns.
_WINDOWS = {"gemma2-9b": 4096, "gemma3-27b": 1024, "gpt-oss-20b": 128, "mistral-7b": 4096}

PROBLEMS: dict[str, AttentionProblem] = {
    **{f"{model}-4k": _prefill(4096, **sizes) for model, sizes in _MODELS.items()},
    **{f"{model}-8k": _prefill(8192, **sizes) for model, sizes in _MODELS.items()},
    **{
        f"{model}-8k-window": _prefill(8192, **_MODELS.get(model, _MODELS["llama3-8b"]), window=window)
        for model, window in _WINDOWS.items()
    },
    "llama3-8b-8k-packed": _prefill(8192, **_MODELS["llama3-8b"], packed=True),
    "llama3-8b-32k": _prefill(32768, **_MODELS["llama3-8b"]),
    "llama3-8b-chunk-2k-of-16k": AttentionProblem(
        batch=1, heads=32, kv_heads=8, q_len=2048, kv_len=16384, head_dim=128
    ),
    "vit-l-336": AttentionProblem(batch=16, heads=16, kv_heads=16, q_len=577, kv_len=577, head_dim=64, causal=False),
}
