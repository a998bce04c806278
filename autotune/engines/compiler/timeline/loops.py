"""How often a loop of the scheduled HLO runs: its counter, computed as the scalar unit would."""

from __future__ import annotations

import operator
from collections.abc import Callable

from autotune.engines.compiler.schedule.scalar import UnresolvedError
from autotune.engines.compiler.timeline.hlo import Computation, Instruction, Module

Value = int | None
"""None: a run alone would know."""
# A loop of more passes than this is no loop over layers, micro-batches or shards.
MAX_PASSES = 100_000
_COPIES = ("copy", "convert", "bitcast", "opt-barrier", "optimization-barrier")
_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "minimum": min,
    "maximum": max,
}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}


def trip_count(module: Module, caller: Computation, loop: Instruction, passed: Callable[[int], Value]) -> int:
    """The passes of a ``while``.

    Args:
        module: All computations.
        caller: The computation that `loop` is in.
        loop: The instruction.
        passed: What element of the caller's own parameter tuple is, where it is known.

    Raises:
        UnresolvedError: What ends the loop depends on what only a run would know.
    """
    condition, body = (module.computations[loop.called[name]] for name in ("condition", "body"))
    needed = sorted(_counters(module, condition, body))
    start = _Scalars(module, caller, passed)
    state: dict[int, Value] = {index: start.element(loop.operands[0], index) for index in needed}
    for passes in range(MAX_PASSES):
        now = dict(state)
        goes_on = _Scalars(module, condition, now.get).value(condition.root)
        if goes_on is None:
            raise UnresolvedError(f"how often the loop {loop.name} runs depends on what only a run would know")
        if not goes_on:
            return passes
        inside = _Scalars(module, body, now.get)
        state = {index: inside.element(body.root, index) for index in needed}
    raise UnresolvedError(f"the loop {loop.name} does not end within {MAX_PASSES:,} passes")


def known_elements(
    module: Module, caller: Computation, loop: Instruction, passed: Callable[[int], Value]
) -> Callable[[int], Value]:
    """What a loop's body knows of its parameter tuple: the elements that every pass hands on as they came."""
    body = module.computations[loop.called["body"]]
    start = _Scalars(module, caller, passed)

    def element(index: int) -> Value:
        root = body[body.root]
        if root.opcode != "tuple" or index >= len(root.operands):
            return None
        kept = body[root.operands[index]]
        same = kept.opcode == "get-tuple-element" and _index(kept) == index
        same = same and body[kept.operands[0]].opcode == "parameter"
        return start.element(loop.operands[0], index) if same else None

    return element


def _counters(module: Module, condition: Computation, body: Computation) -> set[int]:
    """The elements of the loop's tuple that its condition depends on, over any number of passes."""
    needed = _read_elements(condition, condition.root)
    while True:
        root = body[body.root]
        more = set(needed)
        for index in needed:
            if root.opcode == "tuple" and index < len(root.operands):
                more |= _read_elements(body, root.operands[index])
        if more == needed:
            return needed
        needed = more


def _read_elements(computation: Computation, name: str) -> set[int]:
    found: set[int] = set()
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        one = computation[waiting.pop()]
        if one.name in seen:
            continue
        seen.add(one.name)
        if one.opcode == "get-tuple-element" and computation[one.operands[0]].opcode == "parameter":
            found.add(_index(one))
        else:
            waiting += one.operands
    return found


class _Scalars:
    """Integers of one computation, as far as they can be known without running it.

    Args:
        module: All computations.
        computation: The one whose values are asked for.
        passed: Elements of its parameter tuple.
        parameters: Values of its parameters by number, where it is a fusion's.
    """

    def __init__(
        self,
        module: Module,
        computation: Computation,
        passed: Callable[[int], Value],
        parameters: Callable[[int], Value] = lambda number: None,
    ) -> None:
        self._module, self._computation = module, computation
        self._passed, self._parameters = passed, parameters
        self._known: dict[str, Value] = {}

    def value(self, name: str) -> Value:
        if name not in self._known:
            self._known[name] = self._compute(self._computation[name])
        return self._known[name]

    def element(self, name: str, index: int) -> Value:
        """Of a tuple."""
        one = self._computation[name]
        if one.opcode == "tuple":
            return self.value(one.operands[index])
        if one.opcode == "parameter":
            return self._passed(index)
        return self.element(one.operands[0], index) if one.opcode in _COPIES else None

    def _compute(self, one: Instruction) -> Value:
        if one.opcode == "constant":
            return _constant(one.argument)
        if one.opcode == "parameter":
            return self._parameters(int(one.argument))
        if one.opcode == "get-tuple-element":
            return self.element(one.operands[0], _index(one))
        if one.opcode in _COPIES:
            return self.value(one.operands[0])
        if one.opcode == "fusion":
            called = self._module.computations[one.called["calls"]]
            inside = _Scalars(self._module, called, lambda index: None, lambda number: self.value(one.operands[number]))
            return inside.value(called.root)
        if one.opcode in _BINARY or one.opcode == "compare":
            left, right = (self.value(name) for name in one.operands)
            if left is None or right is None:
                return None
            if one.opcode == "compare":
                return int(_COMPARE[one.attribute("direction") or ""](left, right))
            return _BINARY[one.opcode](left, right)
        return None


def _index(one: Instruction) -> int:
    return int(one.attribute("index") or -1)


def _constant(text: str) -> Value:
    if text in ("true", "false"):
        return int(text == "true")
    try:
        return int(text)
    except ValueError:
        return None
