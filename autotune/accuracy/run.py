"""Predicts the rows of tables in worker processes, and sums each table up."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from autotune.accuracy import statistics
from autotune.accuracy.tables import Row, Table
from autotune.engines._pool import JobError, JobTimeout, WorkerDied, WorkerPool
from autotune.engines.compiler.support import why_unsupported, worker_environment
from autotune.errors import UnavailableError
from autotune.outcome import Outcome, Source, Status

JOB = "autotune.accuracy._job:predict_row"
WARM_UP = "autotune.engines.compiler.toolchain:warm_up"
_FAILURES = {JobTimeout: Status.TIMEOUT, WorkerDied: Status.CRASH, JobError: Status.RUNTIME_ERROR}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One row and what the compiler engine says of it."""

    row: Row
    outcome: Outcome

    @property
    def predicted_ms(self) -> float | None:
        """Milliseconds; None where the program does not compile or its schedule cannot be played."""
        played = self.outcome.ok and self.outcome.source is Source.SCHEDULE
        return self.outcome.time_ms if played else None

    @property
    def ratio(self) -> float | None:
        """Predicted over measured."""
        return None if self.predicted_ms is None else self.predicted_ms / self.row.measured_ms

    @property
    def failure(self) -> str | None:
        """Why there is no prediction, in one line."""
        if self.predicted_ms is not None:
            return None
        text = " ".join(self.outcome.message.split())
        return text if self.outcome.ok else f"{self.outcome.status.value}: {text}"


@dataclasses.dataclass(frozen=True)
class Result:
    """A table with its predictions."""

    table: Table
    predictions: list[Prediction]

    @property
    def predicted(self) -> list[Prediction]:
        return [one for one in self.predictions if one.predicted_ms is not None]

    @property
    def pairs(self) -> dict[str, int] | None:
        """Of the pairs measured before and after a change, how many were predicted, and with its sign right."""
        if self.table.pairs is None:
            return None
        sides: dict[str, dict[str, Prediction]] = {}
        for one in self.predictions:
            sides.setdefault(one.row.fields[self.table.pairs], {})[one.row.fields["which"]] = one
        complete = [(side["before"], side["after"]) for side in sides.values() if {"before", "after"} <= side.keys()]
        predicted = [(a, b) for a, b in complete if a.predicted_ms is not None and b.predicted_ms is not None]
        right = [
            (a, b)
            for a, b in predicted
            if (b.predicted_ms < a.predicted_ms) == (b.row.measured_ms < a.row.measured_ms)  # type: ignore[operator]
        ]
        return {"measured": len(complete), "predicted": len(predicted), "sign_right": len(right)}

    def summary(self) -> dict[str, Any]:
        """One JSON object; regrets and errors are percentages, and None where they mean nothing."""
        rows, best = self.predicted, min(one.row.measured_ms for one in self.predictions)
        pair = [one.predicted_ms for one in rows], [one.row.measured_ms for one in rows]
        sweep = self.table.sweep
        return {
            "table": self.table.name,
            "target": self.table.target,
            "source": self.table.source,
            "fitted": self.table.fitted,
            "wall_clock": self.table.wall_clock,
            "rows": len(self.predictions),
            "predicted": len(rows),
            "spearman": statistics.spearman(*pair),
            "kendall": statistics.kendall(*pair),
            "regret_top1": statistics.regret(*pair, best, 1) if sweep else None,
            "regret_top5": statistics.regret(*pair, best, 5) if sweep else None,
            "median_ratio": statistics.median_ratio(*pair),
            "mean_abs_error": statistics.mean_abs_error(*pair),
            "pairs": self.pairs,
            "failures": [
                {"row": one.row.fields, "status": one.outcome.status.value, "reason": one.failure}
                for one in self.predictions
                if one.failure is not None
            ],
        }


def predict_tables(
    tables: Sequence[Table], *, jobs: int, timeout_s: float, on_row: Callable[[], None] = lambda: None
) -> list[Result]:
    """Compiles and predicts every row, `jobs` at a time.

    Args:
        timeout_s: Limit for each row, in seconds.
        on_row: Called after each row, from any thread.

    Raises:
        UnavailableError: Where this machine cannot run the TPU compiler.
    """
    with _open_pool(jobs) as pool:
        futures = {
            table.name: [_submit(pool, table, row, timeout_s, on_row) for row in table.rows()] for table in tables
        }
        return [
            Result(table, [Prediction(row, _outcome(future)) for row, future in futures[table.name]])
            for table in tables
        ]


@contextlib.contextmanager
def _open_pool(jobs: int) -> Iterator[WorkerPool]:
    if reason := why_unsupported():
        raise UnavailableError(f"predictions need the TPU compiler: {reason}")
    pool = WorkerPool(jobs, warm_up=WARM_UP, environment=worker_environment())
    try:
        try:
            pool.start().result()
        except tuple(_FAILURES) as error:
            raise UnavailableError(f"predictions need the TPU compiler, and libtpu does not load ({error})") from error
        yield pool
    finally:
        pool.close()


def _submit(
    pool: WorkerPool, table: Table, row: Row, timeout_s: float, on_row: Callable[[], None]
) -> tuple[Row, Future[Any]]:
    arguments = {"workload": table.workload, "row": row.fields, "target": table.target}
    future = pool.submit(JOB, arguments, timeout_s=timeout_s)
    future.add_done_callback(lambda _: on_row())
    return row, future


def _outcome(future: Future[Any]) -> Outcome:
    try:
        return Outcome.from_dict(future.result())
    except tuple(_FAILURES) as error:
        return Outcome(_FAILURES[type(error)], message=str(error))
