"""Kernels that JAX ships, tuned: their blocks in their own types. Importing this loads no jax.

Example:
    >>> from kernels.stock import SplashProblem, splash_block_sizes
    >>> problem = SplashProblem(batch=4, heads=64, kv_heads=64, q_len=4096, kv_len=4096, head_dim=128)
    >>> kernel = make_splash_mha(mask, block_sizes=splash_block_sizes(problem), head_shards=1, q_seq_shards=1)
"""

from __future__ import annotations

from kernels._exports import exported

__all__, __getattr__, __dir__ = exported(
    __name__,
    {
        "FlashProblem": "problem",
        "PagedProblem": "problem",
        "RaggedPagedProblem": "problem",
        "SplashProblem": "problem",
        "StockGmmProblem": "problem",
        "StockMatmulProblem": "problem",
        "flash_block_sizes": "flash",
        "gmm_tiling": "products",
        "matmul_blocks": "products",
        "paged_attention_blocks": "paged",
        "ragged_paged_attention_blocks": "paged",
        "splash_block_sizes": "splash",
    },
)
