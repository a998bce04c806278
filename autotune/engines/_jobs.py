"""The jobs that engines send to workers: JSON in, JSON out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autotune.chips import get_chip
from autotune.engines._worker import resolve
from autotune.kernel import Kernel
from autotune.validation import validate as _validate


def kernel_path(kernel: Kernel) -> str:
    """How a worker finds the kernel: ``module:Class``."""
    return f"{type(kernel).__module__}:{type(kernel).__qualname__}"


def _open(kernel: str, problem: Mapping[str, Any]) -> tuple[Kernel, Any]:
    instance = resolve(kernel)()
    return instance, instance.problem_type.from_dict(problem)


def compile_config(kernel: str, problem: Mapping[str, Any], target: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The kernel with `config`, compiled for `target` and predicted."""
    instance, parsed = _open(kernel, problem)
    estimate = instance.estimate_ms(parsed, config, get_chip(target))
    return _compile(instance, parsed, target, instance.bind(parsed, config), estimate)


def compile_reference(kernel: str, problem: Mapping[str, Any], target: str) -> dict[str, Any]:
    """The reference as XLA compiles it for `target`, predicted by the same rules."""
    instance, parsed = _open(kernel, problem)
    roofline = instance.cost(parsed).roofline_ms(get_chip(target))
    return _compile(instance, parsed, target, instance.reference(parsed), roofline)


def _compile(
    kernel: Kernel, problem: Any, target: str, function: Callable[..., Any], analytic_ms: float
) -> dict[str, Any]:
    from autotune.engines.compiler.toolchain import compile_for

    return compile_for(function, kernel.arguments(problem), get_chip(target), analytic_ms=analytic_ms).to_dict()


def validate(kernel: str, problem: Mapping[str, Any], config: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The kernel with `config` against the reference, in the TPU interpreter."""
    instance, parsed = _open(kernel, problem)
    return _validate(instance, parsed, config, seed=seed).to_dict()


def import_jax() -> dict[str, str]:
    """Warm-up of a worker that only validates."""
    import jax

    return {"jax": jax.__version__}
