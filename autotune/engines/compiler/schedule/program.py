"""One op's final bundles, compiled to a Python function that plays the scalar unit.

Loop counters, predicates, DMA starts and DMA waits are all scalar instructions, so one pass over them
gives the time at which each transfer is issued and awaited: the pipeline with its prologue, its
overlap and its last write, step by step, from the program that would run. Vector work takes its
bundles' cycles. A grid step costs a few microseconds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence

from autotune.engines.compiler.schedule.bundles import CALL, Bundle, Instruction
from autotune.engines.compiler.schedule.core import Core
from autotune.engines.compiler.schedule.memory import Memory
from autotune.engines.compiler.schedule.mxu import block_stall
from autotune.engines.compiler.schedule.scalar import (
    HELPERS,
    Unknown,
    UnresolvedError,
    expression,
    is_hbm,
    smem_cell,
    value,
)

# A grid of more steps takes seconds to play and belongs to blocks that nobody would choose.
MAX_STEPS = 2_000_000

_SEMAPHORE_SPACES = itertools.count()

Call = Callable[[str, float], float]
"""Plays the op of that name from that cycle on, and returns the cycle at which it is done."""


class Program:
    """A listing made ready to play.

    Args:
        bundles: The whole op.
        core: What the listing does not say of the core it runs on.
        strict: Whether a branch on a value that only a run would know raises; else it is not taken.

    Raises:
        UnresolvedError: Where an instruction or a branch cannot be understood.
    """

    def __init__(self, bundles: Sequence[Bundle], core: Core, *, strict: bool = True) -> None:
        coder = _Coder(_split(bundles, core), core)
        namespace: dict[str, object] = {
            **HELPERS,
            "UNKNOWN": Unknown("that only a run would load from memory", strict),
            "unread": lambda opcode: Unknown(f"computed by {opcode}, which is not known here", strict),
        }
        exec(compile(coder.source(), "<bundles>", "exec"), namespace)  # text written below, from numbers and names
        self._play: Callable[..., tuple[float, float, int]] = namespace["play"]  # type: ignore[assignment]
        # Listings number their semaphores each for itself.
        self._own_semaphores = next(_SEMAPHORE_SPACES) << 40

    def play(self, memory: Memory, core: int, start: float, call: Call) -> tuple[float, float, int]:
        """Plays one call from cycle `start` on.

        Returns:
            The cycle at which its last bundle issued, the cycles not spent waiting for DMAs, and the
            passes of its outermost loop.

        Raises:
            UnresolvedError: Where what happens next depends on what only a run would know.
        """
        end, waited, steps = self._play(memory, core, start, call, self._own_semaphores)
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
        taken: The block it leads to.
    """

    index: int
    bundles: Sequence[Bundle]
    folded: int
    branch: int | None
    taken: int | None


def _split(bundles: Sequence[Bundle], core: Core) -> list[_Block]:
    starts_of = {region: bundle.address for bundle in bundles for region in bundle.regions}
    targets: dict[int, int] = {}  # the last bundle of each branch's delay slots to where it leads
    branches: dict[int, tuple[int, int]] = {}  # the same to the branch's address and the slots that were folded
    for bundle in bundles:
        for instruction in bundle.instructions:
            if instruction.target is not None:
                if instruction.target not in starts_of:
                    raise UnresolvedError(f"the branch at {bundle.address:#x} goes to an unknown region")
                slots = _listed_slots(bundles, bundle.address, core)
                last = bundle.address + slots
                targets[last] = starts_of[instruction.target]
                branches[last] = bundle.address, core.delay_slots - slots
    leaders = {0, *targets.values(), *(last + 1 for last in targets)}
    ordered = sorted(leader for leader in leaders if leader < len(bundles))
    index_of = {leader: index for index, leader in enumerate(ordered)}
    blocks = []
    for index, (start, end) in enumerate(zip(ordered, [*ordered[1:], len(bundles)], strict=True)):
        branch, folded = branches.get(end - 1, (None, 0))
        taken = index_of[targets[end - 1]] if branch is not None else None
        blocks.append(_Block(index, bundles[start:end], folded, branch, taken))
    return blocks


def _listed_slots(bundles: Sequence[Bundle], branch: int, core: Core) -> int:
    """How many bundles after the branch at that address are its delay slots.

    Where slots may be folded, those with nothing in them up to the last one are listed as one empty bundle; a
    region then does not end where all of them would.
    """
    slots = bundles[branch + 1 : branch + 1 + core.delay_slots]
    if core.folds_slots and not (len(slots) == core.delay_slots and slots[-1].ends_region):
        for count, bundle in enumerate(slots, start=1):
            if bundle.empty:
                return count
    return core.delay_slots


class _Coder:
    """Writes the Python function for a list of blocks."""

    def __init__(self, blocks: Sequence[_Block], core: Core) -> None:
        self._blocks = blocks
        self._core = core
        self._phis: dict[str, list[str]] = defaultdict(list)  # SSA name to the phis it feeds
        self._names: set[str] = set()
        self._hbm: set[str] = set()  # SSA names of pointers into HBM
        for instruction in (ins for block in blocks for bundle in block.bundles for ins in bundle.instructions):
            if instruction.dest:
                self._names.add(instruction.dest)
                if is_hbm(instruction):
                    self._hbm.add(instruction.dest)
            if instruction.opcode in ("sphi", "pphi"):
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
            "def play(memory, core, t, call, own):",
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
        phis = [ins for _, ins in scalars if ins.opcode in ("sphi", "pphi")]
        lines += [f"{ins.dest} = phi_{ins.dest}" for ins in phis]
        for ins in phis:
            lines += self._feed(ins.dest)
        for offset, instruction in scalars:
            if instruction.opcode not in ("sphi", "pphi"):
                lines += self._instruction(block.bundles[0].address, offset, instruction)
        stall = block_stall(block.bundles, self._core.cycles_per_push)
        lines.append(f"t += {len(block.bundles) + block.folded + stall}")
        following = block.index + 1
        onwards = f"block = {following}" if following < len(self._blocks) else "return t, waited, steps"
        if block.branch is None:
            return [*lines, onwards]
        flag = _flag(block.branch)
        return [*lines, f"if {flag}:", f"  {flag} = False", f"  block = {block.taken}", f"else: {onwards}"]

    def _feed(self, name: str | None) -> list[str]:
        return [f"{phi} = {name}" for phi in self._phis.get(name or "", ())]

    def _instruction(self, start: int, offset: int, instruction: Instruction) -> list[str]:
        predicate = instruction.predicate
        condition = None
        if predicate is not None:
            condition = f"not {predicate.name}" if predicate.negated else predicate.name
        if instruction.target is not None:
            return [f"{_flag(start + offset)} = {f'True if {condition} else False' if condition else True}"]
        if effect := self._effect(offset, instruction):
            return [f"if {condition}: {effect}" if condition else effect]
        if instruction.dest is None:
            return []
        expr = expression(instruction)
        feeds = self._feed(instruction.dest)
        if predicate is not None and predicate.old is not None:
            return [f"{instruction.dest} = ({expr}) if {condition} else {value(predicate.old)}", *feeds]
        # Without a merge the value is only used where the predicate held, but a phi must not see it elsewhere.
        lines = [f"{instruction.dest} = {expr}", *feeds]
        return [f"if {condition}: {'; '.join(lines)}"] if condition and feeds else lines

    def _effect(self, offset: int, instruction: Instruction) -> str | None:
        """The statement for an instruction that does something besides computing, or None."""
        opcode = instruction.opcode
        if opcode == "sst":
            address, _, stored = instruction.operands[0].rpartition(" ")
            cell = smem_cell(address)
            return f"{cell} = {value(stored)}" if cell else None
        if opcode == CALL:
            return f"t = call({instruction.operands[0]!r}, t + {offset}) - {offset}"
        operands = [value(operand) for operand in instruction.operands]
        if opcode.startswith("dma.done.wait"):
            return f"now = t; t = wait({operands[0]} + own, t + {offset}, {operands[1]}) - {offset}; waited += t - now"
        if opcode.startswith("dma."):
            return self._transfer(offset, instruction, operands)
        if opcode == "vsyncadd":
            return f"add({operands[0]} + own, {operands[1]})"
        if opcode == "vsyncpa":
            return f"put({operands[0]} + own, {operands[1]})"
        return None

    def _transfer(self, offset: int, instruction: Instruction, operands: list[str]) -> str:
        if len(operands) < 4:
            raise UnresolvedError(f"cannot read the operands of {instruction.opcode}")
        source, _, destination = instruction.opcode.removeprefix("dma.").partition("_to_")
        steps = operands[6] if len(operands) > 6 else "0"
        if not destination:  # dma.general: the pointers say where they point, a descriptor in memory the strides
            source, destination = ("hbm" if instruction.operands[index] in self._hbm else "local" for index in (0, 2))
            steps = "0"
        how = "read" if source == "hbm" else "write" if destination == "hbm" else "copy"
        return f"{how}(t + {offset}, {operands[1]}, {operands[3]} + own, {steps})"


def _flag(address: int | None) -> str:
    """The variable that says whether the branch at that address is taken once its delay slots are over."""
    return f"taken{address}"
