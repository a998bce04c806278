"""What the scheduled HLO says of a program's ops: which are the same, what Pallas calls take, XLA's estimates."""

from __future__ import annotations

import re

_OP = re.compile(
    r"^\s*(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[\w\-]+)\((?P<operands>[^)]*)\)(?P<rest>.*)$"
)
_COMPUTATION = re.compile(r"^%(?P<name>[\w.\-]+) \(.*\{$")
_CALLS = re.compile(r"(?:calls|to_apply)=%([\w.\-]+)")
_BODY = re.compile(r'"custom_call_config":\{"body":"([^"]*)"')
_PALLAS = 'custom_call_target="tpu_custom_call"'
_OPERAND = re.compile(r"%([\w.\-]+)")
_NAME = re.compile(r"%[\w.\-]+")
# What tells ops apart without changing what they do.
_IRRELEVANT = re.compile(r", (?:metadata|backend_config|frontend_attributes|sharding|calls|to_apply)=.*$")
NO_ESTIMATE = (1 << 63) - 1  # cycles that XLA gives an op of which it has no estimate


def signatures(hlo: str) -> dict[str, str]:
    """Op name to a text that equal ops share: types of result and operands, opcode, attributes, fused body."""
    ops: dict[str, re.Match[str]] = {}
    bodies: dict[str, list[str]] = {}
    body: list[str] | None = None
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            body = bodies.setdefault(match["name"], [])
        elif match := _OP.match(line):
            ops[match["name"]] = match
            if body is not None:
                body.append(_NAME.sub("%", _IRRELEVANT.sub("", line)))
        elif line.startswith("}"):
            body = None

    def signature(match: re.Match[str]) -> str:
        operands = [ops[name]["type"] for name in _operands(match) if name in ops]
        called = "\n".join(line for name in _CALLS.findall(match["rest"]) for line in bodies.get(name, ()))
        kernel = ""
        if _PALLAS in match["rest"]:  # equal only with the same body; where the text breaks off before it, with none
            body = _BODY.search(match["rest"])
            kernel = body[1] if body else match["name"]
        rest = _IRRELEVANT.sub("", match["rest"])
        return f"{match['type']} {match['opcode']}({operands}){rest}\n{called}{kernel}"

    return {name: signature(match) for name, match in ops.items()}


def pallas_calls(hlo: str) -> dict[str, list[str]]:
    """Name of each Pallas call to the types of its operands with their layouts."""
    ops = {match["name"]: match for line in hlo.splitlines() if (match := _OP.match(line))}
    return {
        name: [ops[operand]["type"] if operand in ops else "" for operand in _operands(match)]
        for name, match in ops.items()
        if _PALLAS in match["rest"]
    }


def _operands(op: re.Match[str]) -> list[str]:
    return _OPERAND.findall(op["operands"])


def estimated_cycles(hlo: str) -> int | None:
    """XLA's own estimate of an optimized program: its fusions' cycles, each counted once; None without any.

    Nor is there one where an op has none.
    """
    found = [int(cycles) for cycles in re.findall(r'"estimated_cycles":"?(\d+)', hlo)]
    return sum(found) if found and max(found) < NO_ESTIMATE else None
