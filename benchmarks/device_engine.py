"""Whether the device engine's figures hold, shown on whatever device is attached (a CPU will do).

    python benchmarks/device_engine.py reproduce [--results DIR] [--kernel chunked_attention]
    python benchmarks/device_engine.py exhaustive [--seeds 0,1,2] [--trials 50]
    python benchmarks/device_engine.py equal [--runs 20]
    python benchmarks/device_engine.py overhead [--trials 20]

``reproduce`` times a measured preset against its baseline config by code of its own, in fresh processes, and says
whether the ratio lies in the preset's interval. ``exhaustive`` measures every config of the space, tunes with several
seeds, and races what they found against the best there is. ``equal`` gives the finals two candidates that are the same
program, and counts how often a gain is declared. ``overhead`` adds up what a run takes beyond compiles and runs.
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
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from twins import Twins

from autotune import presets, render
from autotune.engines import Task, choose, open_engine
from autotune.engines.device import hardware
from autotune.kernel import get_kernel
from autotune.noise import spread
from autotune.outcome import Config
from autotune.presets import Preset
from autotune.search import SearchSettings, TrialRecord
from autotune.space import format_config
from autotune.tuner import REFERENCE, Observer, preset_file, tune
from autotune.tuner.finals import CONFIRMATIONS, decide

TIMEOUT_S = 120.0
ROUNDS = 15
LEADERS = 6  # of all configs, so many are raced for the best
NEAR = 1.03


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("reproduce", "exhaustive", "equal", "overhead"))
    parser.add_argument("--kernel", default="chunked_attention")
    parser.add_argument("--problem", help="as on autotune's command line")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args(arguments)
    checks: dict[str, Callable[[argparse.Namespace], bool]] = {
        "reproduce": reproduce,
        "exhaustive": exhaustive,
        "equal": equal,
        "overhead": overhead,
    }
    return 0 if checks[options.what](options) else 1


def task_of(options: argparse.Namespace) -> Task:
    kernel = get_kernel(options.kernel)
    return Task(kernel, kernel.parse_problem(options.problem), choose("device", None)[1])


def reproduce(options: argparse.Namespace) -> bool:
    """The preset's speedup, by nothing of the engine's."""
    task = task_of(options)
    preset = measured_preset(task, options.results)
    default = task.kernel.baselines(task.problem, task.chip)["default"]
    ratios = []
    for seed in range(CONFIRMATIONS):
        job = {"kernel": task.kernel.name, "problem": task.problem.to_dict(), "seed": seed}
        job["configs"] = [dict(default), dict(preset.config)]
        run = subprocess.run(
            [sys.executable, __file__, "--child", json.dumps(job)],
            stdout=subprocess.PIPE,
            env={**os.environ, **hardware.environment()},
            text=True,
            check=True,
        )
        slow, fast = json.loads(run.stdout)
        ratios.append(slow / fast)
        print(f"process {seed}: default {slow:.3f} ms, tuned {fast:.3f} ms, ratio {slow / fast:.3f}", flush=True)
    figures = preset.baselines["default"]
    low, high = figures["speedup_interval"]
    ratio = spread(ratios).value
    holds = low <= ratio <= high
    print(
        f"ratio {ratio:.3f}; the preset says {figures['speedup']:.3f} ({low:.3f} to {high:.3f}): "
        f"{'within' if holds else 'OUTSIDE'} its interval"
    )
    return holds


def measured_preset(task: Task, results: Path) -> Preset:
    for preset in presets.read(preset_file(task, results)):
        if preset.measured and presets.problem_of(task.kernel, preset) == task.problem:
            return preset
    raise SystemExit(f"{results} has no measured preset for {task.problem}: tune it with --engine device first")


def time_alternately(job: dict[str, Any]) -> None:
    """In a process of its own: the median time of each config, in turn, each once it is warm; milliseconds."""
    import jax

    kernel = get_kernel(job["kernel"])
    problem = kernel.problem_type.from_dict(job["problem"])
    inputs = [jax.block_until_ready(kernel.make_inputs(problem, 7_000 + 10 * job["seed"] + i)) for i in range(3)]
    functions = [jax.jit(kernel.bind(problem, config)) for config in job["configs"]]
    for function in functions:
        for arrays in inputs:
            jax.block_until_ready(function(*arrays))
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(ROUNDS):
        for place, function in enumerate(functions):
            jax.block_until_ready(function(*inputs[(turn + 1) % len(inputs)]))  # what the other left is not timed
            started = time.perf_counter()
            jax.block_until_ready(function(*inputs[turn % len(inputs)]))
            times[place].append(1e3 * (time.perf_counter() - started))
    print(json.dumps([statistics.median(one) for one in times]))


def exhaustive(options: argparse.Namespace) -> bool:
    task = task_of(options)
    space = list(task.kernel.space(task.problem, task.chip))
    with open_engine("device", task, jobs=1, timeout_s=TIMEOUT_S) as engine:
        found = {}
        for number, config in enumerate(space):
            outcome = engine.evaluate(config).result()
            if outcome.ok:
                found[format_config(config)] = (outcome.time_ms, config)
            if number % 10 == 9:
                print(f"{number + 1} of {len(space)} configs measured", flush=True)
    leaders = [config for _, config in sorted(found.values(), key=lambda entry: entry[0])[:LEADERS]]
    winners = {}
    for seed in map(int, options.seeds.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            settings = SearchSettings(trials=options.trials, seed=seed, results=Path(folder))
            with open_engine("device", task, jobs=1, timeout_s=TIMEOUT_S) as engine:
                result = tune(task, engine, settings)
        if result.best is None:
            print(f"seed {seed}: nothing was found")
            return False
        winners[seed] = dict(result.best.config)
        print(f"seed {seed}: {format_config(winners[seed])}", flush=True)
    times = raced(task, [*leaders, *winners.values()])
    best = min(times.values())
    table = render.table("", "config", "time", "over the best", left=2)
    labels = {format_config(config): "of all" for config in leaders}
    for seed, config in winners.items():
        labels[format_config(config)] = f"{labels.get(format_config(config), '')} seed {seed}".strip()
    for text, time_ms in sorted(times.items(), key=lambda entry: entry[1]):
        table.add_row(labels[text], text.replace(",", ", "), render.milliseconds(time_ms), f"{time_ms / best:.3f}")
    render.console().print(table)
    print(f"{len(space)} configs in the space, {options.trials} trials a seed")
    return all(times[format_config(config)] <= NEAR * best for config in winners.values())


def raced(task: Task, configs: list[Config]) -> dict[str, float]:
    """The time of each config, from races in fresh processes."""
    distinct = {format_config(config): config for config in configs}
    with open_engine("device", task, jobs=1, timeout_s=TIMEOUT_S) as engine:
        races = [
            engine.race(list(distinct.values()), seconds=10, seed=9_000 + number, fresh=True)
            for number in range(CONFIRMATIONS)
        ]
        samples = [race.result().samples for race in races]
    return {
        text: spread([statistics.median(race[place]) for race in samples]).value for place, text in enumerate(distinct)
    }


def equal(options: argparse.Namespace) -> bool:
    kernel = Twins()
    task = Task(kernel, kernel.parse_problem(options.problem or "q_len=512,kv_len=512"), choose("device", None)[1])
    one = kernel.baselines(task.problem, task.chip)["default"]
    other = {**one, "twin": "b"}
    none = 0
    with open_engine("device", task, jobs=1, timeout_s=TIMEOUT_S) as engine:
        known, record = engine.evaluate(one).result(), TrialRecord(1, other, engine.evaluate(other).result())
        for run in range(options.runs):
            final = decide(engine, [record], lambda record: True, lambda: {"default": (one, known)}, Future.result)
            if final is None:
                print("a race failed")
                return False
            ratio = final.ratios["default"]
            none += not final.gains_over("default")
            print(f"run {run}: {ratio.value:.4f} ({ratio.low:.4f} to {ratio.high:.4f})", flush=True)
    print(f"no gain in {none} of {options.runs} runs, each over {CONFIRMATIONS} fresh processes")
    return none >= 0.95 * options.runs


class Stopwatch(Observer):
    """Adds up what the engine says its trials took."""

    def __init__(self) -> None:
        self.begun = self.ended = time.monotonic()
        self.inside_s = 0.0
        self.trials = 0

    def started(self, study: str, known: list[TrialRecord], trials: int) -> None:
        self.begun = time.monotonic()

    def trial(self, record: TrialRecord) -> None:
        if self.trials == 0:  # The first one waits for the worker to start.
            self.begun = time.monotonic()
        else:
            self.inside_s += (record.outcome.compile_s or 0.0) + (record.outcome.run_s or 0.0)
        self.trials += 1
        self.ended = time.monotonic()


def overhead(options: argparse.Namespace) -> bool:
    task = task_of(options)
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder, open_engine("device", task, jobs=1, timeout_s=TIMEOUT_S) as engine:
        result = tune(task, engine, SearchSettings(trials=options.trials, results=Path(folder)), watch)
    reference = result.baselines[REFERENCE]  # Measured after the first trial, between the others.
    total = watch.ended - watch.begun
    inside = watch.inside_s + (reference.compile_s + reference.run_s if reference is not None else 0.0)
    print(
        f"{watch.trials - 1} trials in {total:.1f} s, {inside:.1f} s of it compiling and running (the reference among "
        f"them): {1e3 * (total - inside) / (watch.trials - 1):.0f} ms a trial, {render.percent(1 - inside / total)}"
    )
    return inside >= 0.95 * total


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        time_alternately(json.loads(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1:]))
