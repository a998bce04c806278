"""A decorated function as a `Kernel`, which the tuner, the command line and lookups know how to treat."""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.chips import DEFAULT_TARGET, Chip, get_chip
from autotune.errors import UsageError
from autotune.kernel import ArraySpec, Cost, Kernel, kernel_names
from autotune.outcome import Config
from autotune.own.locate import path_of
from autotune.own.problem import OwnProblem
from autotune.space import Constraint, Param, Space
from autotune.validation import TOLERANCES

if TYPE_CHECKING:
    import jax

Candidates = Sequence[Any] | Callable[..., Sequence[Any]]


class OwnKernel(Kernel):
    """What `autotune.tunable` makes of a function; it documents the arguments."""

    problem_type = OwnProblem

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        space: Mapping[str, Candidates],
        reference: Callable[..., Any] | None,
        constraint: Callable[..., bool | str | None] | None,
        default: Mapping[str, Any] | None,
        problems: Mapping[str, OwnProblem],
        validate_on: Callable[..., Sequence[Sequence[Any]]] | None,
        inputs: Callable[..., Sequence[Any]] | None,
        cost: Callable[..., tuple[float, float]] | None,
        platforms: Sequence[str],
    ) -> None:
        self.name = name  # type: ignore[misc]
        self.summary = (inspect.getdoc(function) or f"{function.__module__}.{function.__qualname__}").splitlines()[0]  # type: ignore[misc]
        self.problems = problems  # type: ignore[misc]
        self.sources = (function.__module__,)  # type: ignore[misc]
        self.platforms = tuple(platforms)  # type: ignore[misc]
        self.function = function
        self._space, self._reference, self._constraint, self._default = space, reference, constraint, default
        self._validate_on, self._inputs, self._cost = validate_on, inputs, cost
        self._interprets = "interpret" in inspect.signature(function).parameters

    @property
    def path(self) -> str:
        """How a worker finds it."""
        return path_of(self.function)

    @functools.cached_property
    def version(self) -> str:
        """Of the text of the module that defines the function, and of the reference's."""
        files = {inspect.getsourcefile(one) for one in (self.function, self._reference) if one is not None}
        digest = hashlib.sha256()
        for file in sorted(filter(None, files)):
            with open(file, "rb") as source:
                digest.update(source.read())
        return digest.hexdigest()[:12]

    def tune_command(self, problem: OwnProblem, where: str) -> str:
        if self.name in kernel_names():
            return super().tune_command(problem, where)
        return f"{self.name}.tune(...) with these arguments"

    def space(self, problem: OwnProblem, chip: Chip) -> Space:
        specs = problem.specs
        params = []
        for name, candidates in self._space.items():
            values = tuple(candidates(*specs) if callable(candidates) else candidates)
            if not values:
                raise UsageError(f"{self.name}: {name} has no candidates for {problem}")
            params.append(Param(name, values, "", (self._default or {}).get(name, values[0])))
        constraints = []
        if (rule := self._constraint) is not None:
            text = inspect.getdoc(rule) or f"{getattr(rule, '__name__', 'the constraint')} must hold"
            constraints.append(Constraint(text.splitlines()[0], lambda config: _holds(rule(config, *specs))))
        return Space(params, constraints)

    def arguments(self, problem: OwnProblem) -> tuple[ArraySpec, ...]:
        return problem.specs

    def bind(self, problem: OwnProblem, config: Config, *, interpret: Any = False) -> Callable[..., jax.Array]:
        keywords = {**problem.keywords, **config}
        if interpret and self._interprets:
            keywords["interpret"] = interpret
        call = functools.partial(self.function, **keywords)
        if not interpret or self._interprets:
            return call

        def interpreted(*arrays: Any) -> Any:
            from jax.experimental.pallas import tpu as pltpu

            with pltpu.force_tpu_interpret_mode(interpret):
                return call(*arrays)

        return interpreted

    def reference(self, problem: OwnProblem) -> Callable[..., jax.Array]:
        if self._reference is None:
            return self.bind(problem, self._first(problem))
        return functools.partial(self._reference, **problem.keywords)

    def validation_reference(self, problem: OwnProblem) -> Callable[..., jax.Array]:
        if self._reference is not None:
            return self.reference(problem)
        from jax.experimental.pallas import tpu as pltpu

        return self.bind(problem, self._first(problem), interpret=pltpu.InterpretParams())

    def baselines(self, problem: OwnProblem, chip: Chip) -> dict[str, Config]:
        return {"default": self._first(problem)}

    def heuristic(self, problem: OwnProblem, chip: Chip | None) -> Config:
        return self._first(problem)

    def _first(self, problem: OwnProblem) -> Config:
        """The default where it is valid for these shapes, else the first candidates that are."""
        space = self.space(problem, get_chip(DEFAULT_TARGET))  # the same for all
        default = space.parse({})
        if space.why_invalid(default) is None:
            return default
        found = next(iter(space), None)
        if found is None:
            raise UsageError(f"{self.name} has no valid config for {problem}")
        return found

    def cost(self, problem: OwnProblem) -> Cost:
        specs = problem.specs
        flops, nbytes = self._cost(*specs) if self._cost is not None else (0.0, sum(spec.nbytes for spec in specs))
        dtype = specs[0].dtype if specs and specs[0].dtype in TOLERANCES else "bfloat16"
        return Cost(flops=float(flops), nbytes=float(nbytes), dtype=dtype)

    def estimate_ms(self, problem: OwnProblem, config: Config, chip: Chip) -> float:
        """Nothing is known beforehand of another's function: all configs rank alike, and none is given this time."""
        return math.inf

    def validation_problems(self, problem: OwnProblem, config: Config) -> list[OwnProblem]:
        if self._validate_on is None:
            return [problem]
        return [OwnProblem.of(arrays, problem.keywords) for arrays in self._validate_on(config, *problem.specs)]

    def make_inputs(self, problem: OwnProblem, seed: int) -> tuple[jax.Array, ...]:
        if self._inputs is None:
            return super().make_inputs(problem, seed)
        import jax

        return tuple(self._inputs(jax.random.key(seed), *problem.specs))


def _holds(verdict: bool | str | None) -> bool:
    """A constraint may say whether all is well, or what is not."""
    return not verdict if isinstance(verdict, str) or verdict is None else bool(verdict)
