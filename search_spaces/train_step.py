"""The train step as the tuner sees it: a program for a whole mesh of devices, of a family of models."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.chips import Chip
from autotune.kernel import ArraySpec, Compilable, Cost, Kernel
from autotune.outcome import Config
from autotune.space import Constraint, Space
from kernels.train_step.models import ResNetShape, TransformerShape
from kernels.train_step.problem import CPU, PROBLEMS, TrainProblem
from search_spaces._train_family import Division, Family, divisors, xla_params
from search_spaces._train_resnet import ResNetFamily
from search_spaces._train_transformer import TransformerFamily

if TYPE_CHECKING:
    import jax

FAMILIES: dict[type, Family] = {TransformerShape: TransformerFamily(), ResNetShape: ResNetFamily()}
SMALL_DEVICES = 8  # CPU devices of a validation
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
        "kernels.train_step.families",
        "kernels.train_step.mesh",
        "kernels.train_step.models",
        "kernels.train_step.placement",
        "kernels.train_step.remat",
        "kernels.train_step.step",
        *(source for family in FAMILIES.values() for source in family.sources),
    )

    def space(self, problem: TrainProblem, chip: Chip) -> Space:
        params = family_of(problem).params(problem, chip)
        return Space([*params, *xla_params(chip)], list(_constraints(problem, chip)))

    def arguments(self, problem: TrainProblem) -> tuple[ArraySpec, ...]:
        """The leaves of the parameters' tree (float32, as `jax.tree.leaves` orders them) and of the batch.

        Of a transformer tokens, int32 ``[batch, seq_len + 1]``; of a resnet images, ``[batch, image, image, 3]`` in the
        problem's dtype, and their classes, int32 ``[batch]``.
        """
        import jax

        from kernels.train_step import families

        batch = families.family_of(problem).batch_shapes(problem)
        leaves = jax.tree.leaves((families.parameter_shapes(problem), batch))
        return tuple(ArraySpec(leaf.shape, str(leaf.dtype)) for leaf in leaves)

    def make_inputs(self, problem: TrainProblem, seed: int) -> tuple[jax.Array, ...]:
        """Initial parameters, and a random batch."""
        import jax

        from kernels.train_step import families

        family = families.family_of(problem)
        parameters, batch = family.initial_parameters(problem.shape, seed), family.random_batch(problem, seed)
        return tuple(jax.tree.leaves((parameters, batch)))

    def bind(self, problem: TrainProblem, config: Config, *, interpret: Any = False) -> Callable[..., Any]:
        """The loss, its gradients in the parameters' order and the batch's statistics, on the process's first devices.

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

        from kernels.train_step import families
        from kernels.train_step.step import loss_and_gradients

        arguments = families.parameter_shapes(problem), families.family_of(problem).batch_shapes(problem)
        structure, results = jax.tree.structure(arguments), loss_and_gradients(problem, config, mesh)
        return lambda *arrays: tuple(jax.tree.leaves(results(*jax.tree.unflatten(structure, arrays))))

    def baselines(self, problem: TrainProblem, chip: Chip) -> dict[str, Config]:
        """``default``: what libraries start from.

        Transformers: parameters shared by all devices, each layer computed again. Resnets: the batch shared, nothing
        computed again where that fits.
        """
        return {"default": self.heuristic(problem, chip)}

    def heuristic(self, problem: TrainProblem, chip: Chip) -> Config:
        return family_of(problem).heuristic(problem, chip)

    def cost(self, problem: TrainProblem) -> Cost:
        return family_of(problem).arithmetic.cost(problem)

    def estimate_ms(self, problem: TrainProblem, config: Config, chip: Chip) -> float:
        return family_of(problem).arithmetic.estimate_ms(problem, config, chip)

    def validation_problems(self, problem: TrainProblem, config: Config) -> list[TrainProblem]:
        """A tiny model of the same kind, in float32 on eight CPU devices, to which `bind` fits the config."""
        family = family_of(problem)
        few = {"topology": f"{CPU}:{SMALL_DEVICES}", "dtype": "float32"}
        most = family.small_batch({**config, "data": SMALL_DEVICES, "fsdp": 1})
        small = problem.replace({**family.small(problem), **few, "batch": most})
        return [small.replace({"batch": family.small_batch(fitted(small, config))})]

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
        """The whole train step, ``(state, batch) -> (state, loss)``, for `devices` (which a compiler alone may know).

        Args:
            config: None is the reference made compilable: plain JAX without remat, batch and parameters shared.
        """
        from kernels.train_step.step import train_step

        function, arguments = train_step(problem, config, devices)
        options = {} if config is None else compiler_options(problem, config)
        return Compilable(function, arguments, donated=(0,), options=options)

    def program_inputs(self, problem: TrainProblem, seed: int) -> tuple[Any, ...]:
        """The initial state, and a random batch."""
        from kernels.train_step import families
        from kernels.train_step.step import initial_state

        return initial_state(problem, seed), families.family_of(problem).random_batch(problem, seed)


def family_of(problem: TrainProblem) -> Family:
    """What the tuner knows of the family of the problem's model."""
    return FAMILIES[type(problem.shape)]


def compiler_options(problem: TrainProblem, config: Config) -> dict[str, str | int | bool]:
    """XLA's names for what the config says of it; none where there is no TPU compiler."""
    if problem.target == CPU:
        return {}
    options: dict[str, str | int | bool] = dict.fromkeys(ASYNC_OPTIONS, config["async_collectives"])
    if not config.get("collective_matmul", True):
        options[WINDOWED_EINSUM] = 1_000_000  # MiB from which on it does
    if config["scoped_vmem_mib"]:
        options["xla_tpu_scoped_vmem_limit_kib"] = 1024 * config["scoped_vmem_mib"]
    return options


def fitted(problem: TrainProblem, config: Config) -> dict[str, Any]:
    """`config`, made to fit a smaller problem and its devices; one that fits already stays as it is.

    Of all meshes whose axes divide the config's, and which the devices, the model and the batch allow, it takes the one
    with the most axes above one, then the most devices, then the shortest longest axis. All else follows
    (`Family.refitted`).
    """
    family, divisions = family_of(problem), list(_divisions(problem))

    def fits(axes: Sequence[int]) -> bool:
        meshed = {**config, **dict(zip(family.axes, axes, strict=True))}
        return math.prod(axes) <= problem.devices and all(holds(meshed) for _, holds in divisions)

    shapes = itertools.product(*(divisors(config[axis], problem.devices) for axis in family.axes))
    found = filter(fits, shapes)
    best = max(found, key=lambda axes: (sum(size > 1 for size in axes), math.prod(axes), -max(axes), axes))
    return family.refitted(problem, {**config, **dict(zip(family.axes, best, strict=True))})


def _divisions(problem: TrainProblem) -> Iterator[Division]:
    """What of the model and the batch the axes must divide, with its text."""
    yield (
        f"data * fsdp must divide the batch of {problem.batch}",
        lambda config: problem.batch % (config["data"] * config["fsdp"]) == 0,
    )
    yield from family_of(problem).divisions(problem)


def _constraints(problem: TrainProblem, chip: Chip) -> Iterator[Constraint]:
    family = family_of(problem)
    yield Constraint(
        f"{', '.join(family.axes)} must be at least 1", lambda config: all(config[axis] >= 1 for axis in family.axes)
    )
    yield Constraint(
        f"{' * '.join(family.axes)} must be the {problem.devices} devices of {problem.topology}",
        lambda config: math.prod(config[axis] for axis in family.axes) == problem.devices,
    )
    yield from (Constraint(text, holds) for text, holds in _divisions(problem))
    yield from family.constraints(problem)
    yield Constraint(
        f"scoped_vmem_mib must be 0 (the compiler's default) or less than the VMEM of {chip.name}",
        lambda config: config["scoped_vmem_mib"] == 0 or 0 < config["scoped_vmem_mib"] * 2**20 < chip.vmem_bytes,
    )
