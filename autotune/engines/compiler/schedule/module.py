"""A whole compiled program: its top level and the ops it calls, played on one memory."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from autotune.chips import Chip
from autotune.engines.compiler.schedule.bundles import parse_bundles
from autotune.engines.compiler.schedule.core import CORES, new_memory
from autotune.engines.compiler.schedule.program import Program
from autotune.engines.compiler.schedule.scalar import UnresolvedError

TOP_LEVEL = "TLP"
_DUMP = re.compile(r"\d+-(?P<op>.+)-\d\d-final_bundles\.txt")


@dataclasses.dataclass(frozen=True)
class Timing:
    """What one call of the program takes on the slowest of the device's cores.

    Attributes:
        time_ms: From the first bundle to the last transfer's end.
        compute_ms: Time in bundles, stalls of the matrix units included, without waits for DMAs.
        memory_ms: Time the HBM transfers take back to back.
        hbm_bytes: Bytes moved to and from HBM by all cores.
        steps: Grid steps of all ops, per core.
    """

    time_ms: float
    compute_ms: float
    memory_ms: float
    hbm_bytes: int
    steps: int


def read_dumps(directory: Path) -> dict[str, str]:
    """Op name to listing, for the one module whose dumps lie in `directory`.

    Raises:
        UnresolvedError: Where there is none.
    """
    listings = {}
    for path in sorted(directory.iterdir()):
        if match := _DUMP.fullmatch(path.name):
            listings[match["op"]] = path.read_text()
    if TOP_LEVEL not in listings:
        raise UnresolvedError("the compiler left no listing of the program")
    return listings


def play_module(listings: Mapping[str, str], chip: Chip) -> Timing:
    """Plays one call of the program on each of the chip's cores.

    Raises:
        UnresolvedError: Where the listings do not say what happens.
    """
    core = CORES[chip.name]
    # The top level branches on what the runtime tells it (seeds, debugging), which costs nothing here.
    programs = {op: Program(parse_bundles(text), core, strict=op != TOP_LEVEL) for op, text in listings.items()}
    timings = [_play_core(programs, chip, index) for index in range(chip.cores)]
    slowest = max(timings, key=lambda timing: timing.time_ms)
    return dataclasses.replace(slowest, hbm_bytes=sum(timing.hbm_bytes for timing in timings))


def _play_core(programs: Mapping[str, Program], chip: Chip, core: int) -> Timing:
    memory = new_memory(chip)
    compute, steps = 0.0, 0

    def call(op: str, start: float) -> float:
        nonlocal compute, steps
        if op.startswith("<"):  # the runtime's own initialization, a handful of cycles
            return start
        if op not in programs:
            raise UnresolvedError(f"the compiler left no listing of {op}")
        end, busy, passes = programs[op].play(memory, core, start, call)
        compute += busy
        steps += passes
        return end

    end, _, _ = programs[TOP_LEVEL].play(memory, core, 0.0, call)
    to_ms = 1 / (chip.clock_ghz * 1e6)
    return Timing(
        time_ms=max(end, memory.idle_at) * to_ms,
        compute_ms=compute * to_ms,
        memory_ms=memory.busy_cycles * to_ms,
        hbm_bytes=memory.hbm_bytes,
        steps=steps,
    )
