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
    flight hide each other's latency, as double buffering intends. A single write cannot use the whole
    pipe: two in flight at a time are what bounds a kernel that only copies.
    """

    def __init__(self, timing: TransferTiming) -> None:
        self._timing = timing
        self._pipe_free = 0.0
        self._values: dict[int, int] = defaultdict(int)
        self._pending: dict[int, deque[tuple[float, int]]] = defaultdict(deque)
        self.hbm_bytes = 0
        self.busy_cycles = 0.0
        self.idle_at = 0.0
        self.foreign_waits = 0

    def read(self, now: float, granules: int, semaphore: int, steps: int, receivers: int = 1) -> None:
        """HBM to VMEM or SMEM, in contiguous rows of that many steps; 0 where it is one piece.

        Where several cores receive the same read, each bears its part of it.
        """
        granules = known_or_zero(granules)
        arrived = self._occupy(now, granules / receivers, self._rows(granules, steps) / receivers)
        self._signal(arrived + self._timing.read_latency, granules, semaphore)

    def write(self, now: float, granules: int, semaphore: int, steps: int) -> None:
        """VMEM or SMEM to HBM, in rows like `read`."""
        granules = known_or_zero(granules)
        rows = self._rows(granules, steps)
        sent = max(self._occupy(now, granules, rows), now + granules * self._timing.write + rows * self._timing.row)
        self._signal(sent + self._timing.write_latency, granules, semaphore)

    def copy(self, now: float, granules: int, semaphore: int, steps: int) -> None:
        """A transfer within the core; it takes its latency and no HBM bandwidth."""
        self._signal(now + self._timing.write_latency, granules, semaphore)

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
        self._pending[known_or_zero(semaphore)].append((at, known_or_zero(granules)))
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
                if foreign and granules <= _MOST_CORES:
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
        self._values[known_or_zero(semaphore)] += known_or_zero(amount)

    def set(self, semaphore: int, amount: int) -> None:
        self._values[known_or_zero(semaphore)] = known_or_zero(amount)
