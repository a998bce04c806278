"""A whole compiled program: its top level and the ops it calls, played on one memory."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.chips import Chip
from autotune.engines.compiler.schedule.bundles import parse_bundles
from autotune.engines.compiler.schedule.core import CORES, new_memory
from autotune.engines.compiler.schedule.hlo import signatures
from autotune.engines.compiler.schedule.program import Program
from autotune.engines.compiler.schedule.scalar import UnresolvedError
from autotune.engines.compiler.schedule.smem import Operands
from autotune.engines.compiler.schedule.steering import PallasCall, known_operands

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
        foreign_waits: How often the core waits for another one (a SparseCore, say), which is not played: at no cost.
    """

    time_ms: float
    compute_ms: float
    memory_ms: float
    hbm_bytes: int
    steps: int
    foreign_waits: int = 0


@dataclasses.dataclass(frozen=True)
class Dumps:
    """What the compiler wrote of one module: op name to listing, and the scheduled HLO."""

    listings: Mapping[str, str]
    hlo: str


def read_dumps(directory: Path) -> Dumps:
    """The dumps of the one module that lie in `directory`.

    Raises:
        UnresolvedError: Where there are none.
    """
    listings, hlo = {}, ""
    for path in sorted(directory.iterdir()):
        if match := _DUMP.fullmatch(path.name):
            listings[match["op"]] = path.read_text()
        elif path.name.endswith(f"-{TOP_LEVEL}-hlo.txt"):
            hlo = path.read_text()
    if TOP_LEVEL not in listings:
        raise UnresolvedError("the compiler left no listing of the program")
    return Dumps(listings, hlo)


def play_module(dumps: Dumps, chip: Chip, calls: Sequence[PallasCall] = ()) -> Timing:
    """Plays one call of the program on each of the chip's cores.

    Args:
        calls: All of the program's Pallas calls, with the values that their grids or blocks depend on.

    Raises:
        UnresolvedError: Where the listings do not say what happens.
    """
    core = CORES[chip.name]
    # The top level branches on what the runtime tells it (seeds, debugging), which costs nothing here.
    programs = {op: Program(parse_bundles(text), core, strict=op != TOP_LEVEL) for op, text in dumps.listings.items()}
    listed = set(programs)
    programs = with_equal_ops(programs, dumps.hlo)
    known = known_operands(dumps.hlo, calls)
    timings = [_play_core(programs, listed, known, chip, index) for index in range(chip.cores)]
    slowest = max(timings, key=lambda timing: timing.time_ms)
    return dataclasses.replace(slowest, hbm_bytes=sum(timing.hbm_bytes for timing in timings))


def play_op(dumps: Dumps, op: str, chip: Chip) -> tuple[float, float, float]:
    """Plays one op by itself on each of the chip's cores.

    Returns:
        Cycles of the slowest core: all of them, those in bundles, and of HBM transfers back to back.

    Raises:
        UnresolvedError: Its listing does not say what happens.
    """

    def no_call(name: str, start: float, passed: tuple) -> float:
        raise UnresolvedError(f"{op} calls {name}")

    if op not in dumps.listings:
        raise UnresolvedError(f"the compiler left no listing of {op}")
    program, cores = Program(parse_bundles(dumps.listings[op]), CORES[chip.name]), []
    for core in range(chip.cores):
        memory = new_memory(chip)
        end, busy, _ = program.play(memory, core, 0.0, no_call)
        cores.append((max(end, memory.idle_at), busy, memory.busy_cycles))
    return max(cores)


def with_equal_ops(programs: Mapping[str, Program], hlo: str) -> dict[str, Program]:
    """The programs, and those of ops that the compiler left out as equal to one that it listed."""
    texts = signatures(hlo)
    by_signature: dict[str, list[Program]] = defaultdict(list)
    for op, program in programs.items():
        if op in texts:
            by_signature[texts[op]].append(program)
    # Where two were listed that look the same, which of them an unlisted one equals is not known.
    return {**{op: by_signature[text][0] for op, text in texts.items() if len(by_signature[text]) == 1}, **programs}


def _play_core(
    programs: Mapping[str, Program], listed: set[str], known: Mapping[str, Operands], chip: Chip, core: int
) -> Timing:
    memory = new_memory(chip)
    compute, steps = 0.0, 0
    unplayed = {op for op in listed if op != TOP_LEVEL and not op.startswith("<")}

    def call(op: str, start: float, passed: tuple) -> float:
        nonlocal compute, steps
        if op.startswith("<"):  # the runtime's own initialization, a handful of cycles
            return start
        if op not in programs:
            raise UnresolvedError(f"the compiler left no listing of {op}")
        unplayed.discard(op)
        operands = known.get(op, Operands())
        operands = Operands(operands.arrays, {**dict(enumerate(passed)), **operands.scalars})
        end, busy, passes = programs[op].play(memory, core, start, call, operands)
        compute += busy
        steps += passes
        return end

    end, _, _ = programs[TOP_LEVEL].play(memory, core, 0.0, call)
    if unplayed:  # a call that was not understood would pass for an op that costs nothing
        raise UnresolvedError(f"the program never came to {', '.join(sorted(unplayed))}")
    to_ms = 1 / (chip.clock_ghz * 1e6)
    return Timing(
        time_ms=max(end, memory.idle_at) * to_ms,
        compute_ms=compute * to_ms,
        memory_ms=memory.busy_cycles * to_ms,
        hbm_bytes=memory.hbm_bytes,
        steps=steps,
        foreign_waits=memory.foreign_waits,
    )
