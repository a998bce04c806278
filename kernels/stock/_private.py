"""The one private thing of JAX's shipped kernels that is used here. Tried with jax 0.10.2 and 0.12.0."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as shipped


def splash_bwd(kernel: Any, residuals: tuple[Any, ...], grad: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The backward pass of a splash kernel alone: its public interface gives it only together with the forward pass.

    Args:
        kernel: A `SplashAttentionKernel` with backward blocks.
        residuals: q, k, v, segment ids or None, the result and its log-sum-exp, of one example.

    Raises:
        RuntimeError: This jax has another interface.
    """
    *before, out, lse = residuals
    options = kernel.kwargs
    try:
        results = shipped._splash_attention_bwd(
            False,
            options["mask_value"],
            options["is_mqa"],
            options["block_sizes"],
            options["residual_checkpoint_name"],
            options["mask_function"],
            options["attn_logits_soft_cap"],
            options["interpret"],
            (*before, None, out, lse, kernel.dq_mask_info, kernel.dkv_mask_info),
            grad,
        )
        return results[3:6]
    except (AttributeError, KeyError, TypeError) as error:
        raise RuntimeError(
            f"splash attention's backward pass has another interface in jax {jax.__version__} ({error}): "
            "use jax 0.10.2 to 0.12, or tune stock_splash alone"
        ) from error
