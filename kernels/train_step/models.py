"""Shapes of the models whose train step is tuned. Loads no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar


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

    size_field: ClassVar[str] = "seq_len"  # of the problem: how large one example is

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


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A square convolution without bias, padded by half its size on each side; a BatchNorm follows it.

    Attributes:
        name: Its parameter's.
        inputs: Channels that it takes.
        outputs: Channels that it gives.
        size: Side of its kernel.
        stride: Between its places.
    """

    name: str
    inputs: int
    outputs: int
    size: int = 1
    stride: int = 1

    @property
    def kept_as(self) -> str:
        """The name by which `kernels.train_step.remat` knows its result: a shortcut's goes with what it is added to."""
        return "conv3" if self.name == "shortcut" else self.name

    @property
    def parameters(self) -> int:
        """Of the kernel, which each place of the result is computed with: as many multiplications there."""
        return self.size**2 * self.inputs * self.outputs


@dataclasses.dataclass(frozen=True)
class BottleneckShape:
    """A residual block of three convolutions: 1x1 to `width`, 3x3, 1x1 to four times that.

    Attributes:
        inputs: Channels that it takes.
        width: Channels between.
        stride: Of the 3x3 convolution (v1.5; v1 has it in the first).
        activation: After each convolution's norm.
    """

    inputs: int
    width: int
    stride: int
    activation: str = "relu"

    @property
    def outputs(self) -> int:
        return 4 * self.width

    def convolutions(self) -> tuple[Convolution, ...]:
        """In order; the last is the shortcut's projection, where the block's result is of another shape."""
        inner = (
            Convolution("conv1", self.inputs, self.width),
            Convolution("conv2", self.width, self.width, 3, self.stride),
            Convolution("conv3", self.width, self.outputs),
        )
        if self.stride == 1 and self.inputs == self.outputs:
            return inner
        return *inner, Convolution("shortcut", self.inputs, self.outputs, 1, self.stride)

    def placed(self, side: int) -> list[tuple[Convolution, int]]:
        """Each convolution, and the side of its result where the block takes images of `side`."""
        down = strided(side, self.stride)
        return [(conv, side if conv.name == "conv1" else down) for conv in self.convolutions()]


@dataclasses.dataclass(frozen=True)
class ResNetShape:
    """A residual network for images of three channels (He et al., arXiv:1512.03385), in the form called v1.5.

    A 7x7 convolution and a max pooling, each of stride 2, stages of bottleneck blocks (all but the first of which
    begin with stride 2), the mean over the places that are left, one matrix.

    Attributes:
        width: Of the first convolution and the first stage's blocks; each further stage's is twice the one before.
        stages: Blocks of each stage.
        classes: Of the images.
        activation: As `jax.nn` calls it; the paper's is relu.
        stem_bias: What the first norm shifts by as training begins.
    """

    width: int
    stages: tuple[int, ...]
    classes: int
    activation: str = "relu"
    stem_bias: float = 0.0

    size_field: ClassVar[str] = "image"

    @property
    def stem(self) -> Convolution:
        return Convolution("stem", 3, self.width, 7, 2)

    @property
    def blocks(self) -> tuple[BottleneckShape, ...]:
        found, inputs = [], self.width
        for stage, count in enumerate(self.stages):
            for number in range(count):
                stride = 2 if stage and not number else 1
                found.append(BottleneckShape(inputs, self.width * 2**stage, stride, self.activation))
                inputs = found[-1].outputs
        return tuple(found)

    @property
    def features(self) -> int:
        """Channels of the last block."""
        return self.blocks[-1].outputs

    @property
    def parameters(self) -> int:
        """All parameters: convolutions, scales and shifts, the classifier with its bias."""
        convolutions = [self.stem, *(conv for block in self.blocks for conv in block.convolutions())]
        return sum(conv.parameters + 2 * conv.outputs for conv in convolutions) + (self.features + 1) * self.classes

    def placed(self, image: int) -> Iterator[tuple[BottleneckShape, int]]:
        """Each block, and the side of what it takes, for images of that side."""
        side = strided(strided(image, 2), 2)
        for block in self.blocks:
            yield block, side
            side = strided(side, block.stride)


def strided(side: int, stride: int) -> int:
    """The side of what a convolution or pooling of that stride gives."""
    return -(-side // stride)


# Transformers' sizes: each model's public config.json (Llama 3.2 1B; Llama 3.1 8B and 70B). ResNet-50's: table 1 of its
# paper. The tiny ones are for tests and CPUs.
MODELS: dict[str, TransformerShape | ResNetShape] = {
    "tiny": TransformerShape(64, 4, 8, 4, 16, 128, 256),
    "tiny-tied": TransformerShape(64, 4, 8, 4, 16, 128, 256, tied=True),
    "llama3-1b": TransformerShape(2048, 16, 32, 8, 64, 8192, 128256, tied=True),
    "llama3-8b": TransformerShape(4096, 32, 32, 8, 128, 14336, 128256),
    "llama3-70b": TransformerShape(8192, 80, 64, 8, 128, 28672, 128256),
    # Configs are validated on it, to rounding, and so it is well conditioned. Of relu's inputs, some ten thousand, one
    # may be so near zero that rounding turns its gradient off: a smooth activation. What is largest of nine places is
    # mostly positive, and a shift of that is taken out by the next norms: the first begins at -1.
    "resnet-tiny": ResNetShape(8, (2, 1), 16, activation="silu", stem_bias=-1.0),
    "resnet50": ResNetShape(64, (3, 4, 6, 3), 1000),
}
