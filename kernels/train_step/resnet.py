"""A residual network for images in Flax NNX: bottleneck blocks, BatchNorm over the whole batch, images as NHWC.

A `kernels.train_step.families.Family`. Source: He et al., arXiv:1512.03385, with the stride in the 3x3 convolution
(v1.5); BatchNorm of Ioffe and Szegedy, arXiv:1502.03167. A mean over a batch that devices share is, under `jax.jit`,
the mean over all of it: XLA's partitioner sums it over them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from autotune.outcome import Config
from kernels._precision import dot_precision
from kernels.train_step.families import Loss, Tree
from kernels.train_step.mesh import BATCH
from kernels.train_step.models import BottleneckShape, Convolution, ResNetShape
from kernels.train_step.placement import Placement
from kernels.train_step.problem import TrainProblem
from kernels.train_step.remat import BLOCK_INPUT, STATISTICS, checkpointed

EPS = 1e-5  # of the BatchNorms
IMAGES = P(BATCH, None, None, None)  # [batch, height, width, channels]
PLAIN: Config = {}  # without parameters of remat everything is kept
PLAIN_STEP: Config = PLAIN


def _kernel(rngs: nnx.Rngs, shape: Convolution) -> nnx.Param:
    """``[size, size, inputs, outputs]`` float32: normal, of variance 2 / (size² · inputs) (He, arXiv:1502.01852)."""
    scale = (2 / (shape.size**2 * shape.inputs)) ** 0.5
    size = (shape.size, shape.size, shape.inputs, shape.outputs)
    return nnx.Param(jax.random.normal(rngs.params(), size, jnp.float32) * scale)


class BatchNorm(nnx.Module):
    """Channels normalized by their mean and variance over batch and places, then scaled and shifted.

    The scale begins at one also where a block ends: from zero, all gradients within the block would be zero at first.
    """

    def __init__(self, channels: int, bias: float = 0.0) -> None:
        self.scale = nnx.Param(jnp.ones((channels,), jnp.float32))
        self.bias = nnx.Param(jnp.full((channels,), bias, jnp.float32))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Tree]:
        """``[batch, height, width, channels]`` to the same, and the float32 ``mean`` and ``var`` of the channels."""
        wide = x.astype(jnp.float32)
        # Both in one pass over x. What is subtracted may be larger than what is left: sums of each image come first, as
        # shorter ones are the more exact.
        mean, square = (jnp.mean(jnp.mean(one, axis=(1, 2)), axis=0) for one in (wide, wide * wide))
        var = jnp.maximum(square - mean * mean, 0.0)
        mean, var = checkpoint_name(mean, STATISTICS), checkpoint_name(var, STATISTICS)
        out = (wide - mean) * (jax.lax.rsqrt(var + EPS) * self.scale[...]) + self.bias[...]
        return out.astype(x.dtype), {"mean": mean, "var": var}


class Bottleneck(nnx.Module):
    """Three convolutions, each normalized, added to what the block was given (or to its projection)."""

    def __init__(self, shape: BottleneckShape, *, rngs: nnx.Rngs) -> None:
        self.shape = shape
        for conv in shape.convolutions():
            setattr(self, conv.name, _kernel(rngs, conv))
            setattr(self, f"{conv.name}_norm", BatchNorm(conv.outputs))

    def __call__(self, x: jax.Array, placement: Placement) -> tuple[jax.Array, Tree]:
        """``[batch, height, width, inputs]`` to outputs at the stride's places, and the norms' statistics."""
        observed: Tree = {}

        def normalized(x: jax.Array, conv: Convolution) -> jax.Array:
            x = checkpoint_name(convolved(x, getattr(self, conv.name)[...], conv, placement), conv.kept_as)
            x, observed[f"{conv.name}_norm"] = getattr(self, f"{conv.name}_norm")(x)
            return x

        activation = getattr(jax.nn, self.shape.activation)
        first, second, third, *shortcut = self.shape.convolutions()
        out = checkpoint_name(activation(normalized(x, first)), "normed")
        out = checkpoint_name(activation(normalized(out, second)), "normed")
        out = normalized(out, third)
        for conv in shortcut:
            x = normalized(x, conv)
        return placement.constrain(activation(out + x), IMAGES), observed


class ResNet(nnx.Module):
    """The first convolution, blocks and classifier."""

    def __init__(self, shape: ResNetShape, *, rngs: nnx.Rngs) -> None:
        self.stem = _kernel(rngs, shape.stem)
        self.stem_norm = BatchNorm(shape.width, shape.stem_bias)
        self.blocks = nnx.List([Bottleneck(block, rngs=rngs) for block in shape.blocks])
        scale = shape.features**-0.5
        self.classifier = nnx.Param(scale * jax.random.normal(rngs.params(), (shape.features, shape.classes)))
        self.bias = nnx.Param(jnp.zeros((shape.classes,), jnp.float32))


def initial_parameters(shape: ResNetShape, seed: int) -> Tree:
    """Float32 parameters as nested dicts; those of the blocks by their numbers."""
    return nnx.to_pure_dict(nnx.state(ResNet(shape, rngs=nnx.Rngs(seed)), nnx.Param))


def initial_statistics(shape: ResNetShape) -> Tree:
    """Mean 0 and variance 1 of every normalized channel, float32."""

    def of(conv: Convolution) -> Tree:
        return {"mean": jnp.zeros((conv.outputs,), jnp.float32), "var": jnp.ones((conv.outputs,), jnp.float32)}

    blocks = [{f"{conv.name}_norm": of(conv) for conv in block.convolutions()} for block in shape.blocks]
    return {"stem_norm": of(shape.stem), "blocks": blocks}


def batch_shapes(problem: TrainProblem) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Images, ``[batch, image, image, 3]`` in the problem's dtype, and their classes, int32 ``[batch]``."""
    images = jax.ShapeDtypeStruct((problem.batch, problem.image, problem.image, 3), problem.dtype)
    return images, jax.ShapeDtypeStruct((problem.batch,), jnp.int32)


def random_batch(problem: TrainProblem, seed: int) -> tuple[jax.Array, jax.Array]:
    """Standard normal images, any classes."""
    images, labels = batch_shapes(problem)
    one, other = jax.random.split(jax.random.key(seed))
    classes = jax.random.randint(other, labels.shape, 0, problem.shape.classes, labels.dtype)
    return jax.random.normal(one, images.shape, images.dtype), classes


def mean_loss_of(problem: TrainProblem, config: Config, mesh: Mesh | None, *, interpret: Any = False) -> Loss:
    """The mean softmax cross-entropy of the images' classes, and the statistics of every BatchNorm."""
    placement = Placement(problem.dtype, mesh)

    def loss(parameters: Tree, batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Tree]:
        images, labels = batch
        scores, observed = logits(parameters, images, problem.shape, placement, config)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, labels)), observed

    return loss


def logits(
    parameters: Tree, images: jax.Array, shape: ResNetShape, placement: Placement, config: Config
) -> tuple[jax.Array, Tree]:
    """Float32 ``[batch, classes]`` of ``[batch, height, width, 3]``, and the statistics of every BatchNorm.

    Args:
        config: ``remat_*``; without them everything is kept.
    """
    graph = nnx.graphdef(nnx.eval_shape(lambda: BatchNorm(shape.width)))
    x = convolved(images.astype(placement.dtype), parameters["stem"], shape.stem, placement)
    x, stem = nnx.merge(graph, nnx.State(parameters["stem_norm"]))(x)
    x = _max_pooled(getattr(jax.nn, shape.activation)(x))
    blocks = []
    for number, block in enumerate(shape.blocks):
        x, observed = checkpointed(_block(block, placement), config)(x, parameters["blocks"][number])
        blocks.append(observed)
    pooled = jnp.mean(x, axis=(1, 2), dtype=jnp.float32).astype(x.dtype)
    w, precision = placement.weight("classifier", parameters["classifier"]), dot_precision(x.dtype)
    scores = jnp.dot(pooled, w, precision=precision, preferred_element_type=jnp.float32) + parameters["bias"]
    return scores, {"stem_norm": stem, "blocks": blocks}


def _block(shape: BottleneckShape, placement: Placement) -> Any:
    """A block as a function of its input and its parameters."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: Bottleneck(shape, rngs=nnx.Rngs(0))))

    def block(x: jax.Array, parameters: Tree) -> tuple[jax.Array, Tree]:
        return nnx.merge(graph, nnx.State(parameters))(checkpoint_name(x, BLOCK_INPUT), placement)

    return block


def convolved(x: jax.Array, kernel: jax.Array, shape: Convolution, placement: Placement) -> jax.Array:
    """The convolution of ``[batch, height, width, inputs]`` with the parameter `kernel`, in `placement`'s dtype."""
    padding = ((shape.size // 2, shape.size // 2),) * 2
    out = jax.lax.conv_general_dilated(
        x,
        placement.weight(shape.name, kernel),
        (shape.stride, shape.stride),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=dot_precision(x.dtype),
    )
    return placement.constrain(out, IMAGES)


def _max_pooled(x: jax.Array) -> jax.Array:
    """The largest of each 3x3 places, at every second one."""
    padding = ((0, 0), (1, 1), (1, 1), (0, 0))
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), padding)
