"""Which functional units a program's bundles use, where it spends its cycles: what binds a config, and how hard.

How often each bundle runs is counted while the schedule is played; what it issues says libtpu's own table of unit
use per bundle, asked for beside the listing. Nothing here takes part in a prediction.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from autotune.chips import get_chip
from autotune.engines import _jobs
from autotune.engines.compiler.schedule import module, program, read_dumps
from autotune.engines.compiler.schedule.bundles import CALL, Bundle, Instruction
from autotune.engines.compiler.schedule.core import CORES, Core
from autotune.engines.compiler.schedule.memory import Memory
from autotune.engines.compiler.schedule.mxu import block_stall
from autotune.engines.compiler.schedule.smem import Operands
from autotune.engines.compiler.support import DUMP_FOLDER, worker_environment

# libtpu's columns that count what a bundle issues; they agree with a count of the opcodes. Those of the matrix and
# cross-lane units say how many are busy with anything, so that these are counted from the listing.
ISSUED = ("VALU", "EUP", "VPOP", "VLOAD", "VSTORE", "SALU")
SPILLS = ("VLOAD:FILL", "VSTORE:SPILL")
# What matrix and cross-lane instructions share to be issued from. libtpu's table does not name it: 2 is the largest
# number seen in any bundle of attention on every target, and of matmul, cross-entropy and norms on v5e and v6e.
EXTENDED_SLOTS = 2
PARTS = 8
UNITS = ("MXU", "XLU", "VEX", *ISSUED)

_TICK = "tick"  # called by every bundle that is counted
_TABLE = re.compile(r"\d+-(?P<op>.+)-\d\d-final_hlo-static-per-bundle-utilization\.txt")
_ADDRESS = re.compile(r"^[ \t]*0(?:x[0-9a-f]+)?[ \t][^:\n]*:", re.MULTILINE)
_XLU_PUSH = re.compile(r"\b(?!vpop)v[a-z][\w.]*\.xlu\d")


@dataclasses.dataclass(frozen=True)
class Region:
    """Consecutive bundles that ran equally often: a loop's body, or a part of one.

    Attributes:
        op: The op's name in the compiled program.
        first: Address of its first bundle.
        bundles: How many there are.
        runs: How often each ran.
        cycles: Of all runs together, matrix stalls and waits for DMAs included.
        used: By unit, what one run issues; cycles of all MXUs together for the MXU.
        spilled: Of one run's vector loads and stores, those of registers that were spilled.
        course: The same as `used` for equal parts of the region in order (`PARTS` of them), and as "cycles" what
            each part takes, matrix stalls included and waits for DMAs not.
    """

    op: str
    first: int
    bundles: int
    runs: int
    cycles: float
    used: dict[str, float]
    spilled: int
    course: list[dict[str, float]] = dataclasses.field(default_factory=list)

    def occupancy(self, unit: str, slots: Mapping[str, int]) -> float:
        """The share of the unit's slots that are used; times the cycles, the least that these operations can take."""
        return self.used[unit] * self.runs / (slots[unit] * self.cycles)


@dataclasses.dataclass(frozen=True)
class UnitUse:
    """What a program issues.

    Attributes:
        slots: By unit, how many operations a bundle has room for (for the MXU and XLU, how many there are).
        cycles: Of the whole program, on the core that takes most.
        regions: In the order of the listing.
    """

    slots: dict[str, int]
    cycles: float
    regions: list[Region]


@dataclasses.dataclass(frozen=True)
class _Table:
    slots: dict[str, int]
    rows: list[dict[str, int]]


class _Clock:
    """Charges the time from one bundle's issue to the next one's to the first."""

    def __init__(self) -> None:
        self.core = 0
        self.now = 0.0
        self.charged: list[float] = [0.0]
        self.address = 0

    def move(self, now: float, charged: list[float], address: int) -> None:
        self.charged[self.address] += now - self.now
        self.now, self.charged, self.address = now, charged, address


class _CountedProgram:
    """A `Program` that counts its bundles: each calls out before anything else."""

    def __init__(self, bundles: Sequence[Bundle], core: Core, clock: _Clock, *, strict: bool = True) -> None:
        self.bundles = bundles
        self.runs: dict[int, list[int]] = {}  # by core, of each bundle
        self.cycles: dict[int, list[float]] = {}
        self._clock = clock
        ticking = [
            dataclasses.replace(
                bundle, instructions=(Instruction(None, CALL, (_TICK, str(bundle.address))), *bundle.instructions)
            )
            for bundle in bundles
        ]
        self._program = program.Program(ticking, core, strict=strict)

    def play(
        self,
        memory: Memory,
        core: int,
        start: float,
        call: program.Call,
        operands: Operands = program.NOTHING_KNOWN,
    ) -> tuple[float, float, int]:
        runs = self.runs.setdefault(core, [0] * len(self.bundles))
        cycles = self.cycles.setdefault(core, [0.0] * len(self.bundles))
        clock = self._clock
        if clock.core != core or start < clock.now:  # another core's time begins anew
            clock.core, clock.now = core, start

        def ticking(op: str, now: float, passed: tuple) -> float:
            if op != _TICK:
                return call(op, now, passed)
            runs[passed[0]] += 1
            clock.move(now, cycles, passed[0])
            return now

        played = self._program.play(memory, core, start, ticking, operands)
        clock.move(played[0], clock.charged, clock.address)
        return played


@contextlib.contextmanager
def counting() -> Iterator[list[_CountedProgram]]:
    """While entered, programs that are played are counted; gives them in the order in which they were read.

    The player is not told of it: its sources are hashed into every preset and study, and have nothing else to count.
    """
    counted: list[_CountedProgram] = []
    clock = _Clock()

    def count(bundles: Sequence[Bundle], core: Core, *, strict: bool = True) -> _CountedProgram:
        counted.append(_CountedProgram(bundles, core, clock, strict=strict))
        return counted[-1]

    with mock.patch.object(module, "Program", count):
        yield counted


def environment() -> dict[str, str]:
    """A worker's, in which libtpu writes its tables of unit use, too."""
    common = worker_environment()
    flags = "--xla_jf_dump_llo_pass_label_regex=(final_bundles|final_hlo-static)"  # the last one given counts
    return {**common, "LIBTPU_INIT_ARGS": f"{common['LIBTPU_INIT_ARGS']} {flags}"}


def measure(kernel: str, problem: Mapping[str, Any], target: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A worker's job, in `environment`: the config's outcome, and its `UnitUse` where the schedule was played."""
    with counting() as counted:
        outcome = _jobs.compile_config(kernel, problem, target, config)
    if outcome["source"] != "schedule":
        return {"outcome": outcome, "use": None}
    folder = Path(DUMP_FOLDER)
    listings = read_dumps(folder).listings
    use = unit_use(
        listings, dict(zip(listings, counted, strict=True)), read_tables(folder), CORES[get_chip(target).name]
    )
    return {"outcome": outcome, "use": dataclasses.asdict(use)}


def parse_use(document: Mapping[str, Any]) -> UnitUse:
    """What `measure` wrote as JSON."""
    regions = [Region(**region) for region in document["regions"]]
    return UnitUse(dict(document["slots"]), document["cycles"], regions)


def read_tables(folder: Path) -> dict[str, _Table]:
    """Op name to libtpu's table of its bundles' unit use: the slots there are, then a row of counts for each bundle."""
    tables = {}
    for path in folder.iterdir():
        if match := _TABLE.fullmatch(path.name):
            _, names, slots, _, *rows = path.read_text().splitlines()
            columns = names.replace(" ", "").split(",")
            counts = [dict(zip(columns, map(int, row.split()), strict=True)) for row in (slots, *rows)]
            tables[match["op"]] = _Table(counts[0], counts[1:])
    return tables


def unit_use(
    listings: Mapping[str, str], counted: Mapping[str, _CountedProgram], tables: Mapping[str, _Table], core: Core
) -> UnitUse:
    """What the program issued on the core that took most cycles."""
    totals: dict[int, float] = {}
    for one in counted.values():
        for number, cycles in one.cycles.items():
            totals[number] = totals.get(number, 0.0) + sum(cycles)
    slowest = max(totals, key=lambda number: totals[number])
    regions = [
        region
        for op, one in counted.items()
        if slowest in one.runs
        for region in _regions(op, one, slowest, listings[op], tables[op], core)
    ]
    slots = {**next(iter(tables.values())).slots, "VEX": EXTENDED_SLOTS}
    return UnitUse({unit: slots[unit] for unit in UNITS}, totals[slowest], regions)


def _regions(
    op: str, counted: _CountedProgram, number: int, listing: str, table: _Table, core: Core
) -> Iterator[Region]:
    texts = _ADDRESS.split(listing)[1:]
    if not len(texts) == len(table.rows) == len(counted.bundles):
        raise ValueError(
            f"{op}: {len(counted.bundles)} bundles, {len(texts)} texts, {len(table.rows)} rows of unit use"
        )
    cycles = counted.cycles[number]
    for runs, group in itertools.groupby(range(len(texts)), key=counted.runs[number].__getitem__):
        places = list(group)
        part = slice(places[0], places[-1] + 1)
        if runs:
            rows = table.rows[part]
            yield Region(
                op=op,
                first=places[0],
                bundles=len(places),
                runs=runs,
                cycles=sum(cycles[part]),
                used=_used(counted.bundles[part], texts[part], rows, core),
                spilled=sum(row[column] for row in rows for column in SPILLS),
                course=_course(counted.bundles[part], texts[part], rows, core),
            )


def _used(
    bundles: Sequence[Bundle], texts: Sequence[str], rows: Sequence[Mapping[str, int]], core: Core
) -> dict[str, float]:
    pushes = sum(len(_XLU_PUSH.findall(text)) for text in texts)
    matrix = sum(not opcode.startswith("vpop") for bundle in bundles for opcode, _ in bundle.mxu)
    return {
        "MXU": sum(_multiplying(bundles, unit, core) for unit in {unit for one in bundles for _, unit in one.mxu}),
        "XLU": pushes,
        "VEX": matrix + pushes,
        **{unit: sum(row[unit] for row in rows) for unit in ISSUED},
    }


def _course(
    bundles: Sequence[Bundle], texts: Sequence[str], rows: Sequence[Mapping[str, int]], core: Core
) -> list[dict[str, float]]:
    course = []
    before = 0
    for start, end in itertools.pairwise(len(bundles) * part // PARTS for part in range(PARTS + 1)):
        until = end + block_stall(bundles[:end], core.cycles_per_push, core.cycles_per_float32_push)
        used = _used(bundles[start:end], texts[start:end], rows[start:end], core)
        course.append({**used, "cycles": until - before})
        before = until
    return course


def _multiplying(bundles: Sequence[Bundle], unit: int, core: Core) -> int:
    """Cycles that one MXU's multiplies take back to back, as the player times them."""
    own = [dataclasses.replace(one, mxu=tuple(entry for entry in one.mxu if entry[1] == unit)) for one in bundles]
    own = [one for one in own if any(opcode.startswith("vmatmul") for opcode, _ in one.mxu)]
    free = [*own, *own[-1:]]  # a further one issues as the unit comes free
    return max(0, len(free) - 1) + block_stall(free, core.cycles_per_push, core.cycles_per_float32_push)
