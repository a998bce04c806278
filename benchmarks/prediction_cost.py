"""What a prediction costs beside the plain compile of the same config: seconds each, and their ratio.

    python benchmarks/prediction_cost.py matmul v5e --configs 12
    python benchmarks/prediction_cost.py attention v6e

Two processes take turns on configs spread over the kernel's space: one only lowers and compiles, the other
compiles with the dumps that a prediction needs, reads them and plays the schedule. What comes after the
compile is timed apart, and each config is predicted twice to show that it gives the same figure.
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
from typing import Any

from autotune.chips import get_chip
from autotune.engines.compiler.support import worker_environment
from autotune.kernel import get_kernel


def child(kernel_name: str, problem_text: str, target: str, predicting: bool) -> None:
    """Answers each config on standard input with its seconds, its time in ms and its status."""
    import jax

    from autotune.engines.compiler import toolchain

    kernel, chip = get_kernel(kernel_name), get_chip(target)
    problem = kernel.parse_problem(problem_text)
    sharding = jax.sharding.SingleDeviceSharding(toolchain.target_device(chip))
    specs = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for s in kernel.arguments(problem)]
    toolchain.warm_up()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libtpu may print
    for line in sys.stdin:
        function = kernel.bind(problem, json.loads(line))
        started = time.monotonic()
        answer: dict[str, Any] = {}
        if predicting:
            outcome = toolchain.compile_for(
                function, kernel.arguments(problem), chip, roofline_ms=0.0, analytic_ms=float("inf")
            )
            source = outcome.source.value if outcome.source else None
            answer = {"time_ms": outcome.time_ms, "status": source, "compile_s": outcome.compile_s}
        else:
            try:
                jax.jit(function).lower(*specs).compile()
                answer["status"] = "ok"
            except Exception as error:
                answer["status"] = type(error).__name__
        answers.write(json.dumps({**answer, "seconds": time.monotonic() - started}) + "\n")
        answers.flush()


class Child:
    """One of the two processes."""

    def __init__(self, arguments: list[str], *, predicting: bool) -> None:
        environment = {**os.environ, **worker_environment()}
        if not predicting:
            environment["LIBTPU_INIT_ARGS"] = os.environ.get("LIBTPU_INIT_ARGS", "")
        self._folder = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments, "--child", "predict" if predicting else "compile"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            cwd=self._folder.name,
        )

    def ask(self, config: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(config) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process that compiles died with {self._process.wait()} on {config}")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel")
    parser.add_argument("target", nargs="?", default="v5e")
    parser.add_argument("--problem", default="")
    parser.add_argument("--configs", type=int, default=12, help="how many, evenly spread over the ranked space")
    parser.add_argument("--child", choices=("compile", "predict"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.kernel, arguments.problem, arguments.target, arguments.child == "predict")
        return 0

    kernel, chip = get_kernel(arguments.kernel), get_chip(arguments.target)
    problem = kernel.parse_problem(arguments.problem)
    ranked = sorted(kernel.space(problem, chip), key=lambda config: kernel.estimate_ms(problem, config, chip))
    chosen = ranked[:: max(1, len(ranked) // (2 * arguments.configs))][: arguments.configs]  # the faster half
    passed = [arguments.kernel, arguments.target, "--problem", arguments.problem]
    plain, predicting = Child(passed, predicting=False), Child(passed, predicting=True)
    ratios, differing, left_out = [], 0, 0
    print(f"{arguments.kernel} {problem} on {chip.name}")
    print(f"{'compile s':>10} {'predict s':>10} {'play s':>7} {'ratio':>6} {'predicted ms':>13}  config")
    for number, config in enumerate(chosen):
        pair = {}
        for one in (plain, predicting) if number % 2 else (predicting, plain):
            pair[one] = one.ask(config)
        if pair[plain]["status"] != "ok" or pair[predicting]["status"] != "schedule":
            left_out += 1  # a refusal costs both the same
            continue
        play_s = pair[predicting]["seconds"] - pair[predicting]["compile_s"]
        again = predicting.ask(config)
        differing += again["time_ms"] != pair[predicting]["time_ms"]
        ratios.append(pair[predicting]["seconds"] / pair[plain]["seconds"])
        text = ",".join(f"{name}={value}" for name, value in config.items())
        print(
            f"{pair[plain]['seconds']:10.2f} {pair[predicting]['seconds']:10.2f} {play_s:7.2f} {ratios[-1]:6.2f} "
            f"{pair[predicting]['time_ms']:13.4f}  {text}",
            flush=True,
        )
    plain.close()
    predicting.close()
    print(
        f"median ratio {statistics.median(ratios):.2f} over {len(ratios)} configs; {differing} differed when repeated"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
