"""The compiler's optimized, scheduled HLO as data: computations, their instructions in the order they run."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from autotune.engines.compiler.schedule.hlo import NO_ESTIMATE
from autotune.engines.compiler.schedule.scalar import UnresolvedError

_HEAD = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.\-]+) \(.*\{$")
_END = re.compile(r"^\}(?:, execution_thread=.*)?$")  # A kernel's own metadata may have lines that begin alike.
_NAME = re.compile(r"^\s*(?P<root>ROOT )?%(?P<name>[\w.\-]+) = ")
_OPCODE = re.compile(r" ([\w\-]+)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(calls|to_apply|condition|body|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,]*)\](?:\{(?P<layout>[^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_TILED = re.compile(r"^(?P<order>[\d,]*):T\((?P<tile>[\d,]+)\)")
_COMMENT = re.compile(r"/\*.*?\*/")
_BITS = {"pred": 8, "token": 0, "opaque": 0}
VMEM_SPACE, HOST_SPACE = 1, 5


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's type.

    Attributes:
        dtype: As HLO writes it (``bf16``).
        shape: Of this device's part.
        space: Memory: 0 is HBM, `VMEM_SPACE`, `HOST_SPACE`; others hold scalars and semaphores.
        stored: The shape in memory, where tiles are whole.
    """

    dtype: str
    shape: tuple[int, ...]
    space: int
    stored: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _bits(self.dtype) // 8

    @property
    def stored_bytes(self) -> int:
        """With what fills up its tiles."""
        return math.prod(self.stored) * _bits(self.dtype) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        operands: Names of instructions of the same computation.
        called: Attribute (``body``, ``calls``) to the computation it names.
        text: All that follows the operands.
        argument: The text between the parentheses: a constant's value, a parameter's number.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    called: Mapping[str, str]
    argument: str
    text: str

    @property
    def nbytes(self) -> int:
        """Of all its results."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def estimated_cycles(self) -> int | None:
        """XLA's own estimate of a fusion; None where it has none."""
        found = _CYCLES.search(self.text)
        return int(found[1]) if found and int(found[1]) < NO_ESTIMATE else None

    @property
    def target(self) -> str:
        """Of a custom call."""
        found = _TARGET.search(self.text)
        return found[1] if found else ""

    def attribute(self, name: str) -> str | None:
        """The text of ``name=…`` up to the next comma outside brackets."""
        start = self.text.find(f" {name}=")
        if start < 0:
            return None
        begin = start + len(name) + 2
        depth = 0
        for place in range(begin, len(self.text)):
            character = self.text[place]
            depth += (character in "{[(") - (character in "}])")
            if character == "," and depth == 0:
                return self.text[begin:place]
        return self.text[begin:]


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they are issued, the root among them."""

    name: str
    instructions: Sequence[Instruction]
    root: str

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    def __getitem__(self, name: str) -> Instruction:
        return self._by_name[name]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {one.name: one for one in self.instructions})

    _by_name: Mapping[str, Instruction] = dataclasses.field(init=False, repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class Module:
    """A whole program."""

    computations: Mapping[str, Computation]
    entry: Computation


def parse(text: str) -> Module:
    """Reads an optimized module's text.

    Raises:
        UnresolvedError: It is not scheduled, or is no module.
    """
    if "is_scheduled=true" not in text[: text.find("\n")]:
        raise UnresolvedError("the compiler's HLO is not scheduled")
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    head: re.Match[str] | None = None
    lines: list[Instruction] = []
    root = ""
    for line in text.splitlines():
        if head is None:
            if head := _HEAD.match(line):
                lines, root = [], ""
        elif _END.match(line):
            computation = Computation(head["name"], lines, root)
            computations[head["name"]] = computation
            entry = computation if head["entry"] else entry
            head = None
        elif match := _NAME.match(line):
            lines.append(_read(match["name"], line, match.end()))
            root = match["name"] if match["root"] else root
    if entry is None:
        raise UnresolvedError("the compiler's HLO has no entry computation")
    return Module(computations, entry)


def _read(name: str, line: str, start: int) -> Instruction:
    """The line from where the type begins: ``TYPE opcode(operands), attributes``."""
    type_end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    opcode = _OPCODE.match(line, type_end)
    if opcode is None:
        raise UnresolvedError(f"a line of the compiler's HLO is not understood: {line.strip()[:120]}")
    end = _closing(line, opcode.end() - 1)
    argument, text = _COMMENT.sub("", line[opcode.end() : end - 1]), line[end:]
    called = dict(_CALLED.findall(text))
    if branches := _BRANCHES.search(text):
        called |= {f"branch {place}": name for place, name in enumerate(_OPERAND.findall(branches[1]))}
    return Instruction(
        name=name,
        opcode=opcode[1],
        arrays=tuple(_arrays(line[start:type_end])),
        operands=tuple(_OPERAND.findall(argument)),
        called=called,
        argument=argument.strip(),
        text=text,
    )


def _closing(line: str, start: int) -> int:
    """The place after the bracket that closes the one at `start`."""
    depth = 0
    for place in range(start, len(line)):
        depth += (line[place] == "(") - (line[place] == ")")
        if depth == 0:
            return place + 1
    return len(line)


def _arrays(text: str) -> Iterator[Array]:
    for match in _ARRAY.finditer(_COMMENT.sub("", text)):
        shape = tuple(int(size) for size in match["dims"].split(",") if size)
        layout = match["layout"] or ""
        space = _SPACE.search(layout)
        yield Array(match["dtype"], shape, int(space[1]) if space else 0, _stored(shape, layout))


def _stored(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """The shape with its minor dimensions filled up to whole tiles: ``{1,0:T(8,128)}``, the minor one first."""
    if not (tiled := _TILED.match(layout)):
        return shape
    stored = list(shape)
    minor_first = [int(place) for place in tiled["order"].split(",") if place]
    for place, side in zip(minor_first, reversed(tiled["tile"].split(",")), strict=False):
        stored[place] = math.ceil(stored[place] / int(side)) * int(side)
    return tuple(stored)


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.search(r"\d+", dtype)  # bf16, s8, f8e4m3fn, c64
    return int(digits[0]) if digits else 8
