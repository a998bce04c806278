"""The train step's search space for transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

from autotune.chips import Chip
from autotune.outcome import Config
from autotune.space import Constraint, Param
from kernels.train_step import transformer_cost as model
from kernels.train_step.problem import TrainProblem
from kernels.train_step.remat import POLICIES
from search_spaces._train_family import AXES, Division, Family, dividing, left_after, remat_params
from search_spaces.attention import AttentionKernel
from search_spaces.attention_backward import AttentionBwdKernel
from search_spaces.chunked_attention import ChunkedAttentionKernel
from search_spaces.cross_entropy import CrossEntropyKernel
from search_spaces.gated_mlp import GatedMlpBackwardKernel, GatedMlpKernel
from search_spaces.norm import RMSNormBackwardKernel, RMSNormKernel

PARTS = (
    *(AttentionKernel, AttentionBwdKernel, ChunkedAttentionKernel, CrossEntropyKernel, GatedMlpKernel),
    *(GatedMlpBackwardKernel, RMSNormKernel, RMSNormBackwardKernel),
)
CHUNK_MIB = 1024  # by default
UNROLLED = 8
NAMED = {
    "qkv": "queries, keys and values, turned by their positions",
    "attention": "attention's result (and the kernel's log-sum-exp)",
    "out_proj": "attention's output projection",
    "gate_up": "the MLP's gate and up (its kernel's product of both)",
    "mlp_out": "the MLP's result",
}


class TransformerFamily(Family):
    """Llama's: see `kernels.train_step.transformer`."""

    axes: ClassVar[tuple[str, ...]] = AXES
    arithmetic: ClassVar[Any] = model
    sources: ClassVar[tuple[str, ...]] = (
        "kernels.train_step.layers",
        "kernels.train_step.loss",
        "kernels.train_step.transformer",
        *(source for kernel in PARTS for source in kernel.sources),
        *("kernels.attention.api", "kernels.chunked_attention.api", "kernels.cross_entropy.api"),
        *("kernels.gated_mlp.api", "kernels.norm.api"),
    )

    def params(self, problem: TrainProblem, chip: Chip) -> list[Param]:
        axes, shape = model.default_axes(problem), problem.shape
        micro = tuple(n for n in (1, 2, 4, 8) if problem.batch % n == 0)
        tensors = dividing(problem, shape.kv_heads, shape.mlp, shape.vocab)
        shares, rest = dividing(problem, problem.batch), left_after(problem, ("tensor", "sequence"))
        last = left_after(problem, ("tensor", "sequence", "fsdp"))
        logits = "logits of some tokens at a time, none, or all at once"
        chunk = "logits of one chunk: each chunk adds to a whole gradient"
        return [
            Param("tensor", tensors, "devices that share heads, MLP columns and vocabulary", axes["tensor"]),
            Param("sequence", dividing(problem, problem.seq_len), "devices that share the activations' length", 1),
            Param("fsdp", shares, "devices that share batch and parameters", rest),
            Param("data", shares, "devices that share the batch", last),
            *remat_params(NAMED, "the input of each group of layers", POLICIES["full"]),
            Param("scan_layers", (True, False), "one program part for all groups of layers, or one for each", True),
            Param("scan_group", model.groups_of(problem), "layers that are computed again together", 1),
            Param("accumulate", micro, "micro-batches, one after the other", 1),
            Param(
                "attention", ("kernel", "chunked", "xla"), "attention: Pallas, loops in plain JAX, or dense", "kernel"
            ),
            Param("norm", ("xla", "kernel"), "RMSNorm: fused by XLA, or Pallas", "xla"),
            Param("mlp", ("xla", "kernel"), "gate and up: XLA's matmuls, or Pallas, both in one pass", "xla"),
            Param("loss", ("chunked", "kernel", "xla"), logits, "chunked"),
            Param("loss_chunk_mib", (256, 1024, 4096), chunk, CHUNK_MIB),
            Param("collective_matmul", (True, False), "whether XLA may make loops of gathers and their products", True),
        ]

    def divisions(self, problem: TrainProblem) -> Iterator[Division]:
        shape = problem.shape
        for what, size in {"key heads": shape.kv_heads, "MLP columns": shape.mlp, "words": shape.vocab}.items():
            yield f"tensor must divide the {size} {what}", lambda config, size=size: size % config["tensor"] == 0
        yield (
            f"sequence must divide the length of {problem.seq_len}",
            lambda config: problem.seq_len % config["sequence"] == 0,
        )
        yield (
            "attention=kernel and attention=chunked take whole lengths, exchanged for heads: tensor * sequence must "
            f"divide the {shape.kv_heads} key heads (attention=xla gathers keys and values instead)",
            lambda config: (
                config["sequence"] == 1
                or config["attention"] == "xla"
                or shape.kv_heads % (config["tensor"] * config["sequence"]) == 0
            ),
        )

    def constraints(self, problem: TrainProblem) -> list[Constraint]:
        positive, layers = ("scan_group", "accumulate", "loss_chunk_mib"), problem.shape.layers
        return [
            Constraint(
                f"{', '.join(positive)} must be at least 1", lambda config: all(config[name] >= 1 for name in positive)
            ),
            Constraint(
                f"accumulate must divide each device's share of the batch of {problem.batch}",
                lambda config: problem.batch // (config["data"] * config["fsdp"]) % config["accumulate"] == 0,
            ),
            Constraint(
                f"scan_group must divide the {layers} layers",
                lambda config: layers % config["scan_group"] == 0,
            ),
            Constraint(
                f"scan_layers=false writes out every layer: more than {UNROLLED} take too long to compile",
                lambda config: config["scan_layers"] or layers <= UNROLLED,
            ),
            Constraint(
                f"loss_chunk_mib is of loss=chunked alone: leave it at {CHUNK_MIB}",
                lambda config: config["loss"] == "chunked" or config["loss_chunk_mib"] == CHUNK_MIB,
            ),
            Constraint(
                "loss=kernel takes the whole vocabulary: tensor must be 1",
                lambda config: config["loss"] != "kernel" or config["tensor"] == 1,
            ),
        ]

    def heuristic(self, problem: TrainProblem, chip: Chip) -> dict[str, Any]:
        return {
            **model.default_axes(problem),
            **POLICIES["full"],
            "scan_layers": True,
            "scan_group": 1,
            "accumulate": 1,
            "attention": "kernel",
            "norm": "xla",
            "mlp": "xla",
            "loss": "chunked",
            "loss_chunk_mib": CHUNK_MIB,
            "scoped_vmem_mib": 0,
            "async_collectives": True,
            "collective_matmul": True,
        }

    def small(self, problem: TrainProblem) -> dict[str, Any]:
        """Tied or untied as the problem's."""
        return {"model": "tiny-tied" if problem.shape.tied else "tiny", "seq_len": 32}

    def small_batch(self, config: Config) -> int:
        """Two sequences for each share of the batch and each micro-batch."""
        return 2 * config["data"] * config["fsdp"] * config["accumulate"]

    def refitted(self, problem: TrainProblem, config: Config) -> dict[str, Any]:
        """Groups of layers as long as the layers allow; micro-batches as many as the batch has."""
        shares = problem.batch // (config["data"] * config["fsdp"])
        group, parts = math.gcd(config["scan_group"], problem.shape.layers), math.gcd(config["accumulate"], shares)
        return {**config, "scan_group": group, "accumulate": parts}
