"""Arithmetic of a resnet's train step: its roofline, its memory and a time to rank configs by. Loads no jax."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.chips import Chip
from autotune.kernel import Cost
from autotune.outcome import Config
from autotune.problem import DTYPE_BYTES
from kernels._tpu_model import LANES, round_up
from kernels.train_step.cost import EFFICIENCY, GRADIENT_BYTES, PARAMETER_BYTES, Load, parameter_collectives, roofline
from kernels.train_step.models import BottleneckShape, Convolution, strided
from kernels.train_step.problem import TrainProblem
from kernels.train_step.remat import BLOCK_INPUT, OFFLOAD, RECOMPUTE, RESNET_CHOSEN, RESNET_POLICIES, SAVE

# Over what a convolution gives: written, normalized, read by the next; in the backward pass read for the sums of the
# norm's gradient and again for the gradient itself, as are the gradients, and read by both products.
PASSES = 12
PASSES_AGAIN = 3  # where it is computed again: written, normalized
NORM_AGAIN = 1  # where what is kept is normalized again, mostly inside the product that reads it
FITS = 0.8  # of the HBM, that a default config's arithmetic may come to


def convolutions(problem: TrainProblem) -> Iterator[tuple[Convolution, int]]:
    """Every convolution, and the side of its result."""
    yield problem.shape.stem, strided(problem.image, 2)
    for block, side in problem.shape.placed(problem.image):
        yield from block.placed(side)


def multiplications(problem: TrainProblem) -> int:
    """Of one image's forward pass, each with its addition; places in the padding count as others do."""
    products = sum(conv.parameters * side**2 for conv, side in convolutions(problem))
    return products + problem.shape.features * problem.shape.classes


def cost(problem: TrainProblem) -> Cost:
    """One device's share of the roofline.

    Operations: six for each multiplication of the forward pass (two there, four in the gradients of both that were
    multiplied), but that images need no gradient. Bytes: the images, and the optimizer's.
    """
    stem, side = next(convolutions(problem))
    flops = problem.batch * 2.0 * (3 * multiplications(problem) - stem.parameters * side**2)
    return roofline(problem, flops, problem.batch * 3.0 * problem.image**2 * DTYPE_BYTES[problem.dtype])


def images(problem: TrainProblem, config: Config) -> float:
    """Of the batch, on one device."""
    return problem.batch / (config["data"] * config["fsdp"])


def block_bytes(problem: TrainProblem, config: Config, block: BottleneckShape, side: int) -> dict[str, float]:
    """Bytes that one device keeps of each named activation of a block that takes images of `side`, where it is kept."""
    item = images(problem, config) * DTYPE_BYTES[problem.dtype]
    given = dict.fromkeys(RESNET_CHOSEN, 0.0)
    for conv, place in block.placed(side):
        given[conv.kept_as] += item * conv.outputs * place**2
    return {**given, "normed": given["conv1"] + given["conv2"], BLOCK_INPUT: item * block.inputs * side**2}


def kept_bytes(problem: TrainProblem, config: Config, choice: str) -> float:
    """What one device keeps between forward and backward pass by `choice`: ``save`` or ``offload``."""
    names = [name for name in (BLOCK_INPUT, *RESNET_CHOSEN) if config[f"remat_{name}"] == choice]
    blocks = [block_bytes(problem, config, block, side) for block, side in problem.shape.placed(problem.image)]
    return sum(each[name] for each in blocks for name in names)


def peak_bytes(problem: TrainProblem, config: Config) -> float:
    """Bytes of HBM that one device needs at once: state, gradients, the stem, what is kept, and one block at work."""
    shape, item = problem.shape, DTYPE_BYTES[problem.dtype]
    state = shape.parameters * ((PARAMETER_BYTES + GRADIENT_BYTES) / config["fsdp"] + item)
    side = strided(problem.image, 2)
    stem = images(problem, config) * item * (3 * problem.image**2 + 2 * shape.width * side**2)
    work = 0.0
    for block, taken in shape.placed(problem.image):
        each = block_bytes(problem, config, block, taken)
        again = sum(each[name] for name in RESNET_CHOSEN if config[f"remat_{name}"] == RECOMPUTE)
        work = max(work, again + each["conv3"])  # and the gradient of what it gives
    return state + stem + kept_bytes(problem, config, SAVE) + work


def step_flops(problem: TrainProblem, config: Config) -> float:
    """Operations of one device in one step, what is computed again included."""
    return _operations(problem, config, filled=False)


def _operations(problem: TrainProblem, config: Config, *, filled: bool) -> float:
    """`step_flops`; if `filled`, with what is multiplied filled up to the lanes, as the MXU does."""
    total = 0.0
    for conv, side in convolutions(problem):
        inner, outputs = conv.size**2 * conv.inputs, conv.outputs
        products = side**2 * (round_up(inner, LANES) * round_up(outputs, LANES) if filled else inner * outputs)
        again = conv.name != "stem" and config[f"remat_{conv.kept_as}"] == RECOMPUTE
        total += products * ((2 if conv.name == "stem" else 3) + again)
    total += 3 * problem.shape.features * problem.shape.classes
    return 2.0 * images(problem, config) * total


def traffic_bytes(problem: TrainProblem, config: Config) -> float:
    """HBM traffic of one device in one step."""
    item = DTYPE_BYTES[problem.dtype]
    state = problem.shape.parameters * (2 * PARAMETER_BYTES + 2 * GRADIENT_BYTES) / config["fsdp"]
    weights = 4.0 * problem.shape.parameters * item
    activations = 0.0
    for conv, side in convolutions(problem):
        passes = PASSES
        if conv.name != "stem":
            again = config[f"remat_{conv.kept_as}"] == RECOMPUTE
            passes += PASSES_AGAIN if again else NORM_AGAIN * (config["remat_normed"] == RECOMPUTE)
        activations += passes * conv.outputs * side**2
    return state + weights + images(problem, config) * item * activations


def estimate_ms(problem: TrainProblem, config: Config, chip: Chip) -> float:
    """One step's time in milliseconds."""
    parameters = problem.shape.parameters * DTYPE_BYTES[problem.dtype]
    load = Load(
        flops=_operations(problem, config, filled=chip.known) / EFFICIENCY,
        traffic=traffic_bytes(problem, config),
        parameters=parameter_collectives(parameters, config["data"], config["fsdp"]),
        activations=0.0,
        offloaded=2 * kept_bytes(problem, config, OFFLOAD),
        peak=peak_bytes(problem, config),
    )
    return load.estimate_ms(problem, config, chip)


def default_policy(problem: TrainProblem, chip: Chip) -> dict[str, str]:
    """Of the usual policies the one that computes least again and fits, by this arithmetic; the last resort is all."""
    room = FITS * chip.hbm_bytes if chip.known else float("inf")
    spread = {"data": problem.devices, "fsdp": 1}
    fitting = (one for one in reversed(RESNET_POLICIES.values()) if peak_bytes(problem, {**spread, **one}) <= room)
    return next(fitting, RESNET_POLICIES["full"])
