"""What a matmul instance is, and instances from real models. Loads no jax."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from autotune.errors import UsageError, one_of
from autotune.problem import Problem
from kernels._tpu_model import LANES, sublanes

ACTIVATIONS = ("none", "relu", "gelu", "silu")
RESULTS = {"int8": "int32", "float8_e4m3fn": "bfloat16", "float8_e5m2": "bfloat16"}  # all else: the operands' dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiledProblem(Problem):
    """Matrices of m, n and k that blocks cut into tiles: what a matmul and its relatives have in common.

    Attributes:
        m: Rows of x and of the result (tokens).
        n: Columns of y and of the result (output features).
        k: The contracted length (input features).
        dtype: Of the operands.
    """

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"

    @property
    def result_dtype(self) -> str:
        return RESULTS.get(self.dtype, self.dtype)

    @property
    def row_tile(self) -> int:
        """What a block of m is a multiple of, unless it is the whole m."""
        return sublanes(self.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulProblem(TiledProblem):
    """``out[m, n] = act(x[m, k] @ y[k, n] + bias[n])``, operands of one dtype.

    Attributes:
        dtype: ``bfloat16`` and ``float32`` give a result of their own; ``int8`` is summed and returned in int32;
            ``float8_e4m3fn`` and ``float8_e5m2`` give bfloat16. All but int8 are summed in float32.
        transpose_lhs: x is stored ``[k, m]``.
        transpose_rhs: y is stored ``[n, k]``.
        bias: Whether there is one: ``[n]``, of the result's dtype.
        activation: ``none``, ``relu``, ``gelu`` (the tanh approximation) or ``silu``, computed in float32.
    """

    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float32", *RESULTS)

    transpose_lhs: bool = False
    transpose_rhs: bool = False
    bias: bool = False
    activation: str = "none"

    @property
    def row_tile(self) -> int:
        return LANES if self.transpose_lhs else sublanes(self.dtype)

    @property
    def options(self) -> dict[str, Any]:
        """What the kernel and its reference take beside the arrays."""
        return {name: getattr(self, name) for name in ("transpose_lhs", "transpose_rhs", "activation")}

    def check(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise UsageError(f"activation={self.activation}: must be {one_of(ACTIVATIONS)}")
        if self.transpose_rhs and self.n == 1:  # and one row alone, turned, does not lower in 8 and 16 bits
            raise UsageError("n=1,transpose_rhs=true: a row and a column lie alike; use transpose_rhs=false")
        if self.dtype == "int8" and (self.bias or self.activation != "none"):
            raise UsageError(
                "dtype=int8 takes no bias and no activation: its int32 sums have to be scaled first; "
                "use bias=false,activation=none"
            )


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
    # The gradients of llama3-8b's mlp-up: of the tokens, and of the weight.
    "llama3-8b-mlp-up-dx": MatmulProblem(m=4096, n=4096, k=14336, transpose_rhs=True),
    "llama3-8b-mlp-up-dw": MatmulProblem(m=4096, n=14336, k=4096, transpose_lhs=True),
    # Weights as checkpoints keep them, [out, in]; gemma's output head is its table of embeddings.
    "llama3-8b-lm-head-stored": MatmulProblem(m=4096, n=128256, k=4096, transpose_rhs=True),
    "gemma2-9b-tied-lm-head": MatmulProblem(m=4096, n=256000, k=3584, transpose_rhs=True),
    # Weights and tokens in 8 bits, over a prompt and for a batch that decodes.
    "llama3-8b-mlp-up-int8": MatmulProblem(m=4096, n=14336, k=4096, dtype="int8"),
    "llama3-8b-mlp-up-int8-decode": MatmulProblem(m=64, n=14336, k=4096, dtype="int8"),
    "llama3-8b-mlp-down-int8-decode": MatmulProblem(m=64, n=4096, k=14336, dtype="int8"),
    "llama3-8b-mlp-up-fp8": MatmulProblem(m=4096, n=14336, k=4096, dtype="float8_e4m3fn"),
    "llama3-8b-mlp-down-decode": MatmulProblem(m=64, n=4096, k=14336),
    # With an epilogue: GPT-2 XL's MLP has biases and GELU, its second projection a bias alone.
    "gpt2-xl-mlp-up": MatmulProblem(m=4096, n=6400, k=1600, bias=True, activation="gelu"),
    "gpt2-xl-mlp-down": MatmulProblem(m=4096, n=1600, k=6400, bias=True),
    "square-4k": MatmulProblem(m=4096, n=4096, k=4096),
    "square-8k": MatmulProblem(m=8192, n=8192, k=8192),
}
