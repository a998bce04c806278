"""Tunes JAX's splash and flash attention at JAXBench's size for a v6e, and prints them beside what others have.

    python benchmarks/stock_attention.py [--trials 60] [--results DIR]

A run goes on with the studies in DIR (results). All times but JAXBench's are predictions for v6e.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table

from autotune import render
from autotune.chips import get_chip
from autotune.cli.progress import make_progress
from autotune.engines import Task, open_engine
from autotune.kernel import get_kernel
from autotune.search import SearchSettings, TrialRecord, fastest_first
from autotune.search.study import load_records
from autotune.space import format_config
from autotune.tuner import TuneResult, tune

KERNELS = ("stock_splash", "stock_splash_bwd", "stock_flash")
# JAXBench's own winner at this size, and what it measured on a v6e: benchmark/results.csv, commit f25a370.
JAXBENCH = {"block_q": 2048, "block_k_major": 2048, "block_k": 1024, "block_b": 1}
JAXBENCH_MS = 6.5091


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--results", type=Path, default=Path("results"))
    arguments = parser.parse_args()
    console = render.console()
    table = Table("kernel", "default", "maxtext", "tuned", "over default", "config")
    settings = SearchSettings(trials=arguments.trials, results=arguments.results)
    for name in KERNELS:
        result = _tuned(name, settings)
        times = [outcome.time_ms if (outcome := result.baselines.get(b)) else None for b in ("default", "maxtext")]
        best = result.best
        table.add_row(
            name,
            *(render.milliseconds(time) if time else "–" for time in times),
            render.milliseconds(best.outcome.time_ms) if best else "–",
            render.times(result.speedup("default")),
            format_config(best.config).replace(",", ", ") if best else "–",
        )
    console.print(table)
    records = fastest_first(load_records(arguments.results, result.study) or [])
    _print_top(console, records)


def _tuned(name: str, settings: SearchSettings) -> TuneResult:
    kernel = get_kernel(name)
    task = Task(kernel, kernel.problems["jaxbench-4k"], get_chip("v6e"))
    console = render.console(stderr=True)
    with (
        open_engine("compiler", task, jobs=2, timeout_s=kernel.timeout_s) as engine,
        make_progress(console, [f"{name} {task.problem} on v6e"]) as progress,
    ):
        return tune(task, engine, settings, progress)


def _print_top(console: render.Console, records: list[TrialRecord]) -> None:
    """The first five of flash attention, and JAXBench's config wherever it stands."""
    table = Table("place", "flash attention", "predicted", "measured by JAXBench")
    for place, record in enumerate(records, 1):
        theirs = dict(record.config) == JAXBENCH
        if place <= 5 or theirs:
            measured = render.milliseconds(JAXBENCH_MS) if theirs else ""
            config = format_config(record.config).replace(",", ", ")
            table.add_row(str(place), config, render.milliseconds(record.outcome.time_ms), measured)
    console.print(table)


if __name__ == "__main__":
    main()
