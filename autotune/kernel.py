"""What the framework asks of a kernel, and the registry through which it finds them."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.chips import Chip
from autotune.errors import AutotuneError, UsageError, one_of
from autotune.outcome import Config
from autotune.problem import DTYPE_BYTES, Problem, parse_pairs
from autotune.space import Space

if TYPE_CHECKING:
    import jax
    import numpy as np

ENTRY_POINTS = "autotune.kernels"


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one argument, without jax.

    Attributes:
        example: A value of that shape where the work depends on it (group sizes, say); a prediction is for that one.
    """

    shape: tuple[int, ...]
    dtype: str
    example: np.ndarray | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.example is not None and (self.example.shape, str(self.example.dtype)) != (self.shape, self.dtype):
            raise ValueError(f"the example must be {self.dtype}{list(self.shape)}, not {self.example.dtype}")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a problem cannot do without: the two axes of its roofline.

    Attributes:
        flops: Floating-point (or integer) operations of useful work in the matmuls.
        nbytes: Bytes of every argument and result, once each.
        dtype: The matmuls' operand dtype.
    """

    flops: float
    nbytes: float
    dtype: str

    def roofline_ms(self, chip: Chip) -> float | None:
        """The least time `chip` could take, in milliseconds; None where its figures are not known."""
        if not chip.known:
            return None
        compute_s = self.flops / (chip.peak_tflops(self.dtype) * 1e12)
        return 1e3 * max(compute_s, self.nbytes / (chip.hbm_gbps * 1e9))


@dataclasses.dataclass(frozen=True)
class Compilable:
    """A whole program, ready to be lowered and compiled for devices that need not be attached.

    Attributes:
        function: Jitted, with shardings and donation.
        arguments: Pytrees of `jax.ShapeDtypeStruct` with shardings.
        donated: Of these, the ones whose memory the results take.
        options: What ``.compile(compiler_options=...)`` takes.
    """

    function: Any
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    options: Mapping[str, str | int | bool] = dataclasses.field(default_factory=dict)


class Kernel(abc.ABC):
    """A tunable kernel. Methods that need jax import it themselves: listing kernels must not.

    Attributes:
        name: As on the command line.
        summary: One line for ``list``.
        problem_type: The kernel's `Problem`.
        problems: Named problems; the first is the default.
        sources: Modules whose text decides numerics or speed; hashed into `version`.
        platforms: JAX's names of those that its configs run on.
        timeout_s: How long one config may take to compile, where the command line does not say.
        relatives: The operations of other tuners' tables (`autotune.interop`) whose blocks fit this kernel, each with
            this kernel's parameters and what they are called there; what is no word is a value they must have.
        cpu_devices: How many devices a CPU passes for where the kernel runs on one: more than one for a program that
            is spread over a mesh.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    problem_type: ClassVar[type[Problem]]
    problems: ClassVar[Mapping[str, Problem]]
    sources: ClassVar[Sequence[str]]
    platforms: ClassVar[Sequence[str]] = ("tpu",)
    timeout_s: ClassVar[float] = 120.0
    relatives: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    cpu_devices: ClassVar[int] = 1

    @abc.abstractmethod
    def space(self, problem: Any, chip: Chip) -> Space:
        """The configs worth trying for `problem` on `chip`."""

    @abc.abstractmethod
    def arguments(self, problem: Any) -> tuple[ArraySpec, ...]:
        """The arrays that `bind`'s function takes."""

    @abc.abstractmethod
    def bind(self, problem: Any, config: Config, *, interpret: Any = False) -> Callable[..., jax.Array]:
        """The kernel with `config`: a function of the arrays in `arguments`.

        Args:
            interpret: Passed to `pallas_call`; `pltpu.InterpretParams` runs it on a CPU.
        """

    @abc.abstractmethod
    def reference(self, problem: Any) -> Callable[..., jax.Array]:
        """Plain JAX with the same arguments and result: the numerics to match, and the ``xla`` baseline.

        Given float32 arguments it must compute in float32 throughout.
        """

    @abc.abstractmethod
    def baselines(self, problem: Any, chip: Chip) -> dict[str, Config]:
        """Named configs to compare with, ``default`` (what libraries ship) among them."""

    def heuristic(self, problem: Any, chip: Chip) -> Config:
        """What training code runs with where there is no preset: it must compile. By default the best estimate.

        Raises:
            UsageError: The problem has no valid config.
        """
        best = min(self.space(problem, chip), key=lambda c: self.estimate_ms(problem, c, chip), default=None)
        if best is None:
            raise UsageError(f"{self.name} has no valid config for {problem} on {chip.name}")
        return best

    @abc.abstractmethod
    def cost(self, problem: Any) -> Cost:
        """The problem's roofline."""

    @abc.abstractmethod
    def estimate_ms(self, problem: Any, config: Config, chip: Chip) -> float:
        """An analytic time, from arithmetic alone: good enough to rank by, cheap enough for a whole space;
        infinite where nothing is known: then all configs rank alike.
        """

    def known_ms(self, problem: Any, config: Config, chip: Chip) -> float | None:
        """`estimate_ms` as a time to be given to somebody; None where nothing is known."""
        estimate = self.estimate_ms(problem, config, chip)
        return estimate if math.isfinite(estimate) else None

    @abc.abstractmethod
    def validation_problems(self, problem: Any, config: Config) -> list[Any]:
        """Small problems on which `config` runs as it would on `problem`.

        Dtype and static options are the problem's own. One takes the problem's own path: blocks that divide
        where they do on the problem, at least two and up to three of them where the problem has as many. One has
        three blocks along each blocked dimension, the last one uneven: what is right for the first and the last
        block may be wrong between them. Dimensions that are not blocked (batch, heads) have two or more, and a
        ratio (heads per kv head) three, where the problem has as many. All of this at once where that is cheap;
        else over several problems, each of which keeps at one what it does not test.
        """

    def validation_reference(self, problem: Any) -> Callable[..., jax.Array]:
        """`reference` for validation: the same function, computed in less memory where that needs much."""
        return self.reference(problem)

    def make_inputs(self, problem: Any, seed: int) -> tuple[jax.Array, ...]:
        """Random arguments, standard normal; kernels whose arguments mean something else override it."""
        import jax
        import jax.numpy as jnp

        specs = self.arguments(problem)
        keys = jax.random.split(jax.random.key(seed), len(specs))
        return tuple(
            jax.random.normal(key, spec.shape, jnp.float32).astype(spec.dtype)
            for key, spec in zip(keys, specs, strict=True)
        )

    def target(self, problem: Any) -> str | None:
        """The target that the problem itself names (``v5e``, ``cpu``); None where any will do."""
        return None

    @property
    def spread(self) -> bool:
        """Whether its programs are those of `compilable`, for a mesh of devices (which may be one)."""
        return self.cpu_devices > 1

    def devices(self, problem: Any) -> int:
        """How many devices the program is spread over."""
        return 1

    def topology(self, problem: Any) -> str | None:
        """libtpu's name of these devices; None of one device, or of devices that are no TPUs."""
        return None

    def compilable(self, problem: Any, config: Config | None, devices: Sequence[Any]) -> Compilable:
        """What is compiled and timed of a kernel that is spread over a mesh: the whole program on these devices.

        Args:
            config: None is the reference.
        """
        raise NotImplementedError(f"{self.name} runs on one device")

    def program_inputs(self, problem: Any, seed: int) -> tuple[Any, ...]:
        """Values for the arguments of `compilable`, unsharded."""
        raise NotImplementedError(f"{self.name} runs on one device")

    def options(self, problem: Any) -> Mapping[str, Any]:
        """What of XLA's compile options the program is compiled with, kernel and reference alike."""
        return {}

    def terms(self, problem: Any, config: Config) -> Mapping[str, str]:
        """`config` as others write it: a library's type or a trainer's name, and the text to take over."""
        return {}

    def overwrites(self, problem: Any) -> tuple[int, ...]:
        """Which of `arguments` the function may overwrite (donated ones); the device engine restores them."""
        return ()

    @functools.cached_property
    def version(self) -> str:
        """A hash of the sources that decide numerics or speed: kept with every preset.

        Raises:
            AutotuneError: A source cannot be read.
        """
        digest = hashlib.sha256()
        for module in self.sources:
            try:
                digest.update(inspect.getsource(importlib.import_module(module)).encode())
            except (Exception, SystemExit) as error:  # Anything may happen as another's module loads.
                raise AutotuneError(
                    f"kernel {self.name!r}: its source {module} cannot be read: {_line(error)}"
                ) from error
        return digest.hexdigest()[:12]

    @property
    def path(self) -> str:
        """How another process finds it where it is not registered: ``module:Class``."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    def tune_command(self, problem: Any, where: str) -> str:
        """What a user does to tune `problem`.

        Args:
            where: The command line's options that say for what.
        """
        return f"python -m autotune {self.name} {where} --problem {problem}"

    @property
    def default_problem(self) -> str:
        return next(iter(self.problems))

    def parse_problem(self, text: str | None) -> Problem:
        """A problem from its name, from ``k=v,…`` over the default problem, or from a name and ``k=v,…``."""
        name, fields = self.default_problem, {}
        if text:
            head, _, rest = text.partition(",")
            if "=" not in head:
                name, text = head.strip(), rest
            fields = parse_pairs(text, "the problem")
        if name not in self.problems:
            raise UsageError(f"{self.name} has no problem named {name!r}: use {one_of(self.problems)}, or name=value,…")
        return self.problems[name].replace(fields)


@functools.cache
def kernel_names() -> tuple[str, ...]:
    """The registered kernels, sorted."""
    return tuple(sorted(importlib.metadata.entry_points(group=ENTRY_POINTS).names))


@functools.cache
def get_kernel(name: str) -> Kernel:
    """The kernel registered as `name`.

    Raises:
        UsageError: No kernel has that name.
        AutotuneError: It cannot be loaded, whatever the reason, or is no usable `Kernel`.
    """
    found = importlib.metadata.entry_points(group=ENTRY_POINTS, name=name)
    if not found:
        names = kernel_names()
        right = f"use {one_of(names)}" if names else "none is registered; install the project (pip install .)"
        raise UsageError(f"unknown kernel {name!r}: {right}")
    entry = next(iter(found))
    try:
        with contextlib.redirect_stdout(sys.stderr):  # Standard output is for the command's own result.
            kernel = usable(entry.load())
        if not kernel.problems:
            raise ValueError(f"{type(kernel).__name__}.problems must name at least one Problem")
        return kernel
    except (Exception, SystemExit) as error:  # One package's broken kernel must not take the others down.
        why = (foreign_kernels_package() if isinstance(error, ImportError) else None) or _line(error)
        of = f" of {entry.dist.name}" if entry.dist else ""
        raise AutotuneError(f"kernel {name!r} ({entry.value}{of}) cannot be loaded: {why}") from error


def foreign_kernels_package() -> str | None:
    """What is wrong where another package named ``kernels`` is found before this project's; else None.

    Hugging Face's distribution of that name installs one, and a folder beside the caller's script may be one.
    """
    try:
        spec = importlib.util.find_spec("kernels")
    except ValueError:  # Made by hand, without a spec.
        spec = None
    places = list(spec.submodule_search_locations or [spec.origin]) if spec else []
    if not places or any((Path(place) / "_tpu_model.py").is_file() for place in places):
        return None
    return (
        f"{places[0]} is another project's: pip uninstall kernels, then install this one again "
        "(a folder of your own: rename it, or work in another folder)"
    )


def usable(loaded: Any) -> Kernel:
    """The kernel that was found: a `Kernel`, a class of them, or a function that `autotune.tunable` has decorated.

    Raises:
        TypeError, ValueError: It is something else, or lacks what is asked of it before any method is called.
    """
    kernel = loaded() if isinstance(loaded, type) else getattr(loaded, "kernel", loaded)
    if not isinstance(kernel, Kernel):
        raise TypeError(f"must be an autotune.kernel.Kernel, not {type(kernel).__name__}")
    lacking = [name for name in ("name", "summary", "problem_type", "problems", "sources") if not hasattr(kernel, name)]
    if lacking:
        raise TypeError(f"{type(kernel).__name__} lacks {', '.join(lacking)}")
    if not all(isinstance(problem, Problem) for problem in kernel.problems.values()):
        raise ValueError(f"{type(kernel).__name__}.problems must name at least one Problem, and nothing else")
    return kernel


def _line(error: BaseException) -> str:
    """Type and text in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}".removesuffix(": ")
