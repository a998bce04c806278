"""DMA engines, HBM and semaphores, in time."""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque

from autotune.engines.compiler.schedule.scalar import Unknown, UnresolvedError, known_or_zero

_MOST_CORES = 4  # SparseCores of a chip, each of which sends one signal
STEP_BYTES = 512  # the unit of a strided transfer's row length (``steps_per_stride``), on every generation tried


@dataclasses.dataclass(frozen=True)
class TransferTiming:
    """How fast transfers are, in cycles of the core.

    Attributes:
        granule_bytes: The unit of a transfer's size in the listings.
        pipe: Cycles the HBM is busy with one granule, whichever way it goes.
        write: Cycles one write needs for a granule, however idle the HBM is.
        row: Cycles the HBM is busy besides for each contiguous row of a strided transfer.
        read_latency: Cycles from a read's last granule to its semaphore's signal.
        write_latency: The same of a write.
    """

    granule_bytes: int
    pipe: float
    write: float
    row: float
    read_latency: float
    write_latency: float


class Memory:
    """One core's view of HBM: transfers share one pipe in the order of their issue.

    Each occupies the pipe for its bytes and signals its semaphore a latency later, so that several in
    flight hide each other's latency, as double buffering intends. Where a single write cannot use the whole
    pipe, two in flight at a time are what bounds a kernel that only copies.

    Args:
        timing: How fast transfers are.
        cores: Of the device, which receive what one of them sends to all.
        foreign: Whether cores of another kind may send signals.
    """

    def __init__(self, timing: TransferTiming, *, cores: int = 1, foreign: bool = False) -> None:
        self._timing = timing
        self.cores = cores
        self._foreign = foreign
        self._pipe_free = 0.0
        self._values: dict[int, int] = defaultdict(int)
        self._pending: dict[int, deque[tuple[float, int]]] = defaultdict(deque)
        self._used: set[int] = set()  # semaphores of transfers
        self.hbm_bytes = 0
        self.busy_cycles = 0.0
        self.idle_at = 0.0
        self.foreign_waits = 0

    def read(self, now: float, granules: int, semaphore: int, steps: int, receivers: int = 1) -> None:
        """HBM to VMEM or SMEM, in contiguous rows of that many steps; 0 where it is one piece.

        Where several cores receive the same read, each bears its part of it.
        """
        granules = self._size(granules)
        arrived = self._occupy(now, granules / receivers, self._rows(granules, steps) / receivers)
        self._signal(arrived + self._timing.read_latency, granules, semaphore)

    def write(self, now: float, granules: int, semaphore: int, steps: int) -> None:
        """VMEM or SMEM to HBM, in rows like `read`."""
        granules = self._size(granules)
        rows = self._rows(granules, steps)
        sent = max(self._occupy(now, granules, rows), now + granules * self._timing.write + rows * self._timing.row)
        self._signal(sent + self._timing.write_latency, granules, semaphore)

    def copy(self, now: float, granules: int, semaphore: int, steps: int) -> None:
        """A transfer within the core; it takes its latency and no HBM bandwidth."""
        self._signal(now + self._timing.write_latency, granules, semaphore)

    def _size(self, granules: int) -> int:
        """The size; none, and counted, where only the runtime knows it: a few words for another core."""
        if isinstance(granules, Unknown):
            granules = known_or_zero(granules)
            self.await_foreign()
        return granules

    def _rows(self, granules: int, steps: int) -> float:
        steps = known_or_zero(steps)
        return granules * self._timing.granule_bytes / (STEP_BYTES * steps) if steps else 0.0

    def _occupy(self, now: float, granules: float, rows: float) -> float:
        cycles = granules * self._timing.pipe + rows * self._timing.row
        self._pipe_free = max(self._pipe_free, now) + cycles
        self.hbm_bytes += int(granules * self._timing.granule_bytes)
        self.busy_cycles += cycles
        return self._pipe_free

    def _signal(self, at: float, granules: int, semaphore: int) -> None:
        self._pending[_place(semaphore)].append((at, known_or_zero(granules)))
        self._used.add(_place(semaphore))
        self.idle_at = max(self.idle_at, at)

    def wait(self, semaphore: int, now: float, granules: int, foreign: bool = False) -> float:
        """The time at which `semaphore` has reached `granules`, not before `now`.

        Args:
            foreign: Whether a signal or a few that nothing here sends come from other cores: they have come.

        Raises:
            UnresolvedError: Where nothing under way would ever raise it so far.
        """
        if isinstance(semaphore, Unknown):
            raise UnresolvedError(f"the schedule waits for a transfer {semaphore.origin}")
        pending = self._pending[semaphore]
        if isinstance(granules, Unknown):  # whatever is under way
            granules = known_or_zero(granules) + self._values[semaphore] + sum(amount for _, amount in pending)
        while self._values[semaphore] < granules:
            if not pending:
                # No transfer of this core has ever used it, and so few granules are signals.
                if foreign and self._foreign and semaphore not in self._used and granules <= _MOST_CORES:
                    self.await_foreign()
                    self._values[semaphore] = granules
                    return now
                raise UnresolvedError("the schedule waits for a transfer that was never started")
            at, amount = pending.popleft()
            self._values[semaphore] += amount
            now = max(now, at)
        return now

    def await_foreign(self) -> None:
        """A wait for another core, which is not played: it costs nothing, and is counted."""
        self.foreign_waits += 1

    def add(self, semaphore: int, amount: int) -> None:
        self._values[_place(semaphore)] += known_or_zero(amount)

    def set(self, semaphore: int, amount: int) -> None:
        self._values[_place(semaphore)] = known_or_zero(amount)


def _place(semaphore: int) -> int:
    """The semaphore; nowhere for one that only the runtime knows."""
    if isinstance(semaphore, Unknown):
        known_or_zero(semaphore)  # within an op it matters
        return -1
    return semaphore
