"""What an op moves to and from HBM, by what its fused computation does with each operand."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.engines.compiler.timeline.hlo import Array, Computation, Instruction, Module

_SLICES = ("dynamic-slice", "slice", "gather")
_WORK = ("fusion", "custom-call", "convolution", "dot", "copy", "while", "conditional", "call")
_PREPARES = ("PrepareAsyncCallStart", "PrepareAsyncCallDone", "AssumeGatherIndicesInBound")
_SAME = ("bitcast", "reshape")  # no other bytes than those of what they name


def traffic_bytes(module: Module, computation: Computation, one: Instruction) -> int:
    """Bytes that `one` of `computation` reads from HBM and writes to it.

    Of an operand that is only sliced, the slices count; of a result that is an operand updated in place, the update.
    What the compiler has placed in VMEM counts nothing.
    """
    read = 0
    for place, name in enumerate(one.operands):
        if name not in one.operands[:place] and _in_hbm(array := _only(computation[name])):
            read += min(array.stored_bytes, _read(module, computation, one, name))
    return read + sum(_written(module, computation, one))


def awaited_bytes(module: Module) -> int:
    """Bytes that other cores (SparseCores, which copy and turn arrays) move while this one does nothing but wait.

    Those of the entry computation whose end is awaited before anything else is begun; what runs beside them, and
    they beside it, is not counted.
    """
    total, waiting = 0, {}
    for one in module.entry:
        if one.attribute("async_execution_thread") is not None and one.opcode.endswith("-start"):
            waiting[one.name] = sum(array.stored_bytes for array in one.arrays if _in_hbm(array))
        elif one.opcode.endswith("-done"):
            total += sum(waiting.pop(name, 0) for name in one.operands)
        elif one.opcode in _WORK and one.target not in _PREPARES:
            waiting.clear()
    return total


def _only(one: Instruction) -> Array:
    return one.arrays[0]


def _in_hbm(array: Array) -> bool:
    return array.space == 0


def _read(module: Module, computation: Computation, user: Instruction, name: str) -> int:
    """Bytes of the value `name` that `user` needs; more than there are where it needs some twice."""
    if user.opcode in _SLICES and user.operands[0] == name:
        return sum(array.stored_bytes for array in user.arrays)
    if user.opcode == "dynamic-update-slice" and user.operands[0] == name:
        return 0
    if user.opcode != "fusion":
        return _only(computation[name]).stored_bytes
    inside = module.computations[user.called["calls"]]
    return sum(
        _read_inside(module, inside, parameter.name)
        for place, operand in enumerate(user.operands)
        if operand == name
        for parameter in inside
        if parameter.opcode == "parameter" and int(parameter.argument) == place
    )


def _read_inside(module: Module, inside: Computation, name: str) -> int:
    total = 0
    for user in inside:
        if name in user.operands:
            total += (
                _read_inside(module, inside, user.name) if user.opcode in _SAME else _read(module, inside, user, name)
            )
    return total


def _written(module: Module, computation: Computation, one: Instruction) -> Iterator[int]:
    """Of each result that lies in HBM."""
    if one.opcode == "dynamic-update-slice":
        yield _only(computation[one.operands[1]]).stored_bytes if _in_hbm(_only(one)) else 0
        return
    if one.opcode != "fusion":
        yield from (array.stored_bytes for array in one.arrays if _in_hbm(array))
        return
    inside = module.computations[one.called["calls"]]
    root = inside[inside.root]
    roots = [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]
    if len(roots) != len(one.arrays):  # a result that is a tuple itself
        yield from (array.stored_bytes for array in one.arrays if _in_hbm(array))
        return
    for array, made in zip(one.arrays, roots, strict=True):
        if _in_hbm(array):
            yield min(array.stored_bytes, sum(_written(module, inside, _origin(inside, made))))


def _origin(inside: Computation, one: Instruction) -> Instruction:
    while one.opcode in _SAME and inside[one.operands[0]].opcode != "parameter":
        one = inside[one.operands[0]]
    return one
