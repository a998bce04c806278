"""What a norm instance is, and instances from real models. Loads no jax."""

from __future__ import annotations

import dataclasses
from typing import Literal

from autotune.problem import Problem

Kind = Literal["rmsnorm", "layernorm"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormProblem(Problem):
    """Each row of ``x[rows, d]`` divided by its root mean square (or standard deviation, its mean taken off first).

    Attributes:
        rows: Rows of x (tokens; tokens times heads where heads are normed).
        d: Length of a row (the model's width).
        dtype: ``bfloat16`` or ``float32``, of all arrays; statistics and sums are float32 either way.
        residual: Whether x is added to a residual first, and the sum returned beside its norm. The backward pass
            then also takes the sum's gradient.
    """

    rows: int
    d: int
    dtype: str = "bfloat16"
    residual: bool = False


# Widths: each model's public config.json. Rows: tokens of a training step on one device.
RMSNORM_PROBLEMS: dict[str, NormProblem] = {
    "llama3-8b": NormProblem(rows=8192, d=4096),
    "llama3-8b-residual": NormProblem(rows=8192, d=4096, residual=True),
    "llama3-8b-decode": NormProblem(rows=256, d=4096, residual=True),
    "llama3-70b": NormProblem(rows=8192, d=8192),
    "llama3-70b-residual": NormProblem(rows=8192, d=8192, residual=True),
    "gemma-7b": NormProblem(rows=8192, d=3072),
    "gemma3-27b": NormProblem(rows=8192, d=5376),
    "qwen3-8b-heads": NormProblem(rows=4096 * 32, d=128),
    "qwen3-32b": NormProblem(rows=8192, d=5120),
    "deepseek-v3": NormProblem(rows=8192, d=7168),
}
LAYERNORM_PROBLEMS: dict[str, NormProblem] = {
    "gpt2-large": NormProblem(rows=8192, d=1280),
    "gpt2-large-residual": NormProblem(rows=8192, d=1280, residual=True),
    "gpt2": NormProblem(rows=8192, d=768),
    "gpt2-xl": NormProblem(rows=8192, d=1600),
    "vit-b-16": NormProblem(rows=128 * 197, d=768),
    "vit-l-16": NormProblem(rows=128 * 197, d=1024),
    "vit-h-14": NormProblem(rows=64 * 257, d=1280),
    "gpt3-175b": NormProblem(rows=4096, d=12288),
}
