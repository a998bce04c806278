"""Reads the compiler's final VLIW bundles: the program as the chip would run it, one bundle a cycle.

The text comes from libtpu's ``final_bundles`` pass. Values are in SSA form with the physical register
as a suffix (``%s142_s4``), branches name the region they jump to, and control flow lives entirely in the
scalar unit, so the scalar instructions are kept whole and the vector ones only counted.
"""

from __future__ import annotations

import dataclasses
import re

# One bundle: its address, an optional label, then everything up to the next address.
_BUNDLE = re.compile(r"^[ \t]*(0x[0-9a-f]+|0)[ \t]+(?:(?:LB|PB|PF|LE|LH|CT)\b)?[ \t]*:", re.MULTILINE)
_REGION_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_REGION_END = re.compile(r"End region (\d+)")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_INSTRUCTION = re.compile(r"(?:%(?P<dest>[\w.]+) = )?(?P<opcode>[a-z_][\w.]*)(?P<rest>.*)", re.DOTALL)
_PREDICATE = re.compile(r"\((?P<neg>!?)%(?P<name>\w+)(?:, (?P<old>%?[\w]+))?\)")
_TARGET = re.compile(r"target = \$region(\d+)")
_SAYS_CORE_ID = re.compile(r"/\*[^*]*\bcore id\b")
_NUMBERED = re.compile(r"index: (\d+), kind: input")
_CALLED = re.compile(r"/\* %?(?P<name>\S+)")
_MXU = re.compile(r"(?:%\S+ = )?(v(?:matmul|matpush|matprep|pop|dwg)\S*)\.mxu(\d)")

OPERAND = "inlined_call_operand"  # of this op, in the memory space that follows, or in a register
CALL = "call"  # of another op's listing; long ones are called, short ones inlined
_QUEUED = "9999"  # sets results waiting in a queue, which the listing only numbers, apart from SSA values
SPARSE_CORE_WAIT = "sparse_core_wait"  # for work that the SparseCore does from a listing of its own
CORE_ID = "core_id"  # a load that the listing's comment says reads which of the device's cores this is


@dataclasses.dataclass(frozen=True, slots=True)
class Predicate:
    """``(!%p)`` before the operands: whether the instruction takes effect.

    `old` is the value a merging instruction keeps where it does not.
    """

    name: str
    negated: bool
    old: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """A scalar, DMA, semaphore or branch instruction.

    Attributes:
        dest: SSA name of the result without its register suffix; None where there is none.
        opcode: As printed, for instance ``sadd.s32`` or ``dma.hbm_to_vmem``.
        operands: As printed, comments removed; SSA names without suffix (``s142``). For `CALL`, the name
            of the op that is called, then what it is passed; for `OPERAND`, its number if it is an input.
        target: The region a branch jumps to.
    """

    dest: str | None
    opcode: str
    operands: tuple[str, ...] = ()
    predicate: Predicate | None = None
    target: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Bundle:
    """What issues in one cycle.

    Attributes:
        address: Its position in the program.
        instructions: All but the vector ones.
        mxu: Opcode and MXU number of each matrix-unit instruction, in order.
        regions: The regions that start here (branch targets).
        ended: The regions that end here.
        empty: Whether nothing issues at all.
    """

    address: int
    instructions: tuple[Instruction, ...]
    mxu: tuple[tuple[str, int], ...]
    regions: tuple[int, ...]
    ended: tuple[int, ...]
    empty: bool


def parse_bundles(text: str) -> list[Bundle]:
    """Every bundle in address order.

    Raises:
        ValueError: Where the text is not a bundle listing.
    """
    starts = list(_BUNDLE.finditer(text))
    if not starts:
        raise ValueError("no bundles found: not a final_bundles dump")
    bundles = []
    for match, following in zip(starts, [*starts[1:], None], strict=True):
        body = text[match.end() : following.start() if following else len(text)]
        bundles.append(_parse_bundle(int(match[1], 16), body))
    if [bundle.address for bundle in bundles] != list(range(len(bundles))):
        raise ValueError("the bundles' addresses are not consecutive")
    return bundles


def _parse_bundle(address: int, body: str) -> Bundle:
    opening, closing = body.find("{"), body.rfind("}")
    content, comment = body[opening + 1 : closing], body[closing:]
    regions = tuple(int(number) for number in _REGION_START.findall(comment))
    instructions, mxu = [], []
    for part in content.split(" ;; "):
        part = part.strip()
        if not part:
            continue
        match = _INSTRUCTION.match(part)
        if match is None:
            raise ValueError(f"cannot read the instruction {part[:80]!r} at {address:#x}")
        opcode = match["opcode"]
        if opcode.startswith("v") and not opcode.startswith("vsync"):
            if unit := _MXU.match(part):
                mxu.append((unit[1], int(unit[2])))
            if (match["dest"] or "v")[0] in "sp":  # a value from the vector unit, or of a semaphore
                instructions.append(Instruction(_ssa(match["dest"]), opcode))
            continue
        instructions.append(_parse_instruction(match["dest"], opcode, match["rest"]))
    ended = tuple(int(number) for number in _REGION_END.findall(comment))
    return Bundle(address, tuple(instructions), tuple(mxu), regions, ended, not content.strip())


def _parse_instruction(dest: str | None, opcode: str, rest: str) -> Instruction:
    if opcode in ("inlined_call", "call"):
        called = _CALLED.search(rest)
        passed = (_operand(part) for part in _COMMENT.sub("", rest).split(",") if part.strip())
        return Instruction(None, CALL, (called["name"] if called else "", *passed))
    if opcode.startswith(OPERAND):
        number = _NUMBERED.search(rest)
        return Instruction(_ssa(dest) if dest else None, opcode, (number[1],) if number else ())
    if opcode.startswith("sdivrem."):  # its quotient or remainder is popped by name later; the comment says which
        opcode = f"{'srem' if 'kRem' in rest else 'sdiv'}.{opcode.partition('.')[2]}"
        dest = f"s{_QUEUED}{dest}"
    if opcode == "sld" and _SAYS_CORE_ID.search(rest) and "_spill" not in rest:
        opcode = CORE_ID
    if opcode.startswith("dma.done.wait") and "sparse-core-wait" in rest:
        return Instruction(None, SPARSE_CORE_WAIT)
    rest = _COMMENT.sub("", rest)
    predicate = None
    if match := _PREDICATE.search(rest):
        old = _ssa(match["old"]) if match["old"] else None
        predicate = Predicate(_ssa(match["name"]), bool(match["neg"]), old)
        rest = rest[: match.start()] + rest[match.end() :]
    target = _TARGET.search(rest)
    # Attributes such as [resolvable:$true] and [thread:$0] are no operands.
    rest = re.sub(r"\[[a-z]+:\$\w+\]", "", rest)
    operands = tuple(_operand(part) for part in re.split(r",\s*", rest.strip(" ,")) if part.strip())
    return Instruction(
        dest=_ssa(dest) if dest and dest[0] in "sp" else None,
        opcode=opcode,
        operands=() if target else operands,
        predicate=predicate,
        target=int(target[1]) if target else None,
    )


def _operand(text: str) -> str:
    text = text.strip()
    if re.fullmatch(r"%[sp]\w+", text):
        return _ssa(text)
    return f"s{_QUEUED}{text[1:]}" if re.fullmatch(r"%\d+", text) else text


def _ssa(name: str) -> str:
    """``%s142_s4`` to ``s142``: the register suffix carries nothing that the SSA name does not."""
    return name.lstrip("%").split("_")[0]
