"""How a run goes, on standard error: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from autotune import render
from autotune.outcome import Status
from autotune.search import TrialRecord, fastest_first
from autotune.tuner import Observer

LINE_EVERY_S = 10.0
LINE_EVERY_TRIALS = 10


class _Tally(Observer):
    """Counts and the best, which both ways of showing need.

    Args:
        console: Where it is shown.
        heading: Lines shown first, once the run has begun: an error before that stays the only line.
    """

    def __init__(self, console: Any, heading: Sequence[str]) -> None:
        self._console = console
        self._heading = heading
        self.counts: Counter[Status] = Counter()
        self.best: TrialRecord | None = None
        self.trials = 0
        self.begun = time.monotonic()

    def started(self, study: str, known: list[TrialRecord], trials: int) -> None:
        self.trials = trials
        for record in known:
            self._count(record)
        resumed = f", {self.done} trials of it known" if known else ""
        for line in (*self._heading, f"study {study}{resumed}"):
            self._console.print(line, soft_wrap=True)

    def trial(self, record: TrialRecord) -> None:
        self._count(record)

    def _count(self, record: TrialRecord) -> None:
        self.counts[record.status] += 1
        if record.status is Status.OK:
            self.best = fastest_first([record, *([self.best] if self.best else [])])[0]

    @property
    def done(self) -> int:
        return self.counts.total()

    @property
    def status(self) -> str:
        best = render.milliseconds(self.best.outcome.time_ms) if self.best else "none yet"
        return f"best {best} · {render.count_text({s.value: self.counts[s] for s in Status if self.counts[s]})}"


class LineProgress(_Tally):
    """A plain line every few trials or seconds."""

    def __init__(self, console: Any, heading: Sequence[str]) -> None:
        super().__init__(console, heading)
        self._last_time = self.begun
        self._last_done = 0

    def started(self, study: str, known: list[TrialRecord], trials: int) -> None:
        super().started(study, known, trials)
        self._last_done = self.done

    def trial(self, record: TrialRecord) -> None:
        super().trial(record)
        now = time.monotonic()
        due = now - self._last_time >= LINE_EVERY_S or self.done - self._last_done >= LINE_EVERY_TRIALS
        if due or self.done in (1, self.trials):
            self._last_time, self._last_done = now, self.done
            elapsed = render.seconds(now - self.begun)
            self._console.print(f"{self.done}/{self.trials} trials, {elapsed}: {self.status}", soft_wrap=True)

    def validating(self, record: TrialRecord) -> None:
        self._console.print(f"validating {_text(record)}", soft_wrap=True)

    def validated(self, record: TrialRecord) -> None:
        if record.status is not Status.OK:
            self._console.print(f"  {_refusal(record)}", soft_wrap=True)

    def says(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)

    def __enter__(self) -> LineProgress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


class BarProgress(_Tally):
    """A live bar, with what came of the trials under it."""

    def __init__(self, console: Any, heading: Sequence[str]) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        super().__init__(console, heading)

        self._progress = Progress(
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
        )
        self._task: Any = None

    def started(self, study: str, known: list[TrialRecord], trials: int) -> None:
        super().started(study, known, trials)
        self._progress.start()
        self._task = self._progress.add_task(self.status, total=trials, completed=self.done)

    def trial(self, record: TrialRecord) -> None:
        super().trial(record)
        self._progress.update(self._task, advance=1, description=self.status)

    def validating(self, record: TrialRecord) -> None:
        self._progress.update(self._task, description=f"validating {render.milliseconds(record.outcome.time_ms)}")

    def validated(self, record: TrialRecord) -> None:
        if record.status is not Status.OK:
            self._progress.console.print(f"{_text(record)}: {_refusal(record)}")
        self._progress.update(self._task, description=self.status)

    def says(self, line: str) -> None:
        self._progress.update(self._task, description=line)

    def __enter__(self) -> BarProgress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()


def make_progress(console: Any, heading: Sequence[str]) -> LineProgress | BarProgress:
    """A bar where `console` is a terminal, lines elsewhere; `heading` comes first."""
    return (BarProgress if console.is_terminal else LineProgress)(console, heading)


@contextlib.contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Counts up to `total` on standard error; what it gives is called once for each, from any thread."""
    console = render.console(stderr=True)
    if console.is_terminal:
        from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn(what), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task(what, total=total)
            yield lambda: progress.advance(bar)
        return
    begun = last = time.monotonic()
    done, lock = 0, threading.Lock()

    def advance() -> None:
        nonlocal done, last
        with lock:
            done, now = done + 1, time.monotonic()
            if now - last >= LINE_EVERY_S and done < total:
                last = now
                console.print(f"{done}/{total} {what}, {render.seconds(now - begun)}", soft_wrap=True)

    yield advance


def _text(record: TrialRecord) -> str:
    from autotune.space import format_config

    return format_config(record.config)


def _refusal(record: TrialRecord) -> str:
    reason = record.validation.message if record.validation else ""
    return f"{record.status.value}: {reason or 'refused'}; the next best is tried"
