"""Flax layers on the tuned kernels: ``from kernels.flax_layers import attention_fn``. Importing this loads no jax.

`kernels.flax_layers.nnx` and `kernels.flax_layers.linen` have the norms and the gated MLP of either kind.
"""

from __future__ import annotations

from kernels._exports import exported

__all__, __getattr__, __dir__ = exported(__name__, {"Segments": "attention", "attention_fn": "attention"})
