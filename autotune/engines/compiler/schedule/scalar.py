"""The scalar unit's instructions as Python expressions, and values that only the run would know."""

from __future__ import annotations

import re
from typing import Any

from autotune.engines.compiler.schedule.bundles import CORE_ID, Instruction

_ALLOCATION = re.compile(r"#allocation(\d+)(?:_spill)?(?: \+ (?P<offset>[^\]]+))?\]*$")
_ADDRESS_SPACE = 1 << 20  # keeps allocations apart; no kernel has a semaphore or SMEM array as large


class UnresolvedError(Exception):
    """The control flow depends on a value that only a run would know, or on an instruction not known here."""


class Unknown:
    """A value read from memory at run time. Arithmetic keeps it unknown.

    Args:
        strict: Whether deciding on it raises; else it counts as false.
    """

    def __init__(self, strict: bool = True) -> None:
        self._strict = strict

    def _unknown(self, *_: Any) -> Unknown:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _unknown
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _unknown
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _unknown
    __lt__ = __le__ = __gt__ = __ge__ = _unknown
    __eq__ = __ne__ = _unknown  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        if self._strict:
            raise UnresolvedError("the schedule branches on a value that only a run would load from memory")
        return False


_BINARY = {
    "sadd.s32": "+", "ssub.s32": "-", "smul.u32": "*", "smul.s32": "*",
    "sand.u32": "&", "sor.u32": "|", "sxor.u32": "^", "sshll.u32": "<<", "sshrl.u32": ">>", "sshra.s32": ">>",
    "por": "|", "pand": "&", "pxor": "^",
}  # fmt: skip
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_CALLS = {"smax.s32": "max", "smin.s32": "min", "smax.u32": "max", "smin.u32": "min"}


def value(operand: str) -> str:
    """An operand as a Python expression: a variable, a signed 32-bit constant or an allocation's address."""
    if re.fullmatch(r"[sp]\d+", operand):
        return operand
    if match := _ALLOCATION.search(operand):
        address = str(int(match[1]) * _ADDRESS_SPACE)
        return f"({address} + {value(match['offset'].lstrip('$'))})" if match["offset"] else address
    try:
        number = int(operand, 0)
    except ValueError:
        if operand.startswith("%"):
            return operand.lstrip("%").split("_")[0]
        return "UNKNOWN"
    return str(number - (1 << 32) if number >= 1 << 31 else number)


def smem_cell(address: str) -> str | None:
    """A spill slot's variable name; None for SMEM whose content the schedule does not say."""
    match = re.search(r"#allocation(\d+)_spill", address)
    return f"cell{match[1]}" if match else None


def expression(instruction: Instruction) -> str | None:
    """What the instruction computes; None where it computes nothing the control flow could need.

    Raises:
        UnresolvedError: For an instruction with a result that is not known here.
    """
    opcode, operands = instruction.opcode, [value(operand) for operand in instruction.operands]
    base = opcode.split(".")[0]
    if opcode in _BINARY:
        return f"{operands[0]} {_BINARY[opcode]} {operands[1]}"
    if base == "scmp":
        return f"{operands[0]} {_COMPARE[opcode.split('.')[1]]} {operands[1]}"
    if base in ("smov", "pmov", "int_to_ptr"):
        return operands[0]
    if base == "pneg":
        return f"{operands[0]} ^ True"
    if base in ("pnand", "pnor"):
        return f"({operands[0]} {'&' if base == 'pnand' else '|'} {operands[1]}) ^ True"
    if base == "scalar_select":
        return f"{operands[1]} if {operands[0]} else {operands[2]}"
    if base == "scalar_lea":
        return " + ".join(operands)
    if opcode in _CALLS:
        return f"{_CALLS[opcode]}({', '.join(operands)})"
    if base == "inlined_call_operand":
        return "0"
    if base == "sld":
        return smem_cell(instruction.operands[0]) or "UNKNOWN"
    if opcode == CORE_ID:
        return "core"
    return None if instruction.dest is None else "UNKNOWN"


def is_hbm(instruction: Instruction) -> bool:
    """Whether the result is a pointer into HBM."""
    return instruction.opcode in ("int_to_ptr.hbm", "scalar_lea.hbm", "inlined_call_operand.hbm")
