"""What one op takes on the core: its schedule played, or else XLA's own estimate, or else its bytes."""

from __future__ import annotations

import contextlib
import dataclasses

from autotune.chips import Chip
from autotune.engines.compiler.schedule.bundles import parse_bundles
from autotune.engines.compiler.schedule.core import CORES, HBM_EFFICIENCY, new_memory
from autotune.engines.compiler.schedule.module import TOP_LEVEL, Dumps, with_equal_ops
from autotune.engines.compiler.schedule.program import Program
from autotune.engines.compiler.schedule.scalar import UnresolvedError
from autotune.engines.compiler.timeline.hlo import Instruction


@dataclasses.dataclass(frozen=True)
class OpTime:
    """One op on one device.

    Attributes:
        time_us: From its first bundle to its last transfer's end.
        compute_us: Without waits for transfers.
        memory_us: Its HBM transfers back to back.
        estimate: What the time is where the schedule could not be played: "XLA's estimate" or "its bytes"; else "".
    """

    time_us: float
    compute_us: float
    memory_us: float
    estimate: str = ""


class OpTimes:
    """Times of a program's ops by name, each played once.

    Args:
        dumps: The compiler's listings.
        chip: Its target.
    """

    def __init__(self, dumps: Dumps, chip: Chip) -> None:
        core = CORES[chip.name]
        programs = {}
        for op, text in dumps.listings.items():
            if op != TOP_LEVEL:
                with contextlib.suppress(UnresolvedError):  # It is estimated instead, and said to be.
                    programs[op] = Program(parse_bundles(text), core)
        self._programs = with_equal_ops(programs, dumps.hlo)
        self._chip = chip
        self._known: dict[str, OpTime] = {}

    def __call__(self, one: Instruction) -> OpTime:
        if one.name not in self._known:
            self._known[one.name] = self._played(one) or self._estimated(one)
        return self._known[one.name]

    def _played(self, one: Instruction) -> OpTime | None:
        program = self._programs.get(one.name)
        if program is None:
            return None
        cores = []
        for core in range(self._chip.cores):
            memory = new_memory(self._chip)
            try:
                end, busy, _ = program.play(memory, core, 0.0, _no_call)
            except UnresolvedError:
                return None
            cores.append((max(end, memory.idle_at), busy, memory.busy_cycles))
        time, compute, traffic = max(cores)
        us = 1 / (self._chip.clock_ghz * 1e3)
        return OpTime(time * us, compute * us, traffic * us)

    def _estimated(self, one: Instruction) -> OpTime:
        """XLA's estimate leaves HBM's real pace out of account; no op is faster than its result is written."""
        nbytes = sum(array.nbytes for array in one.arrays if array.space == 0)
        memory_us = nbytes / (self._chip.hbm_gbps * 1e3 * HBM_EFFICIENCY)
        if (cycles := one.estimated_cycles) is None:
            return OpTime(2 * memory_us, 0.0, 2 * memory_us, "its bytes")  # about as much is read
        compute_us = cycles / (self._chip.clock_ghz * 1e3)
        return OpTime(max(compute_us, memory_us), compute_us, memory_us, "XLA's estimate")


def _no_call(op: str, start: float, passed: tuple) -> float:
    raise UnresolvedError(f"an op calls {op}")
