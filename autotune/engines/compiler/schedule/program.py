"""One op's final bundles, compiled to a Python function that plays the scalar unit.

Loop counters, predicates, DMA starts and DMA waits are all scalar instructions, so one pass over them
gives the time at which each transfer is issued and awaited: the pipeline with its prologue, its
overlap and its last write, step by step, from the program that would run. Vector work takes its
bundles' cycles. A grid step costs a few microseconds.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from autotune.engines.compiler.schedule.bundles import (
    CALL,
    CORE_ID,
    OPERAND,
    SPARSE_CORE_WAIT,
    Bundle,
    Instruction,
)
from autotune.engines.compiler.schedule.core import Core
from autotune.engines.compiler.schedule.memory import Memory
from autotune.engines.compiler.schedule.mxu import block_stall
from autotune.engines.compiler.schedule.scalar import (
    HELPERS,
    Unknown,
    UnresolvedError,
    expression,
    smem_address,
    smem_cell,
    value,
)
from autotune.engines.compiler.schedule.smem import Operands, ScalarMemory, operand_address

# A grid of more steps takes seconds to play and belongs to blocks that nobody would choose.
MAX_STEPS = 2_000_000

NOTHING_KNOWN = Operands()

_PHIS = ("sphi", "pphi")
_SSA = re.compile(r"\b[sp]\d+\b")
_SEMAPHORE_SPACES = itertools.count()

Call = Callable[[str, float, tuple], float]
"""Plays the op of that name from that cycle on, with what it is passed, and returns the cycle at which it is done."""


class Program:
    """A listing made ready to play.

    Args:
        bundles: The whole op.
        core: What the listing does not say of the core it runs on.
        strict: Whether what only a run would know raises where it matters. Else it counts as false, and a signal
            that nothing here sends is taken to come from another core.

    Raises:
        UnresolvedError: Where an instruction or a branch cannot be understood.
    """

    def __init__(self, bundles: Sequence[Bundle], core: Core, *, strict: bool = True) -> None:
        coder = _Coder(_split(bundles, core), core, strict)
        self._unknown = Unknown("that only a run would load from memory", strict)
        namespace: dict[str, object] = {
            **HELPERS,
            "operand_address": operand_address,
            # At the top level a selection by an unknown value takes what stands for false, as a branch does.
            "Unknown": Unknown if strict else type(None),
            "UNKNOWN": self._unknown,
            "unread": lambda opcode: Unknown(f"computed by {opcode}, which is not known here", strict),
        }
        exec(compile(coder.source(), "<bundles>", "exec"), namespace)  # text written below, from numbers and names
        self._play: Callable[..., tuple[float, float, int]] = namespace["play"]  # type: ignore[assignment]
        # Listings number their semaphores each for itself.
        self._own_semaphores = next(_SEMAPHORE_SPACES) << 40

    def play(
        self, memory: Memory, core: int, start: float, call: Call, operands: Operands = NOTHING_KNOWN
    ) -> tuple[float, float, int]:
        """Plays one call from cycle `start` on.

        Returns:
            The cycle at which its last bundle issued, the cycles not spent waiting for DMAs, and the
            passes of its outermost loop.

        Raises:
            UnresolvedError: Where what happens next depends on what only a run would know.
        """
        smem = ScalarMemory(operands, self._unknown)
        end, waited, steps = self._play(memory, smem, core, start, call, self._own_semaphores)
        if steps > MAX_STEPS:
            raise UnresolvedError(f"the grid has more than {MAX_STEPS:,} steps")
        return end, end - start - waited, steps


@dataclasses.dataclass(frozen=True)
class _Block:
    """Bundles with one entry and one exit.

    Attributes:
        folded: Delay slots at its end that take a cycle each and are not listed.
        branch: Address of the branch that takes effect at the end, its delay slots over; it may lie in an
            earlier block, as another branch can stand in its delay slots.
        taken: The block it leads to; the number after the last one's is the end.
    """

    index: int
    bundles: Sequence[Bundle]
    folded: int
    branch: int | None
    taken: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Use:
    """Where a value is used: the address, and whether a phi chooses it there."""

    address: int
    phi: bool


def _uses(bundles: Sequence[Bundle]) -> Mapping[str | None, list[_Use]]:
    """SSA name to its uses by the scalar unit."""
    uses: dict[str | None, list[_Use]] = defaultdict(list)
    for bundle in bundles:
        for instruction in bundle.instructions:
            names = [name for operand in instruction.operands for name in _SSA.findall(operand)]
            if predicate := instruction.predicate:
                names += [predicate.name, *_SSA.findall(predicate.old or "")]
            for name in names:
                uses[name].append(_Use(bundle.address, instruction.opcode in _PHIS))
    return uses


def _split(bundles: Sequence[Bundle], core: Core) -> list[_Block]:
    starts_of = {region: bundle.address for bundle in bundles for region in bundle.regions}
    uses = _uses(bundles)
    targets: dict[int, int] = {}  # the last bundle of each branch's delay slots to where it leads
    branches: dict[int, tuple[int, int]] = {}  # the same to the branch's address and the slots that were folded
    for bundle in bundles:
        for instruction in bundle.instructions:
            if instruction.target is not None:
                # Regions are named on a bundle; one that no bundle names is empty and lies behind the last.
                target = starts_of.get(instruction.target, len(bundles))
                slots = _listed_slots(bundles, bundle.address, target, starts_of, uses, core)
                last = bundle.address + slots
                targets[last] = target
                branches[last] = bundle.address, core.delay_slots - slots
    leaders = {0, *targets.values(), *(last + 1 for last in targets)}
    ordered = sorted(leader for leader in leaders if leader < len(bundles))
    index_of = {leader: index for index, leader in enumerate([*ordered, len(bundles)])}
    blocks = []
    for index, (start, end) in enumerate(zip(ordered, [*ordered[1:], len(bundles)], strict=True)):
        branch, folded = branches.get(end - 1, (None, 0))
        taken = index_of[targets[end - 1]] if branch is not None else None
        blocks.append(_Block(index, bundles[start:end], folded, branch, taken))
    return blocks


def _listed_slots(
    bundles: Sequence[Bundle],
    branch: int,
    target: int,
    starts_of: Mapping[int, int],
    uses: Mapping[str | None, Sequence[_Use]],
    core: Core,
) -> int:
    """How many bundles after the branch at that address are its delay slots.

    Where slots may be folded, those with nothing in them up to the last one are listed as one empty bundle. They
    are not where the branch's own region ends with a later slot: of one that repeats a loop with any of them, of
    another with the last. A region that began before the loop which the branch repeats, or after the branch, is
    another's. Nor does an empty bundle end the slots if what a later one computes is used where the branch leads:
    only a slot's is computed on that way.
    """
    if not core.folds_slots:
        return core.delay_slots
    slots = bundles[branch + 1 : branch + 1 + core.delay_slots]
    repeats = target <= branch
    own = range(target if repeats else 0, branch + 1)
    onwards = range(target, branch + 1 if repeats else len(bundles))

    def needed(slot: Bundle) -> bool:
        # What a phi chooses from may be computed on the other way to it, except where a loop repeats with it.
        used = [use for ins in slot.instructions for use in uses[ins.dest] if repeats or not use.phi]
        return slot.address not in onwards and any(use.address in onwards for use in used)

    for count, bundle in enumerate(slots, start=1):
        later = slots[count:] if repeats else slots[core.delay_slots - 1 :]
        ends_own = any(starts_of.get(region, 0) in own for slot in later for region in slot.ended)
        if bundle.empty and not ends_own and not any(map(needed, slots[count:])):
            return count
    return core.delay_slots


class _Coder:
    """Writes the Python function for a list of blocks."""

    def __init__(self, blocks: Sequence[_Block], core: Core, strict: bool) -> None:
        self._blocks = blocks
        self._core = core
        self._strict = strict
        self._phis: dict[str, list[str]] = defaultdict(list)  # SSA name to the phis it feeds
        self._names: set[str] = set()
        self._definitions: dict[str, Instruction] = {}
        for instruction in (ins for block in blocks for bundle in block.bundles for ins in bundle.instructions):
            if instruction.dest:
                self._names.add(instruction.dest)
                self._definitions[instruction.dest] = instruction
            self._names.update(name for operand in instruction.operands for name in _SSA.findall(operand))
            if instruction.opcode in _PHIS:
                for operand in instruction.operands:
                    self._phis[operand].append(f"phi_{instruction.dest}")
                self._names.add(f"phi_{instruction.dest}")
            if instruction.opcode in ("sst", "sld") and (cell := smem_cell(instruction.operands[0])):
                self._names.add(cell)
        backward = [block for block in blocks if block.taken is not None and block.taken <= block.index]
        # The grid's loop is the one that spans the most blocks.
        self._grid_head = max(backward, key=lambda block: block.index - block.taken).taken if backward else None  # type: ignore[operator]

    def source(self) -> str:
        lines = [
            "def play(memory, smem, core, t, call, own):",
            "  read, write, copy, wait = memory.read, memory.write, memory.copy, memory.wait",
            "  add, put = memory.add, memory.set",
            "  waited, steps, block = 0.0, 0, 0",
            *(f"  {name} = UNKNOWN" for name in sorted(self._names)),
            *(f"  {_flag(block.branch)} = False" for block in self._blocks if block.branch is not None),
            "  while True:",
        ]
        for block in self._blocks:
            lines.append(f"    {'el' if block.index else ''}if block == {block.index}:")
            lines += [f"      {line}" for line in self._block(block)]
        return "\n".join([*lines, ""])

    def _block(self, block: _Block) -> list[str]:
        lines = []
        if block.index == self._grid_head:
            lines += ["steps += 1", f"if steps > {MAX_STEPS}: return t, waited, steps"]
        scalars = [(offset, ins) for offset, bundle in enumerate(block.bundles) for ins in bundle.instructions]
        phis = [ins for _, ins in scalars if ins.opcode in _PHIS]
        lines += [f"{ins.dest} = phi_{ins.dest}" for ins in phis]
        for ins in phis:
            lines += self._feed(ins.dest)
        for offset, instruction in scalars:
            if instruction.opcode not in _PHIS:
                lines += self._instruction(block.bundles[0].address, offset, instruction)
        stall = block_stall(block.bundles, self._core.cycles_per_push, self._core.cycles_per_float32_push)
        lines.append(f"t += {len(block.bundles) + block.folded + stall}")
        onwards = self._goto(block.index + 1)
        if block.branch is None:
            return [*lines, onwards]
        flag = _flag(block.branch)
        return [*lines, f"if {flag}:", f"  {flag} = False", f"  {self._goto(block.taken)}", f"else: {onwards}"]

    def _goto(self, block: int | None) -> str:
        return "return t, waited, steps" if block == len(self._blocks) else f"block = {block}"

    def _feed(self, name: str | None) -> list[str]:
        return [f"{phi} = {name}" for phi in self._phis.get(name or "", ())]

    def _instruction(self, start: int, offset: int, instruction: Instruction) -> list[str]:
        predicate = instruction.predicate
        condition = None
        if predicate is not None:
            condition = f"not {predicate.name}" if predicate.negated else predicate.name
        if instruction.target is not None:
            return [f"{_flag(start + offset)} = {f'True if {condition} else False' if condition else True}"]
        if instruction.opcode == "sst":
            return self._store(instruction, condition)
        if sent := self._sent_to_all(instruction):
            local, condition = sent
            # The first core sends it, and all receive it: for each it is a read of its own.
            granules, *_, steps = self._transfer_operands(instruction)
            effect = f"read(t + {offset}, {granules}, {value(local)} + own, {steps}, receivers=memory.cores)"
            return [f"if {condition}: {effect}" if condition else effect]
        if effect := self._effect(offset, instruction):
            return [f"if {condition}: {effect}" if condition else effect]
        if instruction.dest is None:
            return []
        expr = expression(instruction)
        feeds = self._feed(instruction.dest)
        if predicate is not None and predicate.old is not None:
            # On an unknown predicate the result is unknown: only what is decided by it may raise.
            unknown = f"{predicate.name} if {predicate.name}.__class__ is Unknown else "
            return [f"{instruction.dest} = {unknown}({expr}) if {condition} else {value(predicate.old)}", *feeds]
        # Without a merge the value is only used where the predicate held, but a phi must not see it elsewhere.
        lines = [f"{instruction.dest} = {expr}", *feeds]
        return [f"if {condition}: {'; '.join(lines)}"] if condition and feeds else lines

    def _store(self, instruction: Instruction, condition: str | None) -> list[str]:
        address, _, stored = " ".join(instruction.operands).rpartition(" ")
        if cell := smem_cell(address):
            return [f"if {condition}: {cell} = {value(stored)}" if condition else f"{cell} = {value(stored)}"]
        predicate = instruction.predicate
        when = f"{predicate.name}, {predicate.negated}" if predicate else "True"
        return [f"smem.store({smem_address(address)}, {value(stored)}, {when})"]

    def _effect(self, offset: int, instruction: Instruction) -> str | None:
        """The statement for an instruction that does something besides computing, or None."""
        opcode = instruction.opcode
        if opcode == CALL:
            passed = "".join(f"{value(operand)}, " for operand in instruction.operands[1:])
            return f"t = call({instruction.operands[0]!r}, t + {offset}, ({passed})) - {offset}"
        if opcode == SPARSE_CORE_WAIT:
            return "memory.await_foreign()"
        operands = [value(operand) for operand in instruction.operands]
        if opcode.startswith("dma.done.wait"):
            arguments = f"{operands[0]} + own, t + {offset}, {operands[1]}, {not self._strict}"
            return f"now = t; t = wait({arguments}) - {offset}; waited += t - now"
        if opcode.startswith("dma."):
            return self._transfer(offset, instruction)
        if opcode == "vsyncadd":
            return f"add({operands[0]} + own, {operands[1]})"
        if opcode == "vsyncpa":
            return f"put({operands[0]} + own, {operands[1]})"
        return None

    def _transfer(self, offset: int, instruction: Instruction) -> str:
        granules, to, semaphore, steps = self._transfer_operands(instruction)
        source, _, destination = instruction.opcode.removeprefix("dma.").partition("_to_")
        if not destination:  # dma.general: the pointers say where they point, a descriptor in memory the strides
            source, destination = (self._space(instruction.operands[index]) for index in (0, 2))
        how = "read" if source == "hbm" else "write" if destination == "hbm" else "copy"
        effect = f"{how}(t + {offset}, {granules}, {semaphore} + own, {steps})"
        if destination == "smem":
            length = f"{granules} * {self._core.granule_bytes // 4}"
            operand = self._operand_at(instruction.operands[0]) if steps == "0" else None
            effect += f"; smem.fill({to}, {length}, {operand})"
        elif destination == "anywhere":
            effect += "; smem.fill(UNKNOWN, UNKNOWN, None)"
        return effect

    def _space(self, pointer: str) -> str:
        """The memory that the pointer points into; ``anywhere`` if its definition does not say."""
        while definition := self._definitions.get(pointer):
            base, _, space = definition.opcode.partition(".")
            if base in ("int_to_ptr", "scalar_lea", OPERAND) and space:
                return space
            if base != "smov" or definition.predicate is not None:
                break
            pointer = definition.operands[0]
        return "anywhere"

    def _transfer_operands(self, instruction: Instruction) -> tuple[str, str, str, str]:
        """Size, destination, semaphore and steps a row, as expressions."""
        if len(instruction.operands) < 4:
            raise UnresolvedError(f"cannot read the operands of {instruction.opcode}")
        operands = [value(operand) for operand in instruction.operands]
        strided = len(operands) > 6 and instruction.opcode != "dma.general"
        return operands[1], operands[2], operands[3], operands[6] if strided else "0"

    def _sent_to_all(self, instruction: Instruction) -> tuple[str, str | None] | None:
        """Semaphore of a transfer that all cores of the device receive at once, and on what; None for any other.

        Its flag is the core's own, or'ed with the same one shifted up: the place of the other cores'. The first
        core sends it.

        Raises:
            UnresolvedError: Another than the first core sends it, or it goes elsewhere than to VMEM.
        """
        if not instruction.opcode.startswith("dma.hbm_to") or len(instruction.operands) < 4:
            return None
        flag = self._definitions.get(instruction.operands[3])
        if flag is None or flag.opcode != "sor.u32":
            return None
        for shifted, own in (flag.operands, flag.operands[::-1]):
            shift = self._definitions.get(shifted)
            if shift is not None and shift.opcode == "sshll.u32" and shift.operands[1] == "16":
                local = own
                break
        else:
            return None
        if instruction.opcode == "dma.hbm_to_vmem" and (predicate := instruction.predicate):
            compared = self._definitions.get(predicate.name)
            if not predicate.negated and self._is_first_core(compared):
                return local, None
            # not (condition nand first): where the condition holds, on the first core
            if predicate.negated and compared is not None and compared.opcode == "pnand":
                for condition, first in (compared.operands, compared.operands[::-1]):
                    if self._is_first_core(self._definitions.get(first)):
                        return local, condition
        raise UnresolvedError("a transfer goes to several cores in a way that is not known here")

    def _is_first_core(self, compared: Instruction | None) -> bool:
        if compared is None or not compared.opcode.startswith("scmp.eq") or compared.operands[1] != "0":
            return False
        core = self._definitions.get(compared.operands[0])
        return core is not None and core.opcode == CORE_ID

    def _operand_at(self, pointer: str) -> int | None:
        """The number of the operand that the pointer is the start of; None where it points elsewhere."""
        while definition := self._definitions.get(pointer):
            if definition.opcode.startswith(OPERAND):
                return int(definition.operands[0]) if definition.operands else None
            if definition.opcode.partition(".")[0] not in ("sshll", "int_to_ptr", "smov") or definition.predicate:
                return None
            pointer = definition.operands[0]
        return None


def _flag(address: int | None) -> str:
    """The variable that says whether the branch at that address is taken once its delay slots are over."""
    return f"taken{address}"
