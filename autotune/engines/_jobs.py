"""The jobs that engines send to workers: JSON in, JSON out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from autotune.chips import get_chip
from autotune.engines._worker import resolve
from autotune.kernel import Kernel, get_kernel, kernel_names
from autotune.validation import validate as _validate


def kernel_path(kernel: Kernel) -> str:
    """How a worker finds the kernel: its registered name, or ``module:Class`` where it is not registered."""
    if kernel.name in kernel_names() and get_kernel(kernel.name) is kernel:
        return kernel.name
    return f"{type(kernel).__module__}:{type(kernel).__qualname__}"


def open_kernel(kernel: str, problem: Mapping[str, Any]) -> tuple[Kernel, Any]:
    """The kernel and the problem that a job was sent."""
    instance = _made(kernel) if ":" in kernel else get_kernel(kernel)
    return instance, instance.problem_type.from_dict(problem)


@functools.cache
def _made(kernel: str) -> Kernel:
    """The same one each time: what a worker keeps of a kernel it finds again."""
    made: Kernel = resolve(kernel)()
    return made


def compile_config(kernel: str, problem: Mapping[str, Any], target: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The kernel with `config`, compiled for `target` and predicted."""
    instance, parsed = open_kernel(kernel, problem)
    estimate = instance.estimate_ms(parsed, config, get_chip(target))
    return _compile(instance, parsed, target, instance.bind(parsed, config), estimate)


def compile_reference(kernel: str, problem: Mapping[str, Any], target: str) -> dict[str, Any]:
    """The reference as XLA compiles it for `target`, predicted by the same rules."""
    instance, parsed = open_kernel(kernel, problem)
    return _compile(instance, parsed, target, instance.reference(parsed), None)


def _compile(
    kernel: Kernel, problem: Any, target: str, function: Callable[..., Any], analytic_ms: float | None
) -> dict[str, Any]:
    from autotune.engines.compiler.toolchain import compile_for

    chip = get_chip(target)
    roofline_ms = kernel.cost(problem).roofline_ms(chip) or 0.0
    outcome = compile_for(function, kernel.arguments(problem), chip, roofline_ms=roofline_ms, analytic_ms=analytic_ms)
    return outcome.to_dict()


def validate(kernel: str, problem: Mapping[str, Any], config: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The kernel with `config` against the reference, in the TPU interpreter."""
    instance, parsed = open_kernel(kernel, problem)
    return _validate(instance, parsed, config, seed=seed).to_dict()


def import_jax() -> dict[str, str]:
    """Warm-up of a worker that only validates."""
    import jax

    return {"jax": jax.__version__}
