"""``autotune predict``: the times of given configs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from autotune import engines, render
from autotune.cli.common import print_json, read_task
from autotune.cli.config_table import Row, read_rows, short_names
from autotune.cli.progress import counting
from autotune.engines._base import Task
from autotune.errors import UsageError
from autotune.outcome import Outcome, Status
from autotune.problem import parse_pairs
from autotune.space import format_config


def run(arguments: argparse.Namespace) -> int:
    task = read_task(arguments)
    rows = _rows(task, arguments)
    outcomes = _predict(task, rows, arguments)
    if arguments.json:
        print_json([_document(task, row, outcome) for row, outcome in zip(rows, outcomes, strict=True)])
    else:
        _show(task, rows, outcomes)
    return 0 if any(outcome.ok for outcome in outcomes) else 1


def _rows(task: Task, arguments: argparse.Namespace) -> list[Row]:
    if arguments.configs is not None:
        return read_rows(arguments.configs, task.kernel, task.problem, task.chip, arguments.columns)
    if arguments.columns:
        raise UsageError("--columns names the columns of a file: give --configs FILE.csv too")
    space = task.kernel.space(task.problem, task.chip)
    given, short = parse_pairs(arguments.config, "--config"), short_names(space.params)
    for form in short.keys() & given.keys():
        if short[form] in given:
            raise UsageError(f"--config gives {short[form]} and {form}, which are the same: give one")
    config = space.parse({short.get(name, name): value for name, value in given.items()})
    space.check(config)
    return [Row(task.problem, config, None)]


def _predict(task: Task, rows: Sequence[Row], arguments: argparse.Namespace) -> list[Outcome]:
    """One outcome a row, in order. Rows of one problem share an engine, and equal rows one evaluation."""
    console = render.console(stderr=True)
    outcomes: dict[int, Outcome] = {}
    by_problem: dict[Any, list[int]] = {}
    for place, row in enumerate(rows):
        if row.invalid is not None:
            outcomes[place] = Outcome(Status.INVALID, message=row.invalid)
        else:
            by_problem.setdefault(row.problem, []).append(place)
    with counting("configs", sum(map(len, by_problem.values()))) as advance:
        for problem, places in by_problem.items():
            one = Task(task.kernel, problem, task.chip)
            jobs = min(arguments.jobs, len(places))
            with engines.open_engine(arguments.engine, one, jobs=jobs, timeout_s=arguments.timeout) as engine:
                if engine.notice:
                    console.print(engine.notice, soft_wrap=True)
                futures: dict[str, Future[Outcome]] = {}
                for place in places:
                    text = format_config(rows[place].config)
                    futures[text] = futures.get(text) or engine.evaluate(rows[place].config)
                for place in places:
                    outcomes[place] = futures[format_config(rows[place].config)].result()
                    advance()
    return [outcomes[place] for place in range(len(rows))]


def _document(task: Task, row: Row, outcome: Outcome) -> dict[str, Any]:
    own = _own_fields(task, row)
    return {
        "config": row.config,
        **({"problem": own} if own else {}),
        "status": outcome.status,
        "time_ms": outcome.time_ms,
        "compute_ms": outcome.compute_ms,
        "memory_ms": outcome.memory_ms,
        "bound": outcome.bound,
        "source": outcome.source,
    } | ({"message": outcome.message} if outcome.message else {})


def _own_fields(task: Task, row: Row) -> dict[str, Any]:
    """Where a row's problem differs from the one asked for."""
    asked = task.problem.to_dict()
    return {name: value for name, value in row.problem.to_dict().items() if value != asked[name]}


def _show(task: Task, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> None:
    out = render.console()
    out.print(f"{task.kernel.name} {task.problem} on {task.chip.name}", soft_wrap=True)
    common = _common(rows)
    if common:
        out.print(f"all with {format_config(common)}", soft_wrap=True)
    problems = [_own_fields(task, row) for row in rows]
    heads = ("config", "problem") if any(problems) else ("config",)
    table = render.table(*heads, "time", "compute", "memory", "bound", left=len(heads))
    for row, problem, outcome in zip(rows, problems, outcomes, strict=True):
        own = {name: value for name, value in row.config.items() if name not in common}
        figures = [render.milliseconds(value) for value in (outcome.time_ms, outcome.compute_ms, outcome.memory_ms)]
        first = figures[0] if outcome.ok else outcome.status.value
        words = [format_config(fields).replace(",", ", ") for fields in (own, problem)][: len(heads)]
        table.add_row(*words, first, *figures[1:], outcome.bound or "–")
    out.print(table)
    for reason in dict.fromkeys(f"{o.status.value}: {o.message}" for o in outcomes if not o.ok and o.message):
        out.print(reason.strip().splitlines()[0], soft_wrap=True)
    for note in dict.fromkeys(outcome.message for outcome in outcomes if outcome.ok and outcome.message):
        out.print(note.strip().splitlines()[0], soft_wrap=True)
    for source in dict.fromkeys(outcome.source for outcome in outcomes if outcome.ok):
        out.print(f"Times are {render.provenance(source, task.chip.name)}.")


def _common(rows: Sequence[Row]) -> dict[str, Any]:
    """What several rows have in common need not be in each."""
    first, *others = [row.config for row in rows]
    return {n: value for n, value in first.items() if all(other[n] == value for other in others)} if others else {}
