"""DMA engines, HBM and semaphores, in time."""

from __future__ import annotations

from collections import defaultdict, deque

from autotune.engines.compiler.schedule.scalar import UnresolvedError


class Memory:
    """One core's view of HBM: transfers share one pipe in the order of their issue.

    Each transfer occupies the pipe for its bytes and signals its semaphore a latency later, so that
    several in flight hide each other's latency, as double buffering intends.

    Args:
        granule_bytes: The unit of a transfer's size in the listings.
        read_cycles: Cycles to move one granule from HBM.
        write_cycles: Cycles to move one granule to HBM.
        latency: Cycles from the end of a transfer to its semaphore's signal.
    """

    def __init__(self, granule_bytes: int, read_cycles: float, write_cycles: float, latency: float) -> None:
        self._granule_bytes = granule_bytes
        self._read_cycles = read_cycles
        self._write_cycles = write_cycles
        self._latency = latency
        self._pipe_free = 0.0
        self._values: dict[int, int] = defaultdict(int)
        self._pending: dict[int, deque[tuple[float, int]]] = defaultdict(deque)
        self.hbm_bytes = 0
        self.busy_cycles = 0.0
        self.idle_at = 0.0

    def read(self, now: float, granules: int, semaphore: int) -> None:
        """HBM to VMEM or SMEM."""
        self._transfer(now, granules, semaphore, granules * self._read_cycles)

    def write(self, now: float, granules: int, semaphore: int) -> None:
        """VMEM or SMEM to HBM."""
        self._transfer(now, granules, semaphore, granules * self._write_cycles)

    def copy(self, now: float, granules: int, semaphore: int) -> None:
        """A transfer within the core; it takes its latency and no HBM bandwidth."""
        self._signal(now + self._latency, granules, semaphore)

    def _transfer(self, now: float, granules: int, semaphore: int, cycles: float) -> None:
        self._pipe_free = max(self._pipe_free, now) + cycles
        self.hbm_bytes += granules * self._granule_bytes
        self.busy_cycles += cycles
        self._signal(self._pipe_free + self._latency, granules, semaphore)

    def _signal(self, at: float, granules: int, semaphore: int) -> None:
        self._pending[semaphore].append((at, granules))
        self.idle_at = max(self.idle_at, at)

    def wait(self, semaphore: int, now: float, granules: int) -> float:
        """The time at which `semaphore` has reached `granules`, not before `now`.

        Raises:
            UnresolvedError: Where nothing under way would ever raise it so far.
        """
        pending = self._pending[semaphore]
        while self._values[semaphore] < granules:
            if not pending:
                raise UnresolvedError("the schedule waits for a transfer that was never started")
            at, amount = pending.popleft()
            self._values[semaphore] += amount
            now = max(now, at)
        return now

    def add(self, semaphore: int, amount: int) -> None:
        self._values[semaphore] += amount

    def set(self, semaphore: int, amount: int) -> None:
        self._values[semaphore] = amount
