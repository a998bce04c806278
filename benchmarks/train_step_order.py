"""Whether predictions order train steps as a device does: five very different configs of the tiny model, both ways.

    python benchmarks/train_step_order.py [--problem tiny-cpu,seq_len=512] [--topology v5e:2x4]

Measured by the device engine on this machine (a CPU passes for eight devices), in one race; predicted by the compiler
engine for a topology of as many TPU chips, and by arithmetic for the CPU. A CPU is no TPU: that the orders agree is
not to be expected where compute, memory and collectives weigh otherwise. Both are shown as they are.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import pandas as pd
from rich.table import Table

from autotune import render
from autotune.chips import get_chip
from autotune.engines import Task, choose, open_engine
from autotune.kernel import get_kernel
from autotune.space import format_config

CONFIGS = {
    "fsdp, full remat": {},
    "fsdp, nothing again": {f"remat_{name}": "save" for name in ("qkv", "attention", "out_proj", "gate_up", "mlp_out")},
    "data, 2 micro-batches": {"data": 8, "fsdp": 1, "accumulate": 2},
    "tensor 4": {"fsdp": 2, "tensor": 4},
    "sequence 4, dense attention": {"fsdp": 2, "sequence": 4, "attention": "xla"},
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problem", default="tiny-cpu,seq_len=512")
    parser.add_argument("--topology", default="v5e:2x4", help="of as many chips as the problem has devices")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the race")
    options = parser.parse_args(arguments)
    kernel = get_kernel("train_step")
    here = kernel.parse_problem(options.problem)
    there = here.replace({"topology": options.topology})
    if there.devices != here.devices:
        parser.error(f"{options.topology} has {there.devices} devices, the problem {here.devices}")
    default = kernel.heuristic(here, get_chip(here.target))
    configs = {name: {**default, **changes} for name, changes in CONFIGS.items()}
    rows = [{"config": name} for name in configs]

    chip = get_chip(there.target)
    with open_engine("compiler", Task(kernel, there, chip), jobs=2, timeout_s=None) as engine:
        for row, future in zip(rows, [engine.evaluate(config) for config in configs.values()], strict=True):
            outcome = future.result()
            row["predicted_ms"] = outcome.time_ms
            if not outcome.ok:
                print(f"{row['config']}: {outcome.status}: {outcome.message[:200]}", file=sys.stderr)

    _, device = choose("device", None)
    for row, config in zip(rows, configs.values(), strict=True):
        row["estimated_ms"] = kernel.estimate_ms(here, config, device)
    with open_engine("device", Task(kernel, here, device), jobs=1, timeout_s=None) as engine:
        for config in configs.values():
            outcome = engine.evaluate(config).result()
            if not outcome.ok:
                print(f"{format_config(config)}: {outcome.status}: {outcome.message}", file=sys.stderr)
                return 1
        race = engine.race(list(configs.values()), seconds=options.seconds, seed=1).result()
        for row, samples in zip(rows, race.samples, strict=True):
            row["measured_ms"] = statistics.median(samples)

    frame = pd.DataFrame(rows).sort_values("measured_ms")
    table = Table("config", f"predicted, {options.topology}", "estimated here", f"measured, {device.name}")
    for row in frame.itertuples():
        table.add_row(row.config, *map(render.milliseconds, (row.predicted_ms, row.estimated_ms, row.measured_ms)))
    render.console().print(table)
    for name in ("predicted_ms", "estimated_ms"):
        rank = frame[name].corr(frame["measured_ms"], method="spearman")
        print(f"rank correlation of {name.removesuffix('_ms')} and measured: {rank:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
