"""Walks a scheduled program: ops take the core in turn, transfers and collectives run beside them until awaited.

What is between a start and its done hides the transfer; what is left of it when the done comes is waited for. Each of
three kinds of carrier (the links between chips, the DMA engines of HBM, each way to and from the host) does one thing
at a time.
A loop's pass is walked once, with carriers that are free at its start, and counts as often as the loop runs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping

from autotune.engines.compiler.schedule.core import HBM_EFFICIENCY
from autotune.engines.compiler.schedule.scalar import UnresolvedError
from autotune.engines.compiler.timeline.collectives import collective_in, microseconds
from autotune.engines.compiler.timeline.hlo import HOST_SPACE, Computation, Instruction, Module
from autotune.engines.compiler.timeline.interconnect import Interconnect
from autotune.engines.compiler.timeline.loops import Value, known_elements, trip_count
from autotune.engines.compiler.timeline.ops import OpTime

COMPUTE, MEMORY, COLLECTIVES, COPIES, HOST = "compute", "memory", "collectives", "copies", "host"
# What issues nothing on the core.
_FREE = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "optimization-barrier", "add-dependency", "domain"),
}
_FREE_TARGETS = {
    *("AllocateBuffer", "ConcatBitcast", "SliceBitcast", "AssumeGatherIndicesInBound", "Sharding"),
    *("SPMDFullToShardShape", "SPMDShardToFullShape", "AssignRaggedMetadata", "GatherScatterIndicesBitpacked"),
}
_TRANSFERS = ("copy", "slice", "dynamic-slice", "dynamic-update-slice")
_START, _DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One call of a program, on each of its devices.

    Attributes:
        parts_us: Its time by what it went to: ``compute`` and ``memory`` are the ops that the one or the other holds
            up, the others are waits for what could not be hidden.
        estimated_us: Of that, time of ops whose schedule was not played, by how they were estimated.
        collectives_us: What the collectives take, hidden or not.
    """

    parts_us: Mapping[str, float]
    estimated_us: Mapping[str, float]
    collectives_us: float

    @property
    def total_us(self) -> float:
        return sum(self.parts_us.values())


def walk(module: Module, op_time: Callable[[Instruction], OpTime], links: Interconnect) -> Timeline:
    """The time of one call.

    Args:
        module: The program.
        op_time: What an op takes on the core.
        links: Between the devices, in the order of their partition numbers.

    Raises:
        UnresolvedError: Something in it is not understood.
    """
    tally = _Walker(module, op_time, links).computation(module.entry, lambda index: None)
    return Timeline(dict(tally.parts), dict(tally.estimated), tally.collectives)


class _Tally:
    """What a computation's time goes to; times add up, and multiply with a loop's passes."""

    def __init__(self) -> None:
        self.parts: Counter[str] = Counter()
        self.estimated: Counter[str] = Counter()
        self.collectives = 0.0

    @property
    def now(self) -> float:
        return sum(self.parts.values())

    def add(self, other: _Tally, times: int = 1) -> None:
        for name, took in other.parts.items():
            self.parts[name] += times * took
        for name, took in other.estimated.items():
            self.estimated[name] += times * took
        self.collectives += times * other.collectives


class _Carriers:
    """When each is free, and when what each was given is done."""

    def __init__(self) -> None:
        self._free: Counter[str] = Counter()
        self._done: dict[str, tuple[str, float]] = {}

    def start(self, name: str, part: str, now: float, took: float, *, way: str = "") -> None:
        """Gives a carrier something; `part` is what a wait for it is put down to, `way` its direction if it has two."""
        carrier = part + way
        self._free[carrier] = max(now, self._free[carrier]) + took
        self._done[name] = part, self._free[carrier]

    def wait(self, name: str, tally: _Tally) -> bool:
        """Adds what is left to wait; False where nothing of that name was started."""
        if name not in self._done:
            return False
        part, done = self._done.pop(name)
        tally.parts[part] += max(0.0, done - tally.now)
        return True


class _Walker:
    def __init__(self, module: Module, op_time: Callable[[Instruction], OpTime], links: Interconnect) -> None:
        self._module, self._op_time, self._links = module, op_time, links
        chip = links.chip
        self._hbm_bytes_per_us = chip.hbm_gbps * 1e3 * HBM_EFFICIENCY
        self._host_bytes_per_us = links.host_bytes_per_us

    def computation(self, computation: Computation, passed: Callable[[int], Value]) -> _Tally:
        tally, carriers = _Tally(), _Carriers()
        for one in computation:
            if one.opcode in _FREE or one.target in _FREE_TARGETS or self._scalar_work(computation, one):
                continue
            if one.opcode == "while":
                body = self._module.computations[one.called["body"]]
                passes = trip_count(self._module, computation, one, passed)
                inside = known_elements(self._module, computation, one, passed)
                tally.add(self.computation(body, inside), passes)
            elif one.opcode in ("conditional", "call"):
                branches = [self._module.computations[name] for name in one.called.values()]
                tallies = [self.computation(branch, lambda index: None) for branch in branches]
                tally.add(max(tallies, key=lambda one: one.now))
            elif one.opcode.endswith("-done") or one.opcode == "async-update":
                self._await(computation, one, carriers, tally)
            elif (found := collective_in(self._module, computation, one)) is not None:
                self._collective(one, *found, carriers, tally)
            elif one.opcode.endswith("-start"):
                self._copy(one, carriers, tally)
            else:
                self._op(one, tally)
        return tally

    def _scalar_work(self, computation: Computation, one: Instruction) -> bool:
        """Whether the scalar unit does it, at next to no cost: numbers made of numbers."""
        arrays = [array for name in one.operands for array in computation[name].arrays]
        alone = all(not array.shape for array in (*one.arrays, *arrays))
        return alone and one.opcode != "while" and collective_in(self._module, computation, one) is None

    def _op(self, one: Instruction, tally: _Tally) -> None:
        took = self._op_time(one)
        tally.parts[MEMORY if took.memory_us > took.compute_us else COMPUTE] += took.time_us
        if took.estimate:
            tally.estimated[took.estimate] += took.time_us

    def _collective(
        self, one: Instruction, inside: Computation, collective: Instruction, carriers: _Carriers, tally: _Tally
    ) -> None:
        """A start begins it; a done waits for it; an op that merely moves one on, as it goes along, is an op."""
        fused = collective is not one
        marks = {inner.target for inner in inside} if fused else set()
        name = f"channel {collective.attribute('channel_id')}"
        sliced = any(inner.opcode == "dynamic-slice" and collective.name in inner.operands for inner in inside)
        scattered = fused and collective.opcode == "all-reduce" and sliced
        if _DONE in marks:
            if not carriers.wait(name, tally):
                raise UnresolvedError(f"{one.name} awaits a collective that was never started")
            return
        if _START not in marks and "chain_id" in collective.text and fused:
            self._op(one, tally)
            return
        took = microseconds(self._links, inside, collective, scattered=scattered)
        tally.collectives += took
        started = name if _START in marks else one.name
        carriers.start(started, COLLECTIVES, tally.now, took)
        if _START not in marks and not one.opcode.endswith("-start"):
            carriers.wait(started, tally)

    def _await(self, computation: Computation, one: Instruction, carriers: _Carriers, tally: _Tally) -> None:
        start = computation[one.operands[0]]
        while start.opcode in ("get-tuple-element", "async-update", "bitcast"):
            start = computation[start.operands[0]]
        if one.opcode != "async-update" and not carriers.wait(start.name, tally):
            raise UnresolvedError(f"{one.name} awaits what was never started")

    def _copy(self, one: Instruction, carriers: _Carriers, tally: _Tally) -> None:
        """A transfer of the smallest array that it names: a slice's, where it moves a slice."""
        kind = one.opcode.removesuffix("-start")
        if kind == "async":
            called = self._module.computations[one.called["calls"]]
            kind = called[called.root].opcode
        arrays = [array for array in one.arrays if array.shape]
        if kind not in _TRANSFERS or not arrays:
            raise UnresolvedError(f"what {one.name} ({one.opcode}) does is not understood")
        nbytes = min(array.nbytes for array in arrays)
        if any(array.space == HOST_SPACE for array in arrays):
            # A copy's type is (result, operand, …), the others' ((operands), result, …).
            result = arrays[0] if one.opcode == "copy-start" else arrays[-1]
            way = "out" if result.space == HOST_SPACE else "in"
            carriers.start(one.name, HOST, tally.now, nbytes / self._host_bytes_per_us, way=way)
            return
        sides = max(1, sum(array.space == 0 for array in arrays[:2]))
        carriers.start(one.name, COPIES, tally.now, sides * nbytes / self._hbm_bytes_per_us)
