"""Flax Linen layers on the tuned kernels: `RMSNorm` and `LayerNorm` in place of Flax's, and a gated MLP.

Example:
    >>> from kernels.flax_layers.linen import GatedMLP, RMSNorm
    >>> x = x + GatedMLP(2048, dtype=jnp.bfloat16)(RMSNorm(dtype=jnp.bfloat16)(x))
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.linear import default_kernel_init

from autotune.errors import UsageError
from kernels.flax_layers import _norms
from kernels.gated_mlp import gated_mlp


class RMSNorm(nn.RMSNorm):
    """`flax.linen.RMSNorm` by the tuned kernel on a TPU, by XLA elsewhere; its fields and parameters are Flax's.

    Float32 parameters make the result float32 unless a dtype is given, as in Flax: with ``dtype=jnp.bfloat16`` half as
    much is moved.

    Attributes:
        interpret: Runs the kernels themselves anywhere, in Pallas' interpreter.
    """

    interpret: Any = False

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None, residual: jax.Array | None = None) -> Any:
        """Norms ``[..., d]`` over the last axis.

        Args:
            x: bfloat16 or float32.
            mask: Flax's argument: must be None.
            residual: Of x's shape: added to x before the norm, in the kernel.

        Returns:
            Of x's shape, in the layer's dtype; with a residual, this and ``x + residual``.

        Raises:
            UsageError: Other axes, an axis of devices, a mask or narrower sums are asked for.
        """
        return _call("RMSNorm", self, x, mask, residual, centered=False)


class LayerNorm(nn.LayerNorm):
    """`flax.linen.LayerNorm` by the tuned kernel: see `RMSNorm`."""

    interpret: Any = False

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None, residual: jax.Array | None = None) -> Any:
        """As `RMSNorm.__call__`."""
        return _call("LayerNorm", self, x, mask, residual, centered=True)


def _call(
    name: str, layer: RMSNorm | LayerNorm, x: jax.Array, mask: Any, residual: jax.Array | None, *, centered: bool
) -> Any:
    _norms.check(name, layer, mask)
    if not layer.force_float32_reductions:
        raise UsageError(f"{name} with force_float32_reductions=False: the kernel sums in float32; leave it True")
    width, bias = x.shape[-1:], None
    scale = layer.param("scale", layer.scale_init, width, layer.param_dtype) if layer.use_scale else None
    if isinstance(layer, LayerNorm) and layer.use_bias:
        bias = layer.param("bias", layer.bias_init, width, layer.param_dtype)
    params = [param for param in (scale, bias) if param is not None]
    return _norms.normed(
        x, scale, bias, centered=centered, out_dtype=layer.dtype or jnp.result_type(x, *params), eps=layer.epsilon,
        residual=residual, interpret=layer.interpret,
    )  # fmt: skip


class _Kernel(nn.Module):
    """The parameter of an `nn.Dense` without bias, by the name that it has there."""

    shape: tuple[int, int]
    param_dtype: Any
    kernel_init: Any

    @nn.compact
    def __call__(self) -> jax.Array:
        return self.param("kernel", self.kernel_init, self.shape, self.param_dtype)


class GatedMLP(nn.Module):
    """``(act(x @ gate) * (x @ up)) @ down``, SwiGLU or GeGLU: gate and up in one pass of the tuned kernel.

    The parameters are ``gate_proj/kernel``, ``up_proj/kernel`` (``[features, hidden_features]``) and
    ``down_proj/kernel``, as of three `nn.Dense` without bias.

    Attributes:
        hidden_features: Between the matmuls.
        activation: ``silu`` (SwiGLU) or ``gelu`` (GeGLU, the tanh approximation).
        dtype: What is computed in, bfloat16 or float32; None is the wider one of x and the parameters.
        param_dtype: Of the parameters.
        kernel_init: Their initializer.
        interpret: Runs the kernels themselves anywhere, in Pallas' interpreter.
    """

    hidden_features: int
    activation: str = "silu"
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Any = default_kernel_init
    interpret: Any = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., length, features]`` to the same, in the layer's dtype.

        Raises:
            UsageError: The activation is unknown, or the dtype neither bfloat16 nor float32.
        """
        features = x.shape[-1]
        params = self.param_dtype, self.kernel_init
        weights = [_Kernel((features, self.hidden_features), *params, name=f"{name}_proj")() for name in ("gate", "up")]
        dtype = self.dtype or jnp.result_type(x, *weights)
        x, gate, up = (array.astype(dtype) for array in (x, *weights))
        hidden = gated_mlp(x, gate, up, activation=self.activation, interpret=self.interpret)
        return nn.Dense(
            features, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype, kernel_init=self.kernel_init,
            name="down_proj",
        )(hidden)  # fmt: skip
