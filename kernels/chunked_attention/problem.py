"""What an instance of the chunked attention is, a small one for CPUs and some from real models. Loads no jax."""

from __future__ import annotations

import dataclasses

from kernels.attention.problem import HeadsProblem


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedAttentionProblem(HeadsProblem):
    """Softmax attention; values are as wide as keys, and all sums are float32."""

    dtype: str = "float32"

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads


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
