"""Tunes every kernel on several named problems and targets, and sets tuned beside default and XLA in one table.

    python benchmarks/tune_all.py [KERNEL …] [--targets v5e,v5p,v6e,v7x] [--problems 3] [--trials 16]

Runs `python -m autotune` once for each; the presets go to ``results/presets``, the table to ``results/tuned.csv`` and
``results/tuned.md``. What the table has already of the present version of a kernel, with as many trials, is not run
again, so the script can be interrupted and resumed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd

from autotune import render
from autotune.chips import get_chip
from autotune.errors import AutotuneError
from autotune.kernel import Kernel, get_kernel, kernel_names

RESULTS = Path(__file__).parents[1] / "results"
TABLE, DOCUMENT = RESULTS / "tuned.csv", RESULTS / "tuned.md"
KEY = ["kernel", "problem", "target"]
NEVER_VALID = {"stock_ragged_paged_attention"}  # jax's TPU interpreter cannot run it: nothing of it is shown right.


def single_chip_kernels() -> list[str]:
    """The kernels that run on one chip, whichever it is; the others' problems name their topology.

    Those of packages that are not installed are said and left out.
    """
    names = []
    for kernel in map(get_kernel, kernel_names()):
        try:
            kernel.version  # noqa: B018  Its source is read for it.
        except AutotuneError as error:
            print(f"{kernel.name} is left out: {error}", file=sys.stderr)
            continue
        if kernel.target(kernel.parse_problem(None)) is None:
            names.append(kernel.name)
    return names


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kernels = [name for name in single_chip_kernels() if name not in NEVER_VALID]
    parser.add_argument("kernels", nargs="*", default=kernels)
    parser.add_argument("--targets", default="v5e,v5p,v6e,v7x")
    parser.add_argument("--problems", type=int, default=3, help="named problems of each kernel, evenly spread")
    parser.add_argument("--trials", type=int, default=16)
    options = parser.parse_args(arguments)
    failed = 0
    for place in range(options.problems):
        for name in options.kernels:
            kernel = get_kernel(name)
            problem = spread(list(kernel.problems), options.problems)[place]
            for target in options.targets.split(","):
                if not done(kernel, problem, target, options.trials):
                    failed += not tune(kernel, problem, target, options.trials)
    write_document(pd.read_csv(TABLE))
    return 1 if failed else 0


def spread(names: list[str], count: int) -> list[str]:
    """The first, and others as far apart in the list as can be; the first again where there are no more."""
    count_there = min(count, len(names))
    return [names[place * len(names) // count_there] if place < count_there else names[0] for place in range(count)]


def done(kernel: Kernel, problem: str, target: str, trials: int) -> bool:
    if not TABLE.exists():
        return False
    table = pd.read_csv(TABLE)
    same = (table.kernel == kernel.name) & (table.problem == problem) & (table.target == target)
    return bool(((table.version == kernel.version) & (table.trials >= trials) & same).any())


def tune(kernel: Kernel, problem: str, target: str, trials: int) -> bool:
    """One line of the table; False where nothing valid was found."""
    command = [sys.executable, "-m", "autotune", kernel.name, "--target", target, "--problem", problem]
    run = subprocess.run(
        [*command, "--trials", str(trials), "--results", str(RESULTS), "--json"], stdout=subprocess.PIPE, check=False
    )
    found = json.loads(run.stdout) if run.returncode == 0 else {}
    best = found.get("best") or {}
    if not best.get("validated"):
        print(f"{kernel.name} {problem} on {target}: nothing valid was found", flush=True)
        return False
    times = {name: (found["baselines"].get(name) or {}).get("time_ms") for name in ("default", "xla")}
    roofline_ms = kernel.cost(kernel.problems[problem]).roofline_ms(get_chip(target))
    row = {
        **dict(zip(KEY, (kernel.name, problem, target), strict=True)),
        "default_ms": times["default"],
        "xla_ms": times["xla"],
        "xla_source": (found["baselines"].get("xla") or {}).get("source"),
        "tuned_ms": best["time_ms"],
        "of_roofline": roofline_ms / best["time_ms"],
        "max_rel_error": best["max_rel_error"],
        "trials": trials,
        "version": kernel.version,
    }
    table = pd.DataFrame([row])
    if TABLE.exists():
        table = pd.concat([pd.read_csv(TABLE), table])
    table = table.drop_duplicates(KEY, keep="last").sort_values(KEY)
    table.to_csv(TABLE, index=False, float_format="%.5g")
    write_document(table)
    print(f"{kernel.name} {problem} on {target}: {render.milliseconds(best['time_ms'])}", flush=True)
    return True


def write_document(table: pd.DataFrame) -> None:
    """The table as people read it."""
    lines = [
        "# Tuned against the 128-wide defaults and against XLA",
        "",
        "Predicted for each target by the compiler's schedule, not measured; every tuned config was validated.",
        "A dash: the baseline does not compile for the chip (most often it does not fit the HBM), or has no time.",
        "A star: XLA's program could not be played; the time is XLA's own cycle estimate, which is no match for it.",
        "Made by `python benchmarks/tune_all.py`.",
        "",
        "| kernel | problem | target | default | XLA | tuned | over default | over XLA | of roofline |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in table.itertuples():
        default, xla = (None if pd.isna(value) else value for value in (row.default_ms, row.xla_ms))
        over = [render.times(value / row.tuned_ms if value else None) for value in (default, xla)]
        times = [render.milliseconds(value) for value in (default, xla, row.tuned_ms)]
        times[1] += "*" if row.xla_source == "hlo" else ""
        cells = [row.kernel, row.problem, row.target, *times, *over]
        lines.append(f"| {' | '.join([*cells, render.percent(row.of_roofline)])} |")
    DOCUMENT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
