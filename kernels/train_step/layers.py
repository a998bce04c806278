"""A block's operations under a mesh, each by the implementation that a config chooses.

Around them XLA's partitioner places the collectives by the constraints given here. Pallas kernels it cannot partition:
these run in a `shard_map` over all axes, each device on its own sequences and heads.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from kernels._precision import dot_precision
from kernels.attention import attention
from kernels.attention.reference import attention_reference
from kernels.chunked_attention import chunked_attention
from kernels.gated_mlp import gated_mlp
from kernels.norm import rmsnorm
from kernels.train_step.mesh import BATCH
from kernels.train_step.placement import Placement

EPS = 1e-5  # of the RMSNorms; Llama's
HIDDEN = P(BATCH, "sequence", None)  # [batch, length, width]
COLUMNS = P(BATCH, "sequence", "tensor")  # [batch, length, mlp]
HEADS = P(BATCH, "tensor", "sequence", None)  # [batch, heads, length, head_dim]
GATHERED = P(BATCH, "tensor", None, None)  # keys and values for queries of a part of the length
EXCHANGED = P(BATCH, ("tensor", "sequence"), None, None)  # whole lengths of fewer heads


@dataclasses.dataclass(frozen=True)
class Layers(Placement):
    """What a transformer is computed with.

    Attributes:
        attention: ``kernel``, ``chunked`` or ``xla``.
        norm: ``kernel`` or ``xla``.
        mlp: ``kernel`` or ``xla``.
        interpret: Passed to the Pallas kernels; False leaves the choice to the platform.
    """

    attention: str = "xla"
    norm: str = "xla"
    mlp: str = "xla"
    interpret: Any = False

    def dot(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """``x @ w`` over x's last dimension, in `dtype` (the MXU sums in float32 all the same)."""
        return jnp.dot(x, w, precision=dot_precision(x.dtype))

    def embedded(self, embed: jax.Array, tokens: jax.Array) -> jax.Array:
        """The rows ``[batch, length, width]`` of the parameter ``embed``; each device looks up its own tokens.

        Of a vocabulary shared over ``tensor`` each has zeros for the words of others, and their sum is the row.
        """

        table, spec, gather = self.placed("embed", embed)

        def own_tokens(table: jax.Array, tokens: jax.Array) -> jax.Array:
            table = gather(table)
            if self.mesh is None:
                return jnp.take(table, tokens, axis=0)
            words = table.shape[0]
            own = tokens - words * jax.lax.axis_index("tensor")
            rows = jnp.take(table, own, axis=0, mode="clip")
            return jax.lax.psum(jnp.where(((own >= 0) & (own < words))[..., None], rows, 0), "tensor")

        return self.sharded(own_tokens, (spec, P(BATCH, "sequence")), HIDDEN)(table, tokens)

    def normed(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """The RMSNorm of ``[batch, length, width]``, its weight float32."""
        if self.norm == "xla":
            wide = x.astype(jnp.float32)
            scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPS)
            return (wide * scale * weight).astype(x.dtype)
        function = functools.partial(rmsnorm, eps=EPS, interpret=self.interpret)
        return self.sharded(function, (HIDDEN, P(None)), HIDDEN)(x, weight)

    def attended(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Causal attention of ``[batch, heads, length, head_dim]`` and twice ``[batch, kv_heads, length, head_dim]``.

        A sharded length: ``xla`` gathers keys and values; the others exchange it for heads (as DeepSpeed-Ulysses,
        arXiv:2309.14509), since their masks take queries to end where keys do.
        """
        if self.attention == "xla":
            k, v = (self.constrain(x, GATHERED) for x in (k, v))
            return checkpoint_name(self.constrain(attention_reference(q, k, v), HEADS), "attention")
        if self.attention == "chunked":
            out = self.sharded(chunked_attention, (EXCHANGED,) * 3, EXCHANGED)(q, k, v)
            return checkpoint_name(out, "attention")
        function = functools.partial(attention, residual_name="attention", interpret=self.interpret)
        return self.sharded(function, (EXCHANGED,) * 3, EXCHANGED)(q, k, v)

    def gated(self, x: jax.Array, w_gate: jax.Array, w_up: jax.Array) -> jax.Array:
        """``silu(x @ w_gate) * (x @ w_up)`` of two parameters.

        What is named of it are both products, the kernel's one result.
        """
        if self.mlp == "xla":
            weights = self.weight("w_gate", w_gate), self.weight("w_up", w_up)
            gate, up = (checkpoint_name(self.constrain(self.dot(x, w), COLUMNS), "gate_up") for w in weights)
            return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(self.dtype)
        (gate, spec, gather), (up, _, _) = self.placed("w_gate", w_gate), self.placed("w_up", w_up)

        def own_tokens(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
            return gated_mlp(x, gather(gate), gather(up), interpret=self.interpret)

        out = self.sharded(own_tokens, (HIDDEN, spec, spec), COLUMNS)(x, gate, up)
        return checkpoint_name(out, "gate_up")
