"""What a cross-entropy instance is, and instances from real models. Loads no jax."""

from __future__ import annotations

import dataclasses
import math

from autotune.errors import UsageError
from autotune.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossEntropyProblem(Problem):
    """The loss of ``softmax(x[tokens, hidden] @ w[hidden, vocab])`` at each token's label.

    Attributes:
        tokens: Rows of x, each with a label.
        hidden: The model's width.
        vocab: Columns of w.
        dtype: ``bfloat16`` or ``float32``, of x and w; logits, losses and statistics are float32 either way.
        z_loss: Times the squared log-sum-exp, added to each token's loss.
        soft_cap: Logits become ``soft_cap · tanh(logits / soft_cap)``; None leaves them.
        tied: Whether w is an embedding table that is the head as well: ``[vocab, hidden]``.
    """

    tokens: int
    hidden: int
    vocab: int
    dtype: str = "bfloat16"
    z_loss: float = 0.0
    soft_cap: float | None = None
    tied: bool = False

    def check(self) -> None:
        if not (math.isfinite(self.z_loss) and self.z_loss >= 0):
            raise UsageError(f"z_loss={self.z_loss}: must be a finite number of at least 0")
        if self.soft_cap is not None and not (math.isfinite(self.soft_cap) and self.soft_cap > 0):
            raise UsageError(f"soft_cap={self.soft_cap}: must be a positive number, or none")


# Sizes: each model's public config.json (hidden_size, vocab_size, tie_word_embeddings,
# final_logit_softcapping). Tokens: of a training step on one device.
_MODELS = {
    "llama3-8b": {"hidden": 4096, "vocab": 128256},
    "qwen3-8b": {"hidden": 4096, "vocab": 151936},
    "llama3.2-3b": {"hidden": 3072, "vocab": 128256, "tied": True},
    "gemma2-9b": {"hidden": 3584, "vocab": 256000, "soft_cap": 30.0, "tied": True},
    "gpt2": {"hidden": 768, "vocab": 50257, "tied": True},
}

PROBLEMS: dict[str, CrossEntropyProblem] = {
    **{model: CrossEntropyProblem(tokens=4096, **sizes) for model, sizes in _MODELS.items()},
    "llama3-8b-8k": CrossEntropyProblem(tokens=8192, **_MODELS["llama3-8b"]),
    "llama3-8b-z-loss": CrossEntropyProblem(tokens=4096, z_loss=1e-4, **_MODELS["llama3-8b"]),
    "qwen3-8b-1k": CrossEntropyProblem(tokens=1024, **_MODELS["qwen3-8b"]),
    "qwen3-8b-8k": CrossEntropyProblem(tokens=8192, **_MODELS["qwen3-8b"]),
}
