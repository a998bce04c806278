"""The scalar unit's instructions as Python expressions, and values that only a run would know."""

from __future__ import annotations

import re
from typing import Any

from autotune.engines.compiler.schedule.bundles import CORE_ID, Instruction

_ALLOCATION = re.compile(r"#allocation(\d+)(?:_spill)?(?: \+ (?P<offset>[^\]]+))?\]*$")
ADDRESS_SPACE = 1 << 20  # keeps allocations apart; no kernel has a semaphore or SMEM array as large
_MASK = (1 << 32) - 1
_SIGN = 1 << 31


class UnresolvedError(Exception):
    """The control flow depends on a value that only a run would know, or on an instruction not known here."""


class Unknown:
    """A value that the schedule does not determine. Arithmetic keeps it unknown, logic as far as it matters.

    Args:
        origin: Where it came from, for the error.
        strict: Whether deciding on it raises; else it counts as false.
    """

    def __init__(self, origin: str, strict: bool = True) -> None:
        self.origin = origin
        self._strict = strict

    def _unknown(self, *_: Any) -> Unknown:
        return self

    __neg__ = _unknown

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _unknown
    __xor__ = __rxor__ = _unknown
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _unknown
    __lt__ = __le__ = __gt__ = __ge__ = _unknown
    __eq__ = __ne__ = _unknown  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __and__(self, other: Any) -> Any:
        """Unknown, unless the other operand decides: nothing is left of false, or of no bits."""
        return other if not isinstance(other, Unknown) and other == 0 else self

    def __or__(self, other: Any) -> Any:
        """Unknown, unless the other operand is true."""
        return other if other is True else self

    __rand__, __ror__ = __and__, __or__

    def __bool__(self) -> bool:
        if self._strict:
            raise UnresolvedError(f"the schedule branches on a value {self.origin}")
        return False


def known_or_zero(amount: Any) -> Any:
    """The amount; for one that only the runtime knows, none.

    Raises:
        UnresolvedError: It is unknown where it matters, within an op.
    """
    return amount or 0 if isinstance(amount, Unknown) else amount


def wrap(number: Any) -> Any:
    """The low 32 bits, signed: registers hold no more."""
    return ((number + _SIGN) & _MASK) - _SIGN


def smaller(first: Any, second: Any) -> Any:
    """The smaller by unsigned comparison of operands already masked, which are then signed again."""
    for operand in (first, second):
        if isinstance(operand, Unknown):
            return operand
    return wrap(min(first, second))


def larger(first: Any, second: Any) -> Any:
    """The larger, like `smaller`."""
    for operand in (first, second):
        if isinstance(operand, Unknown):
            return operand
    return wrap(max(first, second))


def divide(first: Any, second: Any) -> Any:
    """The quotient, rounded towards zero."""
    for operand in (first, second):
        if isinstance(operand, Unknown):
            return operand
    quotient = abs(first) // abs(second) if second else 0
    return wrap(quotient if (first < 0) == (second < 0) else -quotient)


def shifted(number: Any, left: Any) -> Any:
    """The number shifted left, or right by a negative amount; no register is shifted by more than its bits."""
    for operand in (number, left):
        if isinstance(operand, Unknown):
            return operand
    return number << min(left, 32) if left >= 0 else number >> min(-left, 32)


def remainder(first: Any, second: Any) -> Any:
    """What `divide` leaves, with the sign of `first`."""
    quotient = divide(first, second)
    return quotient if isinstance(quotient, Unknown) else wrap(first - quotient * second)


HELPERS = {function.__name__: function for function in (Unknown, wrap, smaller, larger, divide, shifted, remainder)}
"""What the expressions call."""

_BINARY = {
    "sadd.s32": "{0} + {1}", "ssub.s32": "{0} - {1}",
    "smul.u32": "wrap({0} * {1})", "smul.s32": "wrap({0} * {1})",
    "smulhi.u32": f"wrap((({{0}} & {_MASK}) * ({{1}} & {_MASK})) >> 32)",
    "sand.u32": "{0} & {1}", "sor.u32": "{0} | {1}", "sxor.u32": "{0} ^ {1}",
    "sshll.u32": "wrap(shifted({0}, {1}))", "sshrl.u32": f"shifted({{0}} & {_MASK}, -({{1}}))",
    "sshra.s32": "shifted({0}, -({1}))",
    "smin.s32": "smaller({0}, {1})", "smax.s32": "larger({0}, {1})",
    "smin.u32": f"smaller({{0}} & {_MASK}, {{1}} & {_MASK})", "smax.u32": f"larger({{0}} & {_MASK}, {{1}} & {_MASK})",
    "sdiv.s32": "divide({0}, {1})", "srem.s32": "remainder({0}, {1})",
    "sdiv.u32": f"divide({{0}} & {_MASK}, {{1}} & {_MASK})", "srem.u32": f"remainder({{0}} & {_MASK}, {{1}} & {_MASK})",
    "por": "{0} | {1}", "pand": "{0} & {1}", "pxor": "{0} ^ {1}",
    "pnand": "({0} & {1}) ^ True", "pnor": "({0} | {1}) ^ True",
}  # fmt: skip
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def value(operand: str) -> str:
    """An operand as a Python expression: a variable, a signed 32-bit constant or an allocation's address."""
    if match := re.match(r"%?([sp]\d+)\b|%([sp]\d+)_", operand):
        return match[1] or match[2]
    if match := _ALLOCATION.search(operand):
        address = str(int(match[1]) * ADDRESS_SPACE)
        return f"({address} + {value(match['offset'].lstrip('$'))})" if match["offset"] else address
    try:
        return str(wrap(int(operand, 0)))
    except ValueError:
        return "UNKNOWN"


def smem_cell(address: str) -> str | None:
    """A spill slot's variable name; None for any other place in scalar memory."""
    match = re.search(r"#allocation(\d+)_spill", address)
    return f"cell{match[1]}" if match else None


def smem_address(text: str) -> str:
    """The address in ``[smem:[#allocation3 + %s4_s5]]`` as an expression."""
    inner = text.partition("smem:")[2].strip("[] ")
    return " + ".join(value(part.strip().lstrip("$")) for part in inner.split(" + "))


def expression(instruction: Instruction) -> str:
    """What the instruction's result is, in Python; an unknown value where that is not known here."""
    opcode, operands = instruction.opcode, [value(operand) for operand in instruction.operands]
    base, _, kind = opcode.partition(".")
    if opcode in _BINARY:
        return _BINARY[opcode].format(*operands)
    if base == "scmp":
        relation, signedness = kind.split(".")[:2]
        if signedness == "u32":
            operands = [f"({operand} & {_MASK})" for operand in operands]
        return f"{operands[0]} {_COMPARE[relation]} {operands[1]}"
    if base in ("smov", "pmov", "int_to_ptr") or opcode == "spop.drf":
        return operands[0]
    if base == "pneg":
        return f"{operands[0]} ^ True"
    if base == "scalar_select":
        which, taken, other = operands
        return f"{which} if {which}.__class__ is Unknown else {taken} if {which} else {other}"
    if base == "scalar_lea":  # an offset may have the name of what it lies in beside it
        return " + ".join(value(operand.partition(" ")[0]) for operand in instruction.operands)
    if base == "inlined_call_operand":  # only pointers into scalar memory are ever looked at
        if not operands or kind not in ("", "smem"):
            return "0"
        return f"smem.scalar({operands[0]})" if not kind else f"operand_address({operands[0]})"
    if opcode == CORE_ID:
        return "core"
    if base == "sld":
        return smem_cell(instruction.operands[0]) or f"smem.load({smem_address(instruction.operands[0])})"
    return f"unread({opcode!r})"
