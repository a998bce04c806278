"""Compiles what the spaces call valid: no config may be refused for anything but the VMEM it takes.

    python benchmarks/sweep_spaces.py [KERNEL …] [--targets v5e,v5p,v6e,v7x] [--samples 24]

For each kernel and target, takes random configs of random named problems' spaces, compiles each for the target, and
counts the outcomes. Prints a table, writes ``results/spaces.csv``, and ends with 1 where a valid config was refused
for another reason than VMEM. The rows of kernels and targets not asked for are kept.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
from pathlib import Path

import pandas as pd
from rich.table import Table
from tune_all import single_chip_kernels

from autotune import render
from autotune.chips import Chip, get_chip
from autotune.engines import Task, open_engine
from autotune.kernel import Kernel, get_kernel
from autotune.outcome import Status

RESULT = Path(__file__).parents[1] / "results" / "spaces.csv"
ALLOWED = (Status.OK, Status.VMEM_OOM)
PROBLEMS = 3  # named ones, each of whose spaces gives as many samples


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="*", default=single_chip_kernels())
    parser.add_argument("--targets", default="v5e,v5p,v6e,v7x")
    parser.add_argument("--samples", type=int, default=24, help="configs per kernel and target")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rows, refused = [], []
    for name in options.kernels:
        for target in options.targets.split(","):
            kernel, chip = get_kernel(name), get_chip(target)
            counts, wrong = sweep(kernel, chip, options.samples, options.jobs, options.seed)
            rows.append({"kernel": name, "version": kernel.version, "target": target, **counts})
            refused += wrong
            print(f"{name} on {target}: {', '.join(f'{n} {status}' for status, n in counts.items())}", flush=True)
            _save(rows)
    render.console().print(_table(pd.read_csv(RESULT)))
    for text in refused:
        print(text)
    return 1 if refused else 0


def sweep(kernel: Kernel, chip: Chip, samples: int, jobs: int, seed: int) -> tuple[dict[str, int], list[str]]:
    """How many configs had which outcome, and a line for each that should have compiled."""
    rng = random.Random(f"{seed} {kernel.name} {chip.name}")
    names = rng.sample(sorted(kernel.problems), min(PROBLEMS, len(kernel.problems)))
    counts: collections.Counter[str] = collections.Counter({status.value: 0 for status in ALLOWED})
    wrong = []
    for place, name in enumerate(names):
        problem = kernel.problems[name]
        configs = list(kernel.space(problem, chip))
        share = samples // len(names) + (place < samples % len(names))
        chosen = rng.sample(configs, min(share, len(configs)))
        with open_engine("compiler", Task(kernel, problem, chip), jobs=jobs, timeout_s=300) as engine:
            futures = [(config, engine.evaluate(config)) for config in chosen]
            for config, future in futures:
                outcome = future.result()
                counts[outcome.status.value] += 1
                if outcome.status not in ALLOWED:
                    line = outcome.message.strip().splitlines()[0][:200] if outcome.message else ""
                    wrong.append(f"{kernel.name} {name} on {chip.name}, {config}: {outcome.status.value}: {line}")
    return dict(counts), wrong


def _save(rows: list[dict[str, object]]) -> None:
    """Puts the rows in place of those of the same kernel and target."""
    table = pd.DataFrame(rows)
    if RESULT.exists():
        table = pd.concat([pd.read_csv(RESULT), table])
    table = table.drop_duplicates(["kernel", "target"], keep="last").sort_values(["kernel", "target"])
    counted = [column for column in table if column not in ("kernel", "version", "target")]
    table[counted] = table[counted].fillna(0).astype(int)
    table.to_csv(RESULT, index=False)


def _table(rows: pd.DataFrame) -> Table:
    table = render.table(*rows.columns, left=3)
    for row in rows.itertuples(index=False):
        table.add_row(*map(str, row))
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
