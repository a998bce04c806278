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
RAGGED_DOT = "ragged_dot_general"  # XLA makes two kernels of it: the first takes the groups' sizes and nothing else
# What calls its jaxpr once, with its own operands.
_CALLS = {
    "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "custom_vmap_call", "shard_map",
}  # fmt: skip


def steered_calls(jaxpr: core.ClosedJaxpr, examples: Sequence[np.ndarray | None]) -> list[PallasCall]:
    """All of the program's Pallas calls, with what is known of their steering operands; none where no call has any.

    Args:
        examples: For each argument a value, where one is known.
    """
    if not _has_steering(jaxpr.jaxpr):
        return []
    operands: list[tuple[tuple[tuple[int, ...], str], ...]] = []

    def evaluate() -> list[dict[int, Any]]:
        found: list[tuple[Sequence[Any], dict[int, Any]]] = []
        _follow(jaxpr.jaxpr, jaxpr.consts, examples, found)
        operands[:] = [tuple((v.aval.shape, str(v.aval.dtype)) for v in atoms) for atoms, _ in found]
        return [values for _, values in found]

    # One small program on the CPU, instead of one per primitive; the mesh of the target must not reach it.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        values = jax.jit(evaluate)()
    return [
        PallasCall(types, {number: np.asarray(value) for number, value in known.items()})
        for types, known in zip(operands, values, strict=True)
    ]


def _steering_count(eqn: core.JaxprEqn) -> int:
    mapping = eqn.params["grid_mapping"]
    return mapping.num_dynamic_grid_bounds + mapping.num_index_operands


def _has_steering(jaxpr: core.Jaxpr) -> bool:
    return any(
        _steering_count(eqn) > 0
        if eqn.primitive.name == "pallas_call"
        else eqn.primitive.name == RAGGED_DOT or any(_has_steering(_open(called)) for called in _called(eqn))
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
        called = _called(eqn)
        if eqn.primitive.name == "pallas_call":
            count = _steering_count(eqn)
            found.append((eqn.invars, {number: v for number, v in enumerate(inputs[:count]) if v is not None}))
        elif eqn.primitive.name == RAGGED_DOT:
            found.append((eqn.invars[2:3], {} if inputs[2] is None else {0: inputs[2]}))
        elif eqn.primitive.name in _CALLS and len(called) == 1 and len(_open(called[0]).invars) == len(inputs):
            outputs = _follow(_open(called[0]), _consts(called[0]), inputs, found)
            if len(outputs) == len(eqn.outvars) and eqn.primitive.name != "shard_map":
                learn(eqn.outvars, outputs)
        elif any(_has_pallas(_open(one)) for one in called):
            # A loop or a branch: what it carries changes, so only its constants are followed.
            for one in called:
                _follow(_open(one), _consts(one), _loop_constants(eqn, _open(one), inputs), found)
        elif all(value is not None for value in inputs):
            learn(eqn.outvars, _bind(eqn, inputs))
    return [read(atom) for atom in jaxpr.outvars]


def _bind(eqn: core.JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
    """The results, None each where they depend on more than the operands (state, a callback, a mesh axis)."""
    unknown = [None] * len(eqn.outvars)
    if eqn.effects or "callback" in eqn.primitive.name:
        return unknown
    try:
        outputs = eqn.primitive.bind(*inputs, **eqn.params)
    except Exception:  # what cannot be evaluated here is not known here
        return unknown
    return outputs if eqn.primitive.multiple_results else [outputs]


def _called(eqn: core.JaxprEqn) -> list[Any]:
    """Every jaxpr among the parameters, conditions of loops included."""
    found = []
    for parameter in eqn.params.values():
        parts = parameter if isinstance(parameter, tuple | list) else [parameter]
        found += [part for part in parts if hasattr(part, "eqns") or hasattr(getattr(part, "jaxpr", None), "eqns")]
    return found


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
        constants = inputs[: _scan_constants(eqn)]
    elif eqn.primitive.name == "while" and body is _open(eqn.params["body_jaxpr"]):
        first = eqn.params["cond_nconsts"]
        constants = inputs[first : first + eqn.params["body_nconsts"]]
    elif eqn.primitive.name == "cond":
        constants = inputs[1:]
    else:
        constants = []
    return [*constants, *[None] * (len(body.invars) - len(constants))][: len(body.invars)]


def _scan_constants(eqn: core.JaxprEqn) -> int:
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"]
    groups = eqn.params.get("ft_in")  # jax 0.12: constants, carries and slices
    return len(groups.unpack()[0]) if hasattr(groups, "unpack") else 0
