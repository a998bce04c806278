"""``autotune accuracy``: predictions beside times measured on real TPUs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from autotune import render
from autotune.accuracy.plot import check_plot, write_plot
from autotune.accuracy.run import Result, predict_tables
from autotune.accuracy.tables import TABLES, Table, select
from autotune.cli.common import print_json, reserved_stdout
from autotune.cli.progress import counting

FIGURES = ("rows", "ρ", "τ", "top 1", "top 5", "ratio", "error")
LEGEND = (
    "rows: predicted of measured; ρ, τ: Spearman's and Kendall's rank correlations; top 1, top 5: how much slower",
    "than the best the first pick is, and the best of the first five; ratio: median of predicted over measured;",
    "error: mean of |ratio - 1|. Regrets are given for sweeps over one problem only.",
)
GROUPS: tuple[tuple[str, Callable[[Table], bool]], ...] = (
    ("Fitted: constants of the timing model were fitted on these rows", lambda table: table.fitted),
    ("Held out", lambda table: not table.fitted and not table.wall_clock),
    (
        "Held out, timed by wall clock: some 0.1 ms of dispatch in each, which no prediction has",
        lambda table: not table.fitted and table.wall_clock,
    ),
)


def run(arguments: argparse.Namespace) -> int:
    tables = select(arguments.tables, everything=arguments.all)
    if arguments.plot is not None:
        check_plot(arguments.plot)
    with reserved_stdout(arguments.json):
        results = _predict(tables, arguments)
        if arguments.plot is not None:
            write_plot(results, arguments.plot)
        if not arguments.json:
            _show(results, arguments)
    if arguments.json:
        print_json([result.summary() for result in results])
    return 0 if any(result.predicted for result in results) else 1


def _predict(tables: Sequence[Table], arguments: argparse.Namespace) -> list[Result]:
    with counting("rows", sum(len(table.rows()) for table in tables)) as advance:
        return predict_tables(tables, jobs=arguments.jobs, timeout_s=arguments.timeout, on_row=advance)


def _show(results: Sequence[Result], arguments: argparse.Namespace) -> None:
    out = render.console()
    for title, belongs in GROUPS:
        chosen = [result for result in results if belongs(result.table)]
        if not chosen:
            continue
        out.print(title)
        table = render.table("table", *FIGURES)
        for result in chosen:
            table.add_row(result.table.name, *_figures(result))
        out.print(table)
    out.print("\n".join(LEGEND), soft_wrap=True)
    for result in results:
        _explain(result, out, rows=arguments.rows)
    if not arguments.tables:
        _name_the_others({result.table.name for result in results}, out)


def _name_the_others(shown: set[str], out: Any) -> None:
    left_out = [table for name, table in TABLES.items() if name not in shown]
    if slow := [table.name for table in left_out if table.installed]:
        out.print(f"Left out because they take minutes; --all predicts them too: {', '.join(slow)}.")
    for package in dict.fromkeys(table.needs for table in left_out if not table.installed):
        names = ", ".join(table.name for table in left_out if table.needs == package)
        out.print(f"Left out because {package} is not installed (pip install {package}): {names}.")


def _figures(result: Result) -> list[str]:
    figures = result.summary()

    def show(name: str, pattern: str) -> str:
        value = figures[name]
        return "–" if value is None else pattern.format(value)

    return [
        f"{figures['predicted']}/{figures['rows']}",
        show("spearman", "{:.3f}"),
        show("kendall", "{:.3f}"),
        show("regret_top1", "{:.2f} %"),
        show("regret_top5", "{:.2f} %"),
        show("median_ratio", "{:.3f}"),
        show("mean_abs_error", "{:.1f} %"),
    ]


def _explain(result: Result, out: Any, *, rows: bool) -> None:
    """The table's source and note, the rows that could not be predicted, and all rows where wanted."""
    out.print(f"\n{result.table.name} ({result.table.target}): {result.table.source}", soft_wrap=True)
    if result.table.note:
        out.print(result.table.note, soft_wrap=True)
    if pairs := result.pairs:
        counts = f"{pairs['sign_right']} of {pairs['predicted']} predicted, of {pairs['measured']} measured"
        out.print(f"changes with the right sign: {counts}", soft_wrap=True)
    if rows:
        table = render.table("row", "predicted", "measured", "ratio")
        for one in result.predictions:
            figures = (render.milliseconds(one.predicted_ms), render.milliseconds(one.row.measured_ms))
            table.add_row(one.row.label, *figures, "–" if one.ratio is None else f"{one.ratio:.3f}")
        out.print(table)
    for one in result.predictions:
        if one.failure is not None:
            out.print(f"not predicted: {one.row.label}: {one.failure[:200]}", soft_wrap=True)
