"""Attention in chunks, in plain JAX: ``from kernels.chunked_attention import chunked_attention``. Loads no jax."""

from __future__ import annotations

from kernels._exports import exported

__all__, __getattr__, __dir__ = exported(
    __name__,
    {
        "ChunkedAttentionProblem": "problem",
        "PROBLEMS": "problem",
        "chunked_attention": "api",
        "chunked_attention_reference": "reference",
    },
)
