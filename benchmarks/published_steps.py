"""Predicted step times beside published ones: Llama 3.1 on Trillium (v6e) slices of 8 to 256 chips.

    python benchmarks/published_steps.py [--only llama3-8b/v6e-8 …] [--results FILE]

Source of the times and of what was set for them: https://github.com/AI-Hypercomputer/tpu-recipes,
training/trillium/Llama3.1-8B-MaxText and Llama3.1-70B-MaxText. One step takes minutes to compile; what is in the
results file already is not predicted again. What differs from the published set-up is in docs/train_step.md.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import pandas as pd
from rich.table import Table

from autotune import render
from autotune.chips import get_chip
from autotune.engines import Task, open_engine
from autotune.kernel import get_kernel

OFFLOAD_ALL = {"remat_block_input": "offload", "remat_qkv": "offload", "remat_out_proj": "offload"}
KEEP_OUT_PROJ = {**OFFLOAD_ALL, "remat_out_proj": "save"}
KEEP_ALL = {"remat_block_input": "offload", "remat_qkv": "save", "remat_out_proj": "save"}
AGAIN = {"remat_block_input": "offload", "remat_qkv": "offload", "remat_out_proj": "recompute"}
# The published windowed-einsum threshold turns collective matmuls off; the 70B rows here leave it at XLA's choice.
APART = {"collective_matmul": False}
LOGITS = {"loss_chunk_mib": 4096}

# Model, topology, sequences per chip, config, published seconds.
RECIPES = {
    "llama3-8b/v6e-8": ("llama3-8b", "v6e:2x4", 3, {**OFFLOAD_ALL, **APART, **LOGITS}, 3.443),
    "llama3-8b/v6e-16": ("llama3-8b", "v6e:4x4", 3, {**OFFLOAD_ALL, **APART, **LOGITS}, 3.393),
    "llama3-8b/v6e-32": ("llama3-8b", "v6e:4x8", 3, {**KEEP_ALL, **APART, **LOGITS}, 3.495),
    "llama3-8b/v6e-64": ("llama3-8b", "v6e:8x8", 5, {**KEEP_OUT_PROJ, **APART, **LOGITS}, 5.652),
    "llama3-8b/v6e-128": ("llama3-8b", "v6e:8x16", 4, {**KEEP_OUT_PROJ, **APART, **LOGITS}, 4.602),
    "llama3-8b/v6e-256": ("llama3-8b", "v6e:16x16", 4, {**KEEP_OUT_PROJ, **APART, **LOGITS}, 4.546),
    "llama3-70b/v6e-64": ("llama3-70b", "v6e:8x8", 2, {**AGAIN, **LOGITS}, 18.688),
    "llama3-70b/v6e-128": ("llama3-70b", "v6e:8x16", 4, {**AGAIN, **LOGITS}, 34.786),
    "llama3-70b/v6e-256": ("llama3-70b", "v6e:16x16", 5, {**AGAIN, **LOGITS}, 42.656),
}
SEQ_LEN = 8192


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--results", type=Path, default=Path("results/published_steps.csv"))
    options = parser.parse_args(arguments)
    known = pd.read_csv(options.results).to_dict("records") if options.results.exists() else []
    rows = {row["recipe"]: row for row in known}
    for name in options.only:
        if name in rows:
            continue
        rows[name] = _predict(name)
        options.results.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(rows.values()).to_csv(options.results, index=False)
    _show([rows[name] for name in options.only])
    return 0


def _predict(name: str) -> dict[str, object]:
    """One recipe's row; seconds, and the peak of one chip's HBM in GiB."""
    model, topology, per_chip, changes, published = RECIPES[name]
    kernel = get_kernel("train_step")
    problem = kernel.problems[model].replace({"topology": topology})
    problem = problem.replace({"batch": per_chip * problem.devices, "seq_len": SEQ_LEN})
    chip = get_chip(problem.target)
    config = {**kernel.heuristic(problem, chip), **changes}
    if reason := kernel.space(problem, chip).why_invalid(config):
        raise SystemExit(f"{name}: {reason}")
    with open_engine("compiler", Task(kernel, problem, chip), jobs=1, timeout_s=None) as engine:
        outcome = engine.evaluate(config).result()
    print(f"{name}: {outcome.status.value} {outcome.time_ms or outcome.message[:300]}", file=sys.stderr)
    return {
        "recipe": name,
        "per_chip_batch": per_chip,
        "published_s": published,
        "predicted_s": outcome.time_ms / 1e3 if outcome.time_ms is not None else None,
        "status": outcome.status.value,
        "source": outcome.source.value if outcome.source else "",
        "compile_s": outcome.compile_s,
    }


def _show(rows: list[dict]) -> None:
    table = Table("recipe", "a chip's sequences", "published", "predicted", "ratio")
    for row in rows:
        predicted = row["predicted_s"]
        right = row["status"] == "ok"
        table.add_row(
            row["recipe"],
            str(row["per_chip_batch"]),
            f"{row['published_s']:.3f} s",
            f"{predicted:.3f} s" if right else row["status"],
            f"{predicted / row['published_s']:.3f}" if right else "–",
        )
    render.console().print(table)
    ok = [row for row in rows if row["status"] == "ok"]
    pairs = list(itertools.combinations(ok, 2))
    right = [(a, b) for a, b in pairs if (a["predicted_s"] < b["predicted_s"]) == (a["published_s"] < b["published_s"])]
    print(f"order right in {len(right)} of {len(pairs)} pairs")
    for a, b in pairs:
        if (a, b) not in right:
            apart = abs(a["published_s"] / b["published_s"] - 1)
            print(f"  wrong: {a['recipe']} and {b['recipe']}, published {100 * apart:.1f} % apart")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
