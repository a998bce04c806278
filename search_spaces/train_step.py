"""The train step's search space, and the train step as the tuner sees it: a program for a whole mesh of devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.chips import Chip
from autotune.kernel import ArraySpec, Compilable, Cost, Kernel
from autotune.outcome import Config
from autotune.space import Constraint, Param, Space
from kernels.train_step import cost as model
from kernels.train_step.problem import CPU, PROBLEMS, TrainProblem
from kernels.train_step.remat import CHOSEN, OFFLOAD, POLICIES, RECOMPUTE, SAVE
from search_spaces.attention import AttentionKernel
from search_spaces.attention_backward import AttentionBwdKernel
from search_spaces.chunked_attention import ChunkedAttentionKernel
from search_spaces.cross_entropy import CrossEntropyKernel
from search_spaces.gated_mlp import GatedMlpBackwardKernel, GatedMlpKernel
from search_spaces.norm import RMSNormBackwardKernel, RMSNormKernel

if TYPE_CHECKING:
    import jax

AXES = ("data", "fsdp", "tensor", "sequence")
PARTS = (
    *(AttentionKernel, AttentionBwdKernel, ChunkedAttentionKernel, CrossEntropyKernel, GatedMlpKernel),
    *(GatedMlpBackwardKernel, RMSNormKernel, RMSNormBackwardKernel),
)
SMALL_DEVICES = 8  # CPU devices of a validation
# 32 was 6 % faster than the default on llama3-1b and took twice as long to compile, so that no ranking begins with it;
# 64 was hardly faster still, and took four times as long. Any other can be given.
SCOPED_VMEM_MIB = (32,)
CHUNK_MIB = 1024  # by default
UNROLLED = 8
NAMED = {
    "qkv": "queries, keys and values, turned by their positions",
    "attention": "attention's result (and the kernel's log-sum-exp)",
    "out_proj": "attention's output projection",
    "gate_up": "the MLP's gate and up (its kernel's product of both)",
    "mlp_out": "the MLP's result",
}
# What XLA's collectives need to run beside compute; without them each waits for its end.
ASYNC_OPTIONS = (
    "xla_tpu_enable_async_collective_fusion",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
    "xla_tpu_enable_async_collective_fusion_multiple_steps",
    "xla_tpu_overlap_compute_collective_tc",
    "xla_enable_async_all_gather",
    "xla_enable_async_collective_permute",
)
WINDOWED_EINSUM = "xla_jf_spmd_threshold_for_windowed_einsum_mib"


class TrainStepKernel(Kernel):
    """Loss, gradients and optimizer of a model on a mesh: see `kernels.train_step`."""

    name = "train_step"
    summary = "a sharded train step: mesh, remat by activation, scan, accumulation, kernels, XLA options"
    problem_type = TrainProblem
    problems = PROBLEMS
    platforms: ClassVar[Sequence[str]] = ("cpu", "tpu")
    timeout_s = 600.0
    cpu_devices = SMALL_DEVICES
    sources = (
        "search_spaces.train_step",  # which of XLA's options a config means
        "kernels.train_step.layers",
        "kernels.train_step.loss",
        "kernels.train_step.mesh",
        "kernels.train_step.models",
        "kernels.train_step.remat",
        "kernels.train_step.step",
        "kernels.train_step.transformer",
        *(source for kernel in PARTS for source in kernel.sources),
        *("kernels.attention.api", "kernels.chunked_attention.api", "kernels.cross_entropy.api"),
        *("kernels.gated_mlp.api", "kernels.norm.api", "kernels._dispatch"),
    )

    def space(self, problem: TrainProblem, chip: Chip) -> Space:
        return Space(_params(problem, chip), _constraints(problem, chip))

    def arguments(self, problem: TrainProblem) -> tuple[ArraySpec, ...]:
        """The leaves of the parameters' tree (float32, as `jax.tree.leaves` orders them) and the tokens.

        The tokens are int32 ``[batch, seq_len + 1]``: each is given all before it, and predicted but for the first.
        """
        import jax

        from kernels.train_step.transformer import parameter_shapes

        leaves = jax.tree.leaves(parameter_shapes(problem.shape))
        tokens = ArraySpec((problem.batch, problem.seq_len + 1), "int32")
        return *(ArraySpec(leaf.shape, str(leaf.dtype)) for leaf in leaves), tokens

    def make_inputs(self, problem: TrainProblem, seed: int) -> tuple[jax.Array, ...]:
        """Initial parameters, and random tokens."""
        import jax

        from kernels.train_step.transformer import initial_parameters

        return *jax.tree.leaves(initial_parameters(problem.shape, seed)), _tokens(problem, seed)

    def bind(self, problem: TrainProblem, config: Config, *, interpret: Any = False) -> Callable[..., Any]:
        """The loss and its gradients in the parameters' order, on a mesh of the process's first devices.

        The config is fitted to them first (`fitted`). The Pallas kernels are the references that they have on such a
        platform, inside the same `shard_map`, names and gradients: each kernel is validated by itself, and to
        `interpret` eight of each would take minutes.
        """
        import jax

        from kernels.train_step.mesh import make_mesh

        config = fitted(problem, config)
        return self._flat(problem, config, make_mesh(config, jax.devices()))

    def reference(self, problem: TrainProblem) -> Callable[..., Any]:
        """Unsharded, plain JAX, all at once, in float32 throughout where the arguments are."""
        return self._flat(problem.replace({"dtype": "float32"}), None, None)

    def _flat(self, problem: TrainProblem, config: Config | None, mesh: Any) -> Callable[..., Any]:
        import jax

        from kernels.train_step.step import loss_and_gradients
        from kernels.train_step.transformer import parameter_shapes

        structure = jax.tree.structure(parameter_shapes(problem.shape))
        both = loss_and_gradients(problem, config, mesh)

        def function(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            *leaves, tokens = arrays
            loss, gradients = both(jax.tree.unflatten(structure, leaves), tokens)
            return loss, *jax.tree.leaves(gradients)

        return function

    def baselines(self, problem: TrainProblem, chip: Chip) -> dict[str, Config]:
        """``default``: what libraries start from: parameters shared by all devices, each layer computed again."""
        return {"default": self.heuristic(problem, chip)}

    def heuristic(self, problem: TrainProblem, chip: Chip) -> Config:
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

    def cost(self, problem: TrainProblem) -> Cost:
        return model.cost(problem)

    def estimate_ms(self, problem: TrainProblem, config: Config, chip: Chip) -> float:
        return model.estimate_ms(problem, config, chip)

    def validation_problems(self, problem: TrainProblem, config: Config) -> list[TrainProblem]:
        """A tiny model, tied or untied as the problem's, in float32 on eight CPU devices, to which `bind` fits the
        config: two sequences for each share of the batch and each micro-batch.
        """
        small = problem.replace({
            "model": "tiny-tied" if problem.shape.tied else "tiny",
            "topology": f"{CPU}:{SMALL_DEVICES}",
            "dtype": "float32",
            "seq_len": 32,
            "batch": 1,
        })  # fmt: skip
        fit = fitted(small.replace({"batch": 2 * SMALL_DEVICES * config["accumulate"]}), config)
        return [small.replace({"batch": 2 * fit["data"] * fit["fsdp"] * fit["accumulate"]})]

    def target(self, problem: TrainProblem) -> str | None:
        return problem.target

    def devices(self, problem: TrainProblem) -> int:
        return problem.devices

    def topology(self, problem: TrainProblem) -> str | None:
        """libtpu's name of the problem's devices; None where they are CPUs."""
        if problem.target == CPU:
            return None
        return problem.topology.replace("v7x:", "tpu7x:")

    def compilable(self, problem: TrainProblem, config: Config | None, devices: Sequence[Any]) -> Compilable:
        """The whole train step, ``(state, tokens) -> (state, loss)``, for `devices` (which a compiler alone may know).

        Args:
            config: None is the reference made compilable: plain JAX without remat, batch and parameters shared.
        """
        from kernels.train_step.step import train_step

        function, arguments = train_step(problem, config, devices)
        options = {} if config is None else compiler_options(problem, config)
        return Compilable(function, arguments, donated=(0,), options=options)

    def program_inputs(self, problem: TrainProblem, seed: int) -> tuple[Any, ...]:
        """The initial state, and random tokens."""
        from kernels.train_step.step import initial_state

        return initial_state(problem, seed), _tokens(problem, seed)


def _tokens(problem: TrainProblem, seed: int) -> jax.Array:
    import jax
    import jax.numpy as jnp

    size = (problem.batch, problem.seq_len + 1)
    return jax.random.randint(jax.random.key(seed), size, 0, problem.shape.vocab, jnp.int32)


def compiler_options(problem: TrainProblem, config: Config) -> dict[str, str | int | bool]:
    """XLA's names for what the config says of it; none where there is no TPU compiler."""
    if problem.target == CPU:
        return {}
    options: dict[str, str | int | bool] = dict.fromkeys(ASYNC_OPTIONS, config["async_collectives"])
    if not config["collective_matmul"]:
        options[WINDOWED_EINSUM] = 1_000_000  # MiB from which on it does
    if config["scoped_vmem_mib"]:
        options["xla_tpu_scoped_vmem_limit_kib"] = 1024 * config["scoped_vmem_mib"]
    return options


def fitted(problem: TrainProblem, config: Config) -> dict[str, Any]:
    """`config`, made to fit a smaller problem and its devices; one that fits already stays as it is.

    Of all meshes whose axes divide the config's, and which the devices, the model and the batch allow, it takes the one
    with the most axes above one, then the most devices, then the shortest longest axis. Groups of layers become as long
    as the layers allow; micro-batches as many as the batch has.
    """
    shapes = itertools.product(*(_divisors(config[axis], problem.devices) for axis in AXES))
    fits = [axes for axes in shapes if math.prod(axes) <= problem.devices and _divides(problem, config, axes)]
    best = max(fits, key=lambda axes: (sum(size > 1 for size in axes), math.prod(axes), -max(axes), axes))
    axes = dict(zip(AXES, best, strict=True))
    shares = problem.batch // (axes["data"] * axes["fsdp"])
    return {
        **config,
        **axes,
        "scan_group": math.gcd(config["scan_group"], problem.shape.layers),
        "accumulate": math.gcd(config["accumulate"], shares),
    }


def _divisors(size: int, most: int) -> list[int]:
    return [n for n in range(1, min(size, most) + 1) if size % n == 0]


def _divides(problem: TrainProblem, config: Config, axes: Sequence[int]) -> bool:
    meshed = {**config, **dict(zip(AXES, axes, strict=True))}
    return all(holds(meshed) for _, holds in _divisions(problem))


def _divisions(problem: TrainProblem) -> Iterator[tuple[str, Callable[[Config], bool]]]:
    """What of the model and the batch the axes must divide, with its text."""
    shape = problem.shape
    yield (
        f"data * fsdp must divide the batch of {problem.batch}",
        lambda config: problem.batch % (config["data"] * config["fsdp"]) == 0,
    )
    for what, size in {"key heads": shape.kv_heads, "MLP columns": shape.mlp, "words": shape.vocab}.items():
        yield f"tensor must divide the {size} {what}", lambda config, size=size: size % config["tensor"] == 0
    yield (
        f"sequence must divide the length of {problem.seq_len}",
        lambda config: problem.seq_len % config["sequence"] == 0,
    )
    yield (
        "attention=kernel and attention=chunked take whole lengths, exchanged for heads: tensor * sequence must divide "
        f"the {shape.kv_heads} key heads (attention=xla gathers keys and values instead)",
        lambda config: (
            config["sequence"] == 1
            or config["attention"] == "xla"
            or shape.kv_heads % (config["tensor"] * config["sequence"]) == 0
        ),
    )


def _params(problem: TrainProblem, chip: Chip) -> list[Param]:
    divisors = _divisors(problem.devices, problem.devices)
    axes = model.default_axes(problem)
    shape = problem.shape

    def dividing(*sizes: int) -> tuple[int, ...]:
        return tuple(n for n in divisors if all(size % n == 0 for size in sizes))

    def rest(*others: str) -> Callable[[Config], int]:
        """The devices that are left, where the others are not the default's."""

        def default(config: Config) -> int:
            left = problem.devices // max(1, math.prod(config[name] for name in others))
            return max(n for n in divisors if left % n == 0 and problem.batch % n == 0)

        return default

    kept = (RECOMPUTE, SAVE, OFFLOAD)
    micro = tuple(n for n in (1, 2, 4, 8) if problem.batch % n == 0)
    vmem = tuple(size for size in SCOPED_VMEM_MIB if size * 2**20 < chip.vmem_bytes)
    tensors = dividing(shape.kv_heads, shape.mlp, shape.vocab)
    return [
        Param("tensor", tensors, "devices that share heads, MLP columns and vocabulary", axes["tensor"]),
        Param("sequence", dividing(problem.seq_len), "devices that share the activations' length", 1),
        Param("fsdp", dividing(problem.batch), "devices that share batch and parameters", rest("tensor", "sequence")),
        Param("data", dividing(problem.batch), "devices that share the batch", rest("tensor", "sequence", "fsdp")),
        Param("remat_block_input", (SAVE, OFFLOAD), "where the input of each group of layers is kept", SAVE),
        *(Param(f"remat_{name}", kept, f"what becomes of {NAMED[name]}", RECOMPUTE) for name in CHOSEN),
        Param("scan_layers", (True, False), "one program part for all groups of layers, or one for each", True),
        Param("scan_group", model.groups_of(problem), "layers that are computed again together", 1),
        Param("accumulate", micro, "micro-batches, one after the other", 1),
        Param("attention", ("kernel", "chunked", "xla"), "attention: Pallas, loops in plain JAX, or dense", "kernel"),
        Param("norm", ("xla", "kernel"), "RMSNorm: fused by XLA, or Pallas", "xla"),
        Param("mlp", ("xla", "kernel"), "gate and up: XLA's matmuls, or Pallas, both in one pass", "xla"),
        Param("loss", ("chunked", "kernel", "xla"), "logits of some tokens at a time, none, or all at once", "chunked"),
        Param(
            "loss_chunk_mib", (256, 1024, 4096), "logits of one chunk: each chunk adds to a whole gradient", CHUNK_MIB
        ),
        Param("scoped_vmem_mib", (0, *vmem), "VMEM that one fusion may use; 0 is the compiler's default", 0),
        Param("async_collectives", (True, False), "whether collectives run beside compute", True),
        Param("collective_matmul", (True, False), "whether XLA may make loops of gathers and their products", True),
    ]


def _constraints(problem: TrainProblem, chip: Chip) -> list[Constraint]:
    positive = (*AXES, "scan_group", "accumulate", "loss_chunk_mib")
    return [
        Constraint(
            f"{', '.join(positive)} must be at least 1", lambda config: all(config[name] >= 1 for name in positive)
        ),
        Constraint(
            f"data * fsdp * tensor * sequence must be the {problem.devices} devices of {problem.topology}",
            lambda config: math.prod(config[axis] for axis in AXES) == problem.devices,
        ),
        *(Constraint(text, holds) for text, holds in _divisions(problem)),
        Constraint(
            f"accumulate must divide each device's share of the batch of {problem.batch}",
            lambda config: problem.batch // (config["data"] * config["fsdp"]) % config["accumulate"] == 0,
        ),
        Constraint(
            f"scan_group must divide the {problem.shape.layers} layers",
            lambda config: problem.shape.layers % config["scan_group"] == 0,
        ),
        Constraint(
            f"scan_layers=false writes out every layer: more than {UNROLLED} take too long to compile",
            lambda config: config["scan_layers"] or problem.shape.layers <= UNROLLED,
        ),
        Constraint(
            f"loss_chunk_mib is of loss=chunked alone: leave it at {CHUNK_MIB}",
            lambda config: config["loss"] == "chunked" or config["loss_chunk_mib"] == CHUNK_MIB,
        ),
        Constraint(
            "loss=kernel takes the whole vocabulary: tensor must be 1",
            lambda config: config["loss"] != "kernel" or config["tensor"] == 1,
        ),
        Constraint(
            f"scoped_vmem_mib must be 0 (the compiler's default) or less than the VMEM of {chip.name}",
            lambda config: config["scoped_vmem_mib"] == 0 or 0 < config["scoped_vmem_mib"] * 2**20 < chip.vmem_bytes,
        ),
    ]
