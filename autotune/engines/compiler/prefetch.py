"""What steers a Pallas kernel besides its grid: the values of its scalar-prefetch operands and dynamic grid bounds.

They are computed by the program around the kernel from constants (a mask's block lists) and from arguments that
have example values (group sizes). So the jaxpr is followed as far as it depends on nothing else.

Reads `pallas_call`'s parameters, which JAX does not promise to keep: tried with jax 0.10.2 and 0.12.0.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from autotune.engines.compiler.schedule import PallasCall

LARGEST = 1 << 22  # elements of a value worth computing: what fits the scalar memory is far smaller
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr", "body_jaxpr")  # where primitives keep what they call, by parameter


def steered_calls(jaxpr: core.ClosedJaxpr, examples: Sequence[np.ndarray | None]) -> list[PallasCall]:
    """The program's Pallas calls that have steering operands, in program order.

    Args:
        examples: For each argument a value, where one is known.
    """
    if not _has_steering(jaxpr.jaxpr):
        return []
    shapes: list[tuple[tuple[int, ...], ...]] = []

    def evaluate() -> list[dict[int, Any]]:
        found: list[tuple[core.JaxprEqn, dict[int, Any]]] = []
        _follow(jaxpr.jaxpr, jaxpr.consts, examples, found)
        shapes[:] = [tuple(atom.aval.shape for atom in eqn.invars) for eqn, _ in found]
        return [values for _, values in found]

    # One small program on the CPU, instead of one per primitive; the mesh of the target must not reach it.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        values = jax.jit(evaluate)()
    return [
        PallasCall(operands, {number: np.asarray(value) for number, value in known.items()})
        for operands, known in zip(shapes, values, strict=True)
    ]


def _steering_count(eqn: core.JaxprEqn) -> int:
    mapping = eqn.params["grid_mapping"]
    return mapping.num_dynamic_grid_bounds + mapping.num_index_operands


def _has_steering(jaxpr: core.Jaxpr) -> bool:
    return any(
        _steering_count(eqn) > 0
        if eqn.primitive.name == "pallas_call"
        else any(_has_steering(_open(called)) for called in _called(eqn))
        for eqn in jaxpr.eqns
    )


def _follow(jaxpr: core.Jaxpr, consts: Iterable[Any], arguments: Iterable[Any], found: list[Any]) -> list[Any]:
    """The results' values, None where unknown; Pallas calls met on the way are added to `found`."""
    known: dict[Any, Any] = {}

    def learn(variables: Iterable[Any], values: Iterable[Any]) -> None:
        for variable, value in zip(variables, values, strict=True):
            if value is not None and np.shape(value) == variable.aval.shape and variable.aval.size <= LARGEST:
                known[variable] = value

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else known.get(atom)

    learn(jaxpr.constvars, consts)
    learn(jaxpr.invars, arguments)
    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name == "pallas_call":
            if count := _steering_count(eqn):
                found.append((eqn, {number: v for number, v in enumerate(inputs[:count]) if v is not None}))
        elif not (called := _called(eqn)):
            if all(value is not None for value in inputs):
                learn(eqn.outvars, _bind(eqn, inputs))
        elif len(called) == 1 and len(_open(called[0]).invars) == len(inputs) and eqn.primitive.name != "scan":
            outputs = _follow(_open(called[0]), _consts(called[0]), inputs, found)
            if len(outputs) == len(eqn.outvars):
                learn(eqn.outvars, outputs)
        elif all(value is not None for value in inputs) and not any(_has_pallas(_open(one)) for one in called):
            learn(eqn.outvars, _bind(eqn, inputs))
        else:  # a loop or a branch: what it carries changes, so only its constants are followed
            for one in called:
                _follow(_open(one), _consts(one), _loop_constants(eqn, _open(one), inputs), found)
    return [read(atom) for atom in jaxpr.outvars]


def _bind(eqn: core.JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
    outputs = eqn.primitive.bind(*inputs, **eqn.params)
    return outputs if eqn.primitive.multiple_results else [outputs]


def _called(eqn: core.JaxprEqn) -> list[Any]:
    named = [eqn.params[name] for name in _CALLED if hasattr(eqn.params.get(name), "eqns")]
    return [*named, *eqn.params.get("branches", ())]


def _open(jaxpr: Any) -> core.Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _consts(jaxpr: Any) -> Sequence[Any]:
    return jaxpr.consts if isinstance(jaxpr, core.ClosedJaxpr) else [None] * len(jaxpr.constvars)


def _has_pallas(jaxpr: core.Jaxpr) -> bool:
    return any(
        eqn.primitive.name == "pallas_call" or any(_has_pallas(_open(called)) for called in _called(eqn))
        for eqn in jaxpr.eqns
    )


def _loop_constants(eqn: core.JaxprEqn, body: core.Jaxpr, inputs: Sequence[Any]) -> list[Any]:
    """What of `inputs` each pass of the body sees unchanged, in the body's order; None for the rest."""
    if eqn.primitive.name == "scan":
        constants = inputs[: eqn.params["num_consts"]]
    elif eqn.primitive.name == "while":
        first = eqn.params["cond_nconsts"]
        constants = inputs[first : first + eqn.params["body_nconsts"]]
    elif eqn.primitive.name == "cond":
        constants = inputs[1:]
    else:
        constants = []
    return [*constants, *[None] * (len(body.invars) - len(constants))][: len(body.invars)]
