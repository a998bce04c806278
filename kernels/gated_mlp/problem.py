"""What a gated MLP instance is, and instances from real models. Loads no jax."""

from __future__ import annotations

import dataclasses

from autotune.errors import UsageError, one_of
from kernels.matmul.problem import TiledProblem

ACTIVATIONS = ("silu", "gelu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMlpProblem(TiledProblem):
    """``out[m, n] = act(x[m, k] @ w_gate[k, n]) * (x[m, k] @ w_up[k, n])``: a matmul with two right-hand sides.

    Attributes:
        activation: ``silu`` (SwiGLU) or ``gelu`` (GeGLU, the tanh approximation), computed in float32.
    """

    activation: str = "silu"

    def check(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise UsageError(f"activation={self.activation}: must be {one_of(ACTIVATIONS)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMlpDxProblem(TiledProblem):
    """``dx[m, n] = by_gate[m, k] @ w_gate[n, k].T + by_up[m, k] @ w_up[n, k].T``.

    These are the sizes of this product: its n is the forward pass' k (the hidden size), and its k that one's n.
    """


# Sizes and activation: each model's public config.json (hidden_size, intermediate_size, hidden_act).
_MODELS = {
    "llama3-8b": {"k": 4096, "n": 14336},
    "llama3-70b": {"k": 8192, "n": 28672},
    "qwen3-8b": {"k": 4096, "n": 12288},
    "qwen3-32b": {"k": 5120, "n": 25600},
    "gemma-7b": {"k": 3072, "n": 24576, "activation": "gelu"},
    "gemma2-9b": {"k": 3584, "n": 14336, "activation": "gelu"},
    "gemma3-27b": {"k": 5376, "n": 21504, "activation": "gelu"},
}

PROBLEMS: dict[str, GatedMlpProblem] = {
    **{f"{model}-prefill": GatedMlpProblem(m=4096, **sizes) for model, sizes in _MODELS.items()},
    **{f"{model}-decode": GatedMlpProblem(m=64, **_MODELS[model]) for model in ("llama3-8b", "gemma-7b")},
}

DX_PROBLEMS: dict[str, GatedMlpDxProblem] = {
    name: GatedMlpDxProblem(m=problem.m, n=problem.k, k=problem.n)
    for name, problem in PROBLEMS.items()
    if not name.endswith("decode")
}
