"""Arithmetic of a transformer's train step: its roofline, its memory and a time to rank configs by. Loads no jax."""

from __future__ import annotations

import dataclasses

from autotune.chips import Chip
from autotune.kernel import Cost
from autotune.outcome import Config
from autotune.problem import DTYPE_BYTES
from kernels._tpu_model import LANES, round_up
from kernels.train_step.cost import EFFICIENCY, GRADIENT_BYTES, PARAMETER_BYTES, Load, parameter_collectives, roofline
from kernels.train_step.problem import TrainProblem
from kernels.train_step.remat import CHOSEN, OFFLOAD, RECOMPUTE, SAVE

ATTENTION_EFFICIENCY = 0.4  # as narrow heads and the softmax leave less
CHUNKED_SLOWER = 3.0  # loops of plain JAX against a Pallas kernel on a TPU: scores go through HBM
PASSES = 24  # over a block's hidden states, besides its matmuls' own: norms, rotations, sums, forward and backward
SCORE_PASSES = 8  # over float32 scores that are kept in HBM
SCAN_OVERHEAD = 1.01  # slices of stacked parameters and of what is saved
GROUP_OVERHEAD = 1.005  # of two layers in one pass: the step is hardly faster, its compile takes half as long again


@dataclasses.dataclass(frozen=True)
class Part:
    """What one device has of the problem under a config, in one micro-batch.

    Attributes:
        sequences: Of the batch.
        tokens: Of these, its part of the length.
        item: Bytes of an activation.
    """

    sequences: float
    tokens: float
    item: int

    @classmethod
    def of(cls, problem: TrainProblem, config: Config) -> Part:
        sequences = problem.batch / (config["data"] * config["fsdp"] * config["accumulate"])
        return cls(sequences, sequences * problem.seq_len / config["sequence"], DTYPE_BYTES[problem.dtype])


def cost(problem: TrainProblem) -> Cost:
    """One device's share of the roofline.

    Operations: six for each token and parameter that it is multiplied by (two forward, four backward), and causal
    attention's; none is done twice. Bytes: the optimizer's.
    """
    shape = problem.shape
    pairs = problem.batch * problem.seq_len * (problem.seq_len + 1) / 2
    attention = 12 * shape.layers * shape.heads * shape.head_dim * pairs
    flops = 6.0 * shape.multiplied * problem.batch * problem.seq_len + attention
    return roofline(problem, flops, 0.0)


def activation_bytes(problem: TrainProblem, config: Config) -> dict[str, float]:
    """Bytes that one device keeps of each named activation of one layer, in one micro-batch, where it is kept."""
    shape, part, tensor = problem.shape, Part.of(problem, config), config["tensor"]
    head = round_up(shape.head_dim, LANES)  # narrower ones are filled up to the lanes
    hidden = part.tokens * shape.width * part.item
    attended = part.tokens * shape.heads * head * part.item / tensor
    halves = 1 if config["mlp"] == "kernel" else 2
    return {
        "block_input": hidden,
        "qkv": part.tokens * (shape.heads + 2 * shape.kv_heads) * head * part.item / tensor,
        "attention": attended + 4 * part.tokens * shape.heads / tensor,
        "out_proj": hidden,
        "gate_up": part.tokens * halves * shape.mlp * part.item / tensor,
        "mlp_out": hidden,
    }


def kept_bytes(problem: TrainProblem, config: Config, choice: str) -> float:
    """What one device keeps between forward and backward pass by `choice`: ``save`` or ``offload``."""
    layers, each = problem.shape.layers, activation_bytes(problem, config)
    inputs = each["block_input"] * layers / config["scan_group"] if config["remat_block_input"] == choice else 0.0
    return inputs + layers * sum(each[name] for name in CHOSEN if config[f"remat_{name}"] == choice)


def peak_bytes(problem: TrainProblem, config: Config) -> float:
    """Bytes of HBM that one device needs at once: state, gradients, what is kept, and one group at work or the loss."""
    shape, part = problem.shape, Part.of(problem, config)
    tensor, item = config["tensor"], part.item
    shards = config["fsdp"] * tensor
    state = shape.parameters * (PARAMETER_BYTES + GRADIENT_BYTES * (1 + (config["accumulate"] > 1))) / shards
    each = activation_bytes(problem, config)
    again = sum(each[name] for name in CHOSEN if config[f"remat_{name}"] == RECOMPUTE)
    gathered = shape.block_matrices * item / tensor * (2 if config["fsdp"] > 1 else 1)
    group = config["scan_group"] * (again + gathered) + 4 * max(each.values())
    if config["attention"] == "xla":
        scores = part.sequences * shape.heads * problem.seq_len**2 / (tensor * config["sequence"])
        group += scores * (4 + 4 + item)
    vocabulary = shape.vocab * shape.width * (item + 4) / tensor
    logits = 4.0 * part.tokens * shape.vocab / tensor
    kept_logits = {"xla": 2.5 * logits, "chunked": 2.5 * min(logits, config["loss_chunk_mib"] * 2**20), "kernel": 0.0}[
        config["loss"]
    ]
    return state + kept_bytes(problem, config, SAVE) + max(group, vocabulary + kept_logits)


def forward_flops(problem: TrainProblem, config: Config) -> dict[str, float]:
    """Operations of one device in one micro-batch's forward pass: of one layer's parts, and of the loss."""
    shape, part, tensor = problem.shape, Part.of(problem, config), config["tensor"]
    per = 2.0 * part.tokens * shape.width / tensor
    pairs = part.tokens * problem.seq_len * (1.0 if config["attention"] == "xla" else 0.5)
    return {
        "qkv": per * (shape.heads + 2 * shape.kv_heads) * shape.head_dim,
        "attention": 4.0 * pairs * shape.heads * shape.head_dim / tensor,
        "out_proj": per * shape.heads * shape.head_dim,
        "gate_up": per * 2 * shape.mlp,
        "mlp_out": per * shape.mlp,
        "loss": per * shape.vocab,
    }


def step_flops(problem: TrainProblem, config: Config) -> tuple[float, float]:
    """Operations of one device in one step, what is computed again included: the matmuls', attention's."""
    flops, layers = forward_flops(problem, config), problem.shape.layers
    again = {name: config[f"remat_{name}"] == RECOMPUTE for name in CHOSEN}
    matmuls = sum(flops[name] * (3 + again[name]) for name in ("qkv", "out_proj", "gate_up"))
    matmuls += flops["gate_up"] * (config["mlp"] == "kernel")  # its backward pass begins with the forward one
    last = again["mlp_out"] * (1 - 1 / config["scan_group"])  # a group's last result is needed by no gradient
    matmuls += flops["mlp_out"] * (3 + last)
    if config["attention"] == "kernel":
        attention = flops["attention"] * (3.5 + again["attention"])  # the scores once more, two products of seven
    else:
        attention = flops["attention"] * (3.5 + 0.5 * again["attention"])
    loss = flops["loss"] * {"xla": 3, "chunked": 4, "kernel": 5}[config["loss"]]
    return config["accumulate"] * (layers * matmuls + loss), config["accumulate"] * layers * attention


def traffic_bytes(problem: TrainProblem, config: Config) -> float:
    """HBM traffic of one device in one step."""
    shape, part, tensor = problem.shape, Part.of(problem, config), config["tensor"]
    shards = config["fsdp"] * tensor
    state = shape.parameters * (2 * PARAMETER_BYTES + 2 * GRADIENT_BYTES * config["accumulate"]) / shards
    weights = 4.0 * shape.multiplied * part.item / tensor
    each = activation_bytes(problem, config)
    layer = PASSES * each["block_input"] + 6 * (each["qkv"] + each["attention"] + each["gate_up"])
    if config["attention"] == "xla":
        scores = part.sequences * shape.heads * problem.seq_len**2 / (tensor * config["sequence"])
        layer += 4 * SCORE_PASSES * scores
    passes = {"xla": 6, "chunked": 4, "kernel": 0}[config["loss"]]
    loss = passes * 4.0 * part.tokens * shape.vocab / tensor
    return state + config["accumulate"] * (weights + shape.layers * layer + loss)


def collective_bytes(problem: TrainProblem, config: Config) -> tuple[float, float]:
    """What one device sends in one step: of parameters and gradients, of activations."""
    shape, part = problem.shape, Part.of(problem, config)
    data, fsdp, tensor, sequence = (config[axis] for axis in ("data", "fsdp", "tensor", "sequence"))
    parameters = shape.parameters * part.item / tensor
    moved = parameter_collectives(parameters, data * sequence, fsdp)
    hidden = part.tokens * shape.width * part.item
    sums = 4 + (config["remat_out_proj"] == RECOMPUTE)
    reduced = sums * 2 * hidden * (tensor - 1) / tensor
    lengths = 0.0
    if sequence > 1:
        exchanged = (2 * shape.heads + 2 * shape.kv_heads) / sequence
        heads = 2 * shape.kv_heads if config["attention"] == "xla" else exchanged
        lengths = 4 * part.tokens * heads * shape.head_dim * part.item / tensor * (sequence - 1)
    accumulate = config["accumulate"]
    return accumulate * moved, accumulate * shape.layers * (reduced + lengths)


def estimate_ms(problem: TrainProblem, config: Config, chip: Chip) -> float:
    """One step's time in milliseconds."""
    matmuls, attention = step_flops(problem, config)
    if chip.known and config["attention"] == "chunked":
        attention *= CHUNKED_SLOWER
    parameters, activations = collective_bytes(problem, config)
    load = Load(
        flops=matmuls / EFFICIENCY + attention / ATTENTION_EFFICIENCY,
        traffic=traffic_bytes(problem, config),
        parameters=parameters,
        activations=activations,
        offloaded=2 * config["accumulate"] * kept_bytes(problem, config, OFFLOAD),
        peak=peak_bytes(problem, config),
        overhead=(SCAN_OVERHEAD if config["scan_layers"] else 1.0) * GROUP_OVERHEAD ** (config["scan_group"] - 1),
    )
    return load.estimate_ms(problem, config, chip)


def default_axes(problem: TrainProblem) -> dict[str, int]:
    """Pure fsdp, where the batch has a sequence for each device; else the least of tensor that makes it so, then data.

    Where nothing fits, fsdp all the same: the constraints say what is wrong with it.
    """
    devices, shape = problem.devices, problem.shape
    for tensor in (n for n in range(1, devices + 1) if devices % n == 0):
        fsdp = devices // tensor
        if problem.batch % fsdp == 0 and shape.kv_heads % tensor == 0 and shape.vocab % tensor == 0:
            return {"data": 1, "fsdp": fsdp, "tensor": tensor, "sequence": 1}
    return {"data": 1, "fsdp": devices, "tensor": 1, "sequence": 1}


def groups_of(problem: TrainProblem) -> tuple[int, ...]:
    """How many layers a group may have; four take three times as long to compile as one, for nothing that was seen."""
    return tuple(group for group in (1, 2) if problem.shape.layers % group == 0)
