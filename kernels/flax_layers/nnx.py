"""Flax NNX layers on the tuned kernels: `RMSNorm` and `LayerNorm` in place of Flax's, and a gated MLP.

Example:
    >>> from flax import nnx
    >>> from kernels.flax_layers.nnx import GatedMLP, RMSNorm
    >>> norm = RMSNorm(512, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    >>> mlp = GatedMLP(512, 2048, dtype=jnp.bfloat16, rngs=nnx.Rngs(1))
    >>> x = x + mlp(norm(x))
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_kernel_init

from kernels.flax_layers import _norms
from kernels.gated_mlp import gated_mlp


class RMSNorm(nnx.RMSNorm):
    """`flax.nnx.RMSNorm` by the tuned kernel on a TPU, by XLA elsewhere; its arguments and parameters are Flax's.

    Float32 parameters make the result float32 unless a dtype is given, as in Flax: with ``dtype=jnp.bfloat16`` half as
    much is moved.

    Args:
        num_features: Of the last axis, which is normed.
        interpret: Runs the kernels themselves anywhere, in Pallas' interpreter.
        **options: Flax's.

    Raises:
        UsageError: Other axes or an axis of devices are asked for.
    """

    def __init__(self, num_features: int, *, interpret: Any = False, **options: Any) -> None:
        super().__init__(num_features, **options)
        _norms.check("RMSNorm", self)
        self.interpret = interpret

    def __call__(self, x: jax.Array, mask: jax.Array | None = None, *, residual: jax.Array | None = None) -> Any:
        """Norms ``[..., num_features]`` over the last axis.

        Args:
            x: bfloat16 or float32.
            mask: Flax's argument: must be None.
            residual: Of x's shape: added to x before the norm, in the kernel.

        Returns:
            Of x's shape, in the layer's dtype; with a residual, this and ``x + residual``.
        """
        _norms.check("RMSNorm", self, mask)
        return _call(self, x, None, residual, centered=False)


class LayerNorm(nnx.LayerNorm):
    """`flax.nnx.LayerNorm` by the tuned kernel: see `RMSNorm`."""

    def __init__(self, num_features: int, *, interpret: Any = False, **options: Any) -> None:
        super().__init__(num_features, **options)
        _norms.check("LayerNorm", self)
        self.interpret = interpret

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None, residual: jax.Array | None = None) -> Any:
        """As `RMSNorm.__call__`."""
        _norms.check("LayerNorm", self, mask)
        return _call(self, x, None if self.bias is None else self.bias[...], residual, centered=True)


def _call(
    layer: RMSNorm | LayerNorm, x: jax.Array, bias: jax.Array | None, residual: jax.Array | None, *, centered: bool
) -> Any:
    scale = None if layer.scale is None else layer.scale[...]
    params = (scale, bias) if centered else (scale,)  # A caller's promote_dtype may count them.
    x, scale, *bias_ = layer.promote_dtype((x, *params), dtype=layer.dtype)
    return _norms.normed(
        x, scale, *(bias_ or [None]), centered=centered, out_dtype=x.dtype, eps=layer.epsilon, residual=residual,
        interpret=layer.interpret,
    )  # fmt: skip


class GatedMLP(nnx.Module):
    """``(act(x @ gate) * (x @ up)) @ down``, SwiGLU or GeGLU: gate and up in one pass of the tuned kernel.

    The parameters are ``gate_proj.kernel``, ``up_proj.kernel`` (``[in_features, hidden_features]``) and
    ``down_proj.kernel`` (``[hidden_features, in_features]``): three `nnx.Linear` without bias.

    Args:
        in_features: Of the last axis, and of the result's.
        hidden_features: Between the matmuls.
        activation: ``silu`` (SwiGLU) or ``gelu`` (GeGLU, the tanh approximation).
        dtype: What is computed in, bfloat16 or float32; None is the wider one of x and the parameters.
        param_dtype: Of the parameters.
        kernel_init: Their initializer.
        rngs: With the stream ``params``.
        interpret: Runs the kernels themselves anywhere, in Pallas' interpreter.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        activation: str = "silu",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = default_kernel_init,
        rngs: nnx.Rngs,
        interpret: Any = False,
    ) -> None:
        def linear(rows: int, columns: int) -> nnx.Linear:
            return nnx.Linear(
                rows, columns, use_bias=False, dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs
            )

        self.gate_proj = linear(in_features, hidden_features)
        self.up_proj = linear(in_features, hidden_features)
        self.down_proj = linear(hidden_features, in_features)
        self.activation, self.dtype, self.interpret = activation, dtype, interpret

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., length, in_features]`` to the same, in the layer's dtype.

        Raises:
            UsageError: The activation is unknown, or the dtype neither bfloat16 nor float32.
        """
        weights = (self.gate_proj.kernel[...], self.up_proj.kernel[...])
        dtype = self.dtype or jnp.result_type(x, *weights)
        x, gate, up = (array.astype(dtype) for array in (x, *weights))
        return self.down_proj(gated_mlp(x, gate, up, activation=self.activation, interpret=self.interpret))
