"""What presets cost where they are used: importing, and a lookup among ten thousand entries.

    python benchmarks/lookup.py [--entries 10000]

A lookup happens while tracing. "Again" is one for a problem that was asked for before (each retrace, each layer);
"first" is the first one for a problem; "cold" is the very first of a process, which reads and indexes the file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

from rich.table import Table

from autotune import presets, render
from autotune.chips import get_chip
from autotune.kernel import get_kernel

V5E = "TPU v5 lite"
ALONE = "import time; a = time.perf_counter(); import autotune; print(1e3 * (time.perf_counter() - a))"
WITH_PRESETS = ALONE.replace("import autotune;", "from autotune import presets;")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=10_000)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", presets.PresetWarning)
    table = Table("", "median", "worst", "of", "wanted")

    def row(name: str, times_ms: list[float], wanted: str = "") -> None:
        median, worst = (render.milliseconds(of) for of in (statistics.median(times_ms), max(times_ms)))
        table.add_row(name, median, worst, str(len(times_ms)), wanted)

    for name, code in (("import autotune", ALONE), ("from autotune import presets", WITH_PRESETS)):
        runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(7)]
        row(name, [float(run.stdout) for run in runs], "100 ms")
    with tempfile.TemporaryDirectory() as folder:
        kernel = get_kernel("matmul")
        problems = _write(Path(folder), kernel, options.entries)
        os.environ["AUTOTUNE_PRESETS"] = folder
        row("lookup, cold", [_time(kernel, problems[0])])
        chosen = problems[:: max(1, len(problems) // 200)][1:]
        row("lookup, exact, first", [_time(kernel, one) for one in chosen])
        row("lookup, exact, again", [_time(kernel, one) for one in chosen * 5], "0.050 ms")
        fields = [one.to_dict() for one in chosen]
        row("lookup, exact, again, by its fields", [_time(kernel, one) for one in fields * 5], "0.050 ms")
        others = [one.replace({"k": one.k + 256}) for one in chosen[:50]]
        row("lookup, nearest, first", [_time(kernel, one) for one in others])
        row("lookup, nearest, again", [_time(kernel, one) for one in others * 5], "0.050 ms")
    render.console().print(table)
    return 0


def _write(folder: Path, kernel, count: int) -> list:
    """A file with presets for so many problems."""
    problem = kernel.problems["square-8k"]
    shipped = presets.find(kernel, problem, get_chip(V5E)).preset.to_dict()
    sides = range(1024, 1024 + 256 * 100, 256)
    problems = [problem.replace({"m": m, "n": n, "k": 8192}) for m in sides for n in sides][:count]
    entries = [{**shipped, "problem": one.to_dict()} for one in problems]
    path = presets.preset_path(folder, V5E, kernel.name)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(entries))
    return problems


def _time(kernel, problem) -> float:
    """Milliseconds."""
    started = time.perf_counter()
    presets.lookup(kernel, problem, device_kind=V5E)
    return 1e3 * (time.perf_counter() - started)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
