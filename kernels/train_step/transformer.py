"""A decoder-only transformer of the Llama family in Flax NNX: stacked blocks, in a loop or one after the other.

A `kernels.train_step.families.Family`. Source: Touvron et al., arXiv:2302.13971, and the Llama 3 herd,
arXiv:2407.21783; rotary positions of Su et al., arXiv:2104.09864, in the halves form (dimension i turns with
i + head_dim / 2).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from autotune.outcome import Config
from kernels.train_step.families import Loss, Tree
from kernels.train_step.layers import HEADS, HIDDEN, Layers
from kernels.train_step.loss import mean_loss
from kernels.train_step.models import TransformerShape
from kernels.train_step.problem import TrainProblem
from kernels.train_step.remat import BLOCK_INPUT, checkpointed

Rotation = tuple[jax.Array, jax.Array]

PLAIN: Config = {
    "attention": "xla",
    "norm": "xla",
    "mlp": "xla",
    "loss": "xla",
    "loss_chunk_mib": 0,
    "accumulate": 1,
    "scan_layers": False,
    "scan_group": 1,
}
PLAIN_STEP: Config = {**PLAIN, "scan_layers": True}  # one after the other the layers would take minutes to compile


def _matrix(rngs: nnx.Rngs, rows: int, columns: int, scale: float | None = None) -> nnx.Param:
    """Normal, by default of variance 1 / rows; float32."""
    return nnx.Param(jax.random.normal(rngs.params(), (rows, columns), jnp.float32) * (scale or rows**-0.5))


class Block(nnx.Module):
    """Attention and MLP, each after a norm and added to what it was given."""

    def __init__(self, shape: TransformerShape, *, rngs: nnx.Rngs) -> None:
        width, queries, keys = shape.width, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.shape = shape
        self.attention_norm = nnx.Param(jnp.ones((width,), jnp.float32))
        self.wq = _matrix(rngs, width, queries)
        self.wk = _matrix(rngs, width, keys)
        self.wv = _matrix(rngs, width, keys)
        self.wo = _matrix(rngs, queries, width)
        self.mlp_norm = nnx.Param(jnp.ones((width,), jnp.float32))
        self.w_gate = _matrix(rngs, width, shape.mlp)
        self.w_up = _matrix(rngs, width, shape.mlp)
        self.w_down = _matrix(rngs, shape.mlp, width)

    def __call__(self, x: jax.Array, rotation: Rotation, layers: Layers) -> jax.Array:
        """``[batch, length, width]`` to the same."""
        weights = {name: layers.weight(name, getattr(self, name)[...]) for name in ("wq", "wk", "wv", "wo")}
        normed = layers.normed(x, self.attention_norm[...])
        q, k, v = (self._heads(layers.dot(normed, weights[name]), layers) for name in ("wq", "wk", "wv"))
        q, k = rotated(q, rotation), rotated(k, rotation)
        q, k, v = (checkpoint_name(array, "qkv") for array in (q, k, v))
        context = layers.attended(q, k, v)
        batch, heads, length, head_dim = context.shape
        context = context.transpose(0, 2, 1, 3).reshape(batch, length, heads * head_dim)
        x = x + checkpoint_name(layers.constrain(layers.dot(context, weights["wo"]), HIDDEN), "out_proj")
        gated = layers.gated(layers.normed(x, self.mlp_norm[...]), self.w_gate[...], self.w_up[...])
        out = layers.constrain(layers.dot(gated, layers.weight("w_down", self.w_down[...])), HIDDEN)
        return layers.constrain(x + checkpoint_name(out, "mlp_out"), HIDDEN)

    def _heads(self, x: jax.Array, layers: Layers) -> jax.Array:
        """``[batch, length, heads * head_dim]`` as ``[batch, heads, length, head_dim]``."""
        batch, length, _ = x.shape
        x = x.reshape(batch, length, -1, self.shape.head_dim).transpose(0, 2, 1, 3)
        return layers.constrain(x, HEADS)


class Transformer(nnx.Module):
    """Embedding, blocks (their parameters stacked, layers first) and output layer."""

    def __init__(self, shape: TransformerShape, *, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=shape.layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(shape, rngs=rngs)

        self.shape = shape
        # Of an output layer that is the embedding too, the logits would be as large as its width's root.
        self.embed = _matrix(rngs, shape.vocab, shape.width, shape.width**-0.5 if shape.tied else 1.0)
        self.blocks = stacked(rngs)
        self.final_norm = nnx.Param(jnp.ones((shape.width,), jnp.float32))
        if not shape.tied:
            self.head = _matrix(rngs, shape.width, shape.vocab)


def initial_parameters(shape: TransformerShape, seed: int) -> Tree:
    """Float32 parameters as nested dicts; each of the blocks' has the layers before its own dimensions."""
    return nnx.to_pure_dict(nnx.state(Transformer(shape, rngs=nnx.Rngs(seed)), nnx.Param))


def initial_statistics(shape: TransformerShape) -> Tree:
    """None: an RMSNorm has no memory."""
    return {}


def batch_shapes(problem: TrainProblem) -> jax.ShapeDtypeStruct:
    """Tokens, int32 ``[batch, seq_len + 1]``: each is given all before it, and predicted but for the first."""
    return jax.ShapeDtypeStruct((problem.batch, problem.seq_len + 1), jnp.int32)


def random_batch(problem: TrainProblem, seed: int) -> jax.Array:
    """Any words."""
    return jax.random.randint(jax.random.key(seed), batch_shapes(problem).shape, 0, problem.shape.vocab, jnp.int32)


def mean_loss_of(problem: TrainProblem, config: Config, mesh: Mesh | None, *, interpret: Any = False) -> Loss:
    """The mean next-token cross-entropy, as `config` says; no statistics."""
    shape = problem.shape
    words = {name: config[name] for name in ("attention", "norm", "mlp")}
    layers = Layers(problem.dtype, mesh, **words, interpret=interpret)

    def loss(parameters: Tree, tokens: jax.Array) -> tuple[jax.Array, Tree]:
        hidden = hidden_states(parameters, tokens[:, :-1], shape, layers, config)
        w = parameters["embed" if shape.tied else "head"]
        how, chunk_mib = config["loss"], config["loss_chunk_mib"]
        return mean_loss(layers, hidden, w, tokens[:, 1:], tied=shape.tied, how=how, chunk_mib=chunk_mib), {}

    return loss


def hidden_states(
    parameters: Tree, tokens: jax.Array, shape: TransformerShape, layers: Layers, config: Config
) -> jax.Array:
    """What the output layer multiplies: ``[batch, length, width]`` of tokens ``[batch, length]``.

    Args:
        config: ``scan_layers``, ``scan_group`` and ``remat_*``; without the last everything is kept.
    """
    x = layers.embedded(parameters["embed"], tokens)
    rotation = rotations(tokens.shape[1], shape)
    graph = nnx.graphdef(nnx.eval_shape(lambda: Block(shape, rngs=nnx.Rngs(0))))
    scanned, group = config["scan_layers"], config["scan_group"]
    count = shape.layers // group

    def step(x: jax.Array, blocks: Tree) -> jax.Array:
        x = checkpoint_name(x, BLOCK_INPUT)
        for block in unstacked(blocks, group):
            x = nnx.merge(graph, nnx.State(block))(x, rotation, layers)
        return x

    # In a loop nothing else is there to be taken for the same; a loop of one pass is none.
    step = checkpointed(step, config, prevent_cse=not scanned or count == 1)
    groups = jax.tree.map(lambda array: array.reshape(count, group, *array.shape[1:]), parameters["blocks"])
    if scanned:
        x, _ = jax.lax.scan(lambda x, blocks: (step(x, blocks), None), x, groups)
    else:
        for blocks in unstacked(groups, count):
            x = step(x, blocks)
    return layers.normed(x, parameters["final_norm"])


def unstacked(tree: Tree, count: int) -> list[Tree]:
    """The parts along the leaves' first dimension. Splits, whose gradient is one concatenation."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [[part.reshape(leaf.shape[1:]) for part in jnp.split(leaf, count)] for leaf in leaves]
    return [jax.tree.unflatten(structure, one) for one in zip(*parts, strict=True)]


def rotations(length: int, shape: TransformerShape) -> Rotation:
    """Cosines and sines of the rotary positions, ``[length, head_dim / 2]`` float32."""
    exponents = jnp.arange(shape.head_dim // 2, dtype=jnp.float32) * (2 / shape.head_dim)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * shape.rope_theta**-exponents
    return jnp.cos(angles), jnp.sin(angles)


def rotated(x: jax.Array, rotation: Rotation) -> jax.Array:
    """``[batch, heads, length, head_dim]``, each pair of dimensions turned by its position's angle."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
