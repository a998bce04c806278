"""Shapes of the models whose train step is tuned. Loads no jax."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TransformerShape:
    """A decoder-only transformer of the Llama family: RMSNorm, rotary positions, grouped queries, SwiGLU.

    Attributes:
        width: Of the residual stream.
        layers: Blocks.
        heads: Query heads.
        kv_heads: Key and value heads; divides heads.
        head_dim: Width of a head.
        mlp: Width between the MLP's matmuls.
        vocab: Rows of the embedding.
        tied: Whether the embedding is the output layer as well.
        rope_theta: Base of the rotary frequencies (without the stretching that Llama 3.1 applies to the longest ones).
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool = False
    rope_theta: float = 500_000.0

    @property
    def block_matrices(self) -> int:
        """Parameters of one block's matrices."""
        attention = 2 * self.width * (self.heads + self.kv_heads) * self.head_dim
        return attention + 3 * self.width * self.mlp

    @property
    def parameters(self) -> int:
        """All parameters, norms included."""
        norms = (2 * self.layers + 1) * self.width
        return self.layers * self.block_matrices + norms + (2 - self.tied) * self.vocab * self.width

    @property
    def multiplied(self) -> int:
        """Parameters that every token is multiplied by: an embedding that is only looked up is none."""
        return self.layers * self.block_matrices + self.vocab * self.width


# Sizes: each model's public config.json (Llama 3.2 1B; Llama 3.1 8B and 70B). `tiny` is for tests and CPUs.
TRANSFORMERS: dict[str, TransformerShape] = {
    "tiny": TransformerShape(64, 4, 8, 4, 16, 128, 256),
    "tiny-tied": TransformerShape(64, 4, 8, 4, 16, 128, 256, tied=True),
    "llama3-1b": TransformerShape(2048, 16, 32, 8, 64, 8192, 128256, tied=True),
    "llama3-8b": TransformerShape(4096, 32, 32, 8, 128, 14336, 128256),
    "llama3-70b": TransformerShape(8192, 80, 64, 8, 128, 28672, 128256),
}
