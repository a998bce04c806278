"""``@autotune.tunable``: a function whose keyword arguments are tuned."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune import presets
from autotune.chips import find_chip
from autotune.errors import UsageError
from autotune.kernel import get_kernel, kernel_names
from autotune.own.kernel import Candidates, OwnKernel
from autotune.own.locate import stop_if_loading
from autotune.own.problem import OwnProblem

if TYPE_CHECKING:
    from autotune.tuner import TuneResult

PLATFORMS = ("tpu", "gpu", "cpu")


class Tunable:
    """A function that takes what was tuned for its arguments; `tunable` makes it.

    Attributes:
        kernel: The same as the tuner and the command line know it; what an entry point may name.
    """

    def __init__(self, function: Callable[..., Any], kernel: OwnKernel, reference: Callable[..., Any] | None) -> None:
        functools.update_wrapper(self, function)
        self.kernel = kernel
        self._function, self._reference = function, reference
        self._names = set(kernel._space)

    def __call__(self, *arrays: Any, **keywords: Any) -> Any:
        """The function with the preset for these shapes on this device, looked up while it is traced.

        What the caller gives of the tunable arguments stands. A function that runs on TPUs alone gives way to its
        reference elsewhere.
        """
        given = {name: value for name, value in keywords.items() if name in self._names}
        options = {name: value for name, value in keywords.items() if name not in self._names and name != "interpret"}
        if "interpret" in keywords and "interpret" in inspect.signature(self._function).parameters:
            options["interpret"] = keywords["interpret"]
        config = given if self._names <= set(given) else {**self._config(arrays, options), **given}
        call = functools.partial(self._function, **options, **config)
        if "cpu" in self.kernel.platforms or options.get("interpret") or self._reference is None:
            return call(*arrays)
        import jax

        plain = functools.partial(self._reference, **options)
        return jax.lax.platform_dependent(*arrays, tpu=call, default=plain)

    def tune(
        self,
        *arrays: Any,
        trials: int = 100,
        target: str | None = None,
        engine: str = "auto",
        budget: float | None = None,
        timeout: float | None = None,
        jobs: int = 2,
        seed: int = 0,
        results: str | Path = "results",
        **options: Any,
    ) -> TuneResult:
        """Searches the space for the fastest config that equals the reference, and keeps it as a preset.

        Args:
            arrays: As in a call; anything with a shape and a dtype will do (`jax.ShapeDtypeStruct`).
            trials: Configs to try.
            target: A TPU generation that need not be here; None is the attached device.
            engine: As on the command line.
            budget: Seconds; None for no limit.
            timeout: Seconds a trial.
            jobs: Workers.
            seed: Of the search.
            results: The results folder; lookups find ``./results``.
            options: The function's other arguments.

        Returns:
            What was found: ``.best.config``, ``.best.outcome.time_ms``, ``.speedup("default")``, ``.preset``.

        Raises:
            UsageError: It cannot be tuned as asked.
            UnavailableError: The machine lacks what that takes.
        """
        stop_if_loading()
        from autotune import engines, render
        from autotune.cli.progress import make_progress
        from autotune.engines import Task
        from autotune.search import SearchSettings
        from autotune.tuner import check, tune

        problem = OwnProblem.of(arrays, options)
        _ = self.kernel.path  # Says so where no other process can find it.
        if self.kernel.name in kernel_names() and get_kernel(self.kernel.name) is not self.kernel:
            raise UsageError(f"there is a kernel {self.kernel.name} already: give this one another name=")
        engine, chip = engines.choose(engine, target)
        task = Task(self.kernel, problem, chip)
        settings = SearchSettings(trials=trials, seed=seed, budget_s=budget, results=Path(results))
        check(task, settings)
        with engines.open_engine(engine, task, jobs=jobs, timeout_s=timeout) as opened:
            heading = [f"{self.kernel.name} {problem}", f"on {chip.name}, {opened.name} engine"]
            heading += [opened.notice] if opened.notice else []
            with make_progress(render.console(stderr=True), heading) as progress:
                return tune(task, opened, settings, progress)

    def explain(self, *arrays: Any, device_kind: str, **options: Any) -> presets.Explanation:
        """Which config a call takes on that device, and why: see `autotune.presets.explain`."""
        return presets.explain(self.kernel, OwnProblem.of(arrays, options), device_kind=device_kind)

    def _config(self, arrays: Sequence[Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
        import jax

        problem = OwnProblem.of(arrays, {name: value for name, value in options.items() if name != "interpret"})
        device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) or jax.devices()[0]
        chip = find_chip(device.device_kind)
        if chip is None or chip.platform not in self.kernel.platforms:
            return self.kernel.heuristic(problem, chip)  # A device that nothing is tuned for.
        return presets.lookup(self.kernel, problem, device_kind=chip.device_kind)


def tunable(
    space: Mapping[str, Candidates],
    *,
    reference: Callable[..., Any] | None = None,
    constraint: Callable[..., bool | str | None] | None = None,
    default: Mapping[str, Any] | None = None,
    name: str | None = None,
    problems: Mapping[str, Sequence[Any]] | None = None,
    validate_on: Callable[..., Sequence[Sequence[Any]]] | None = None,
    inputs: Callable[..., Sequence[Any]] | None = None,
    cost: Callable[..., tuple[float, float]] | None = None,
    platforms: Sequence[str] = PLATFORMS,
) -> Callable[[Callable[..., Any]], Tunable]:
    """Makes a function's keyword arguments tunable.

    The function takes arrays by position, and by keyword what is tuned and its other options (numbers, flags, words).

    Args:
        space: Each tunable argument with its candidates, or a function of the arrays' specs (``.shape``, ``.dtype``)
            that gives them. Empty: a benchmark, which has nothing to tune.
        reference: The same function in plain JAX, without the tunable arguments: what results must equal. None: the
            function itself with its default config.
        constraint: Of a config (a mapping) and the arrays' specs: whether it is valid. Its docstring's first line is
            what a user is told.
        default: The config to start from and to compare with; what it leaves out are the first candidates.
        name: As presets and the command line call it; None is the function's own.
        problems: Named calls for the command line, as arrays or specs; the first is the default.
        validate_on: Of a config and the arrays' specs: smaller calls (lists of specs) on which it is compared with the
            reference. None: the call itself, which Pallas' interpreter may be slow at.
        inputs: Of a `jax.random.key` and the specs: arguments to run on. None: standard normal numbers.
        cost: Of the specs: ``(floating-point operations, bytes to and from HBM)``, for the roofline.
        platforms: Where it runs; ``("tpu",)`` for a Pallas TPU kernel, which gives way to its reference elsewhere.

    Raises:
        UsageError: The function has no such arguments.

    Example:
        >>> @tunable({"block": [128, 256, 512]}, reference=lambda x: 2 * x)
        ... def double(x, *, block=128):
        ...     return 2 * x
    """

    def decorate(function: Callable[..., Any]) -> Tunable:
        parameters = inspect.signature(function).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        for parameter in space:
            if parameter not in parameters and not takes_all:
                raise UsageError(f"{function.__qualname__} has no argument {parameter}: the space names one")
        for parameter in default or {}:
            if parameter not in space:
                raise UsageError(f"default={parameter}: the space has no such argument")
        kernel = OwnKernel(
            function,
            name=name or function.__name__,
            space=dict(space),
            reference=reference,
            constraint=constraint,
            default=default,
            problems={label: OwnProblem.of(arrays, {}) for label, arrays in (problems or {}).items()},
            validate_on=validate_on,
            inputs=inputs,
            cost=cost,
            platforms=platforms,
        )
        return Tunable(function, kernel, reference)

    return decorate
