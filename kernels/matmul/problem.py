"""What a matmul instance is, and instances from real models. Loads no jax."""

from __future__ import annotations

import dataclasses

from autotune.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulProblem(Problem):
    """``out[m, n] = x[m, k] @ y[k, n]``, operands and result of one dtype.

    Attributes:
        m: Rows of x and of the result (tokens).
        n: Columns of y and of the result (output features).
        k: The contracted length (input features).
        dtype: ``bfloat16`` or ``float32``; the sum is kept in float32 either way.
    """

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"


def _projections(model: str, *, hidden: int, heads: int, kv_heads: int, head_dim: int, mlp: int, vocab: int):
    """The matmuls of one decoder layer and of the output head over 4096 tokens."""
    shapes = {
        "mlp-up": (mlp, hidden),
        "mlp-down": (hidden, mlp),
        "qkv": ((heads + 2 * kv_heads) * head_dim, hidden),
        "attn-out": (hidden, heads * head_dim),
        "lm-head": (vocab, hidden),
    }
    return {f"{model}-{part}": MatmulProblem(m=4096, n=n, k=k) for part, (n, k) in shapes.items()}


# Sizes: each model's public config.json.
PROBLEMS: dict[str, MatmulProblem] = {
    **_projections("llama3-8b", hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336, vocab=128256),
    **_projections("llama3-70b", hidden=8192, heads=64, kv_heads=8, head_dim=128, mlp=28672, vocab=128256),
    **_projections("qwen3-8b", hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=12288, vocab=151936),
    **_projections("qwen3-32b", hidden=5120, heads=64, kv_heads=8, head_dim=128, mlp=25600, vocab=151936),
    **_projections("gemma2-9b", hidden=3584, heads=16, kv_heads=8, head_dim=256, mlp=14336, vocab=256000),
    **_projections("gemma3-27b", hidden=5376, heads=32, kv_heads=16, head_dim=128, mlp=21504, vocab=262208),
    "square-4k": MatmulProblem(m=4096, n=4096, k=4096),
    "square-8k": MatmulProblem(m=8192, n=8192, k=8192),
}
