"""The jobs that engines send to workers: JSON in, JSON out."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from autotune.chips import get_chip
from autotune.kernel import Kernel, get_kernel, kernel_names, usable
from autotune.own.locate import find
from autotune.validation import validate as _validate


def kernel_path(kernel: Kernel) -> str:
    """How a worker finds the kernel: its registered name, or where it is defined if it is not registered."""
    if kernel.name in kernel_names() and get_kernel(kernel.name) is kernel:
        return kernel.name
    return kernel.path


def open_kernel(kernel: str, problem: Mapping[str, Any]) -> tuple[Kernel, Any]:
    """The kernel and the problem that a job was sent."""
    instance = _made(kernel) if ":" in kernel else get_kernel(kernel)
    return instance, instance.problem_type.from_dict(problem)


@functools.cache
def _made(kernel: str) -> Kernel:
    """The same one each time: what a worker keeps of a kernel it finds again."""
    return usable(find(kernel))


def compile_config(
    kernel: str, problem: Mapping[str, Any], target: str, config: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The kernel with `config`, or where that is None the reference, compiled for `target` and predicted."""
    instance, parsed = open_kernel(kernel, problem)
    chip = get_chip(target)
    estimate = None if config is None else instance.known_ms(parsed, config, chip)
    figures = {"roofline_ms": instance.cost(parsed).roofline_ms(chip) or 0.0, "analytic_ms": estimate}
    if topology := instance.topology(parsed):
        from autotune.engines.compiler.spread import compile_spread

        return compile_spread(instance, parsed, config, chip, topology, **figures).to_dict()
    from autotune.engines.compiler.toolchain import compile_for

    function = instance.reference(parsed) if config is None else instance.bind(parsed, config)
    options = instance.options(parsed)
    return compile_for(function, instance.arguments(parsed), chip, options=options, **figures).to_dict()


def validate(kernel: str, problem: Mapping[str, Any], config: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The kernel with `config` against the reference, in the TPU interpreter."""
    instance, parsed = open_kernel(kernel, problem)
    return _validate(instance, parsed, config, seed=seed).to_dict()


def import_jax() -> dict[str, str]:
    """Warm-up of a worker that only validates."""
    import jax

    return {"jax": jax.__version__}
