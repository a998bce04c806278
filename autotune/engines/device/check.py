"""Whether a kernel is right on the device itself, on inputs of full size.

What small problems in an interpreter cannot show: that the real memory it leaves unwritten shows, that it does the
same each time, that it leaves its inputs alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autotune.engines._refusals import classify_run_error, text_of
from autotune.engines.device.programs import fingerprint, forget_programs
from autotune.kernel import Kernel
from autotune.outcome import Config, Status
from autotune.validation import Validation, compare_results, reference_results

# Sums on a GPU may be made in any order; elsewhere the same program on the same values gives the same bits.
_REPRODUCIBLE = ("tpu", "cpu")


def check_on_device(kernel: Kernel, problem: Any, config: Config, seed: int) -> Validation:
    """The verdict on one config. Never raises for what the kernel does.

    Three runs into memory full of NaN: two on the same inputs, which must agree to the bit, and one on others, which
    a result left from before would not fit.
    """
    where = f"{problem} on the device"
    forget_programs()  # Their inputs and code would take the memory that the reference needs.
    try:
        return dataclasses.replace(_check(kernel, problem, config, seed, where), problems=(where,))
    except _NoReference as error:  # Transient: nothing was shown, and nothing is kept of it.
        return Validation(Status.CRASH, problems=(where,), message=f"{where}: {error}")
    except Exception as error:
        outcome = classify_run_error(text_of(error))
        return Validation(outcome.status, problems=(where,), message=f"{where}: {outcome.message}")


def _check(kernel: Kernel, problem: Any, config: Config, seed: int, where: str) -> Validation:
    def refuse(reason: str) -> Validation:
        return Validation(Status.WRONG_RESULT, message=f"{where}: {reason}")

    function, overwrites = kernel.bind(problem, config), kernel.overwrites(problem)
    kept = [place for place in range(len(kernel.arguments(problem))) if place not in overwrites]

    def into(buffers: Any, *arguments: Any) -> Any:
        return function(*arguments)

    # The results take the place of the donated buffers: what is not written keeps what was there.
    donated = (0, *(1 + place for place in overwrites))
    poisoned = jax.jit(into, donate_argnums=donated, keep_unused=True, compiler_options=dict(kernel.options(problem)))

    def run(inputs: tuple[Any, ...]) -> list[Any]:
        shapes = jax.eval_shape(function, *inputs)
        return jax.tree.leaves(jax.block_until_ready(poisoned(jax.tree.map(_poison, shapes), *inputs)))

    verdicts: list[Validation] = []
    before: list[Any] = []
    want: list[Any] = []
    shapes: list[Any] = []
    for turn, number in enumerate((seed, seed, seed + 1)):
        inputs = kernel.make_inputs(problem, number)
        known = fingerprint(tuple(inputs[place] for place in kept))
        got = run(inputs)
        if fingerprint(tuple(inputs[place] for place in kept)) != known:
            changed = [place for place in kept if _differs(inputs[place], kernel.make_inputs(problem, number)[place])]
            return refuse(f"it overwrote its argument {changed[0] if changed else '?'}")
        if turn == 1 and jax.default_backend() in _REPRODUCIBLE and any(map(_differs, before, got)):
            return refuse("a second run on the same inputs gave another result")
        if turn != 1:  # The second run's is the first's.
            inputs = kernel.make_inputs(problem, number) if overwrites else inputs
            want, shapes = _reference(kernel, problem, inputs)
        verdict = compare_results(got, want, shapes, inputs, where)
        if not verdict.ok:
            return verdict
        verdicts.append(verdict)
        before = got
    return max(verdicts, key=lambda verdict: verdict.max_rel_error or 0.0)


class _NoReference(Exception):
    """There is nothing to compare with, which is not the config's doing."""


def _reference(kernel: Kernel, problem: Any, inputs: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """As `reference_results`; by the host's CPU where the device has not the memory.

    Raises:
        _NoReference: It cannot be computed at all.
    """
    try:
        return reference_results(kernel, problem, inputs)
    except Exception as error:
        if jax.default_backend() == "cpu":
            raise _NoReference(f"the reference in float32 cannot be computed: {text_of(error)}") from error
    try:
        host = jax.local_devices(backend="cpu")[0]
        with jax.default_device(host):
            return reference_results(kernel, problem, tuple(jax.device_put(array, host) for array in inputs))
    except Exception as error:
        raise _NoReference(f"the reference in float32 cannot be computed, nor on the host: {text_of(error)}") from error


def _poison(shape: Any) -> jax.Array:
    """NaN, or the number least likely to be right."""
    if jnp.issubdtype(shape.dtype, jnp.floating):
        return jnp.full(shape.shape, jnp.nan, shape.dtype)
    if shape.dtype == jnp.bool_:
        return jnp.zeros(shape.shape, shape.dtype)
    return jnp.full(shape.shape, jnp.iinfo(shape.dtype).min, shape.dtype)


def _differs(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    return one.tobytes() != other.tobytes()
