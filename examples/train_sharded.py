"""Trains a tiny byte-level model on this repository's own text, by the tuned train step.

    python examples/train_sharded.py [--steps 50] [--problem tiny-cpu]

It runs anywhere: a CPU passes for eight devices, over which the model is sharded as on a TPU. What is tuned (mesh,
remat, micro-batches) comes from the presets; tune for your own devices with

    python -m autotune train_step --engine device --problem tiny-cpu
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # heeded by a CPU alone

import jax
import numpy as np

from autotune.kernel import get_kernel
from kernels.train_step import initial_state, plan, train_step

ROOT = Path(__file__).resolve().parents[1]
TEXT = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


def batches(problem, seed: int):
    """Random pieces of the text, ``[batch, seq_len + 1]`` bytes."""
    text = np.frombuffer(b"\n".join(path.read_bytes() for path in TEXT), np.uint8).astype(np.int32)
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - problem.seq_len - 1, problem.batch)
        yield np.stack([text[start : start + problem.seq_len + 1] for start in starts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--problem", default="tiny-cpu", help="on a TPU: tiny,topology=v5e:2x2 for four v5e chips")
    options = parser.parse_args()
    problem, steps = get_kernel("train_step").parse_problem(options.problem), options.steps
    if problem.seq_len is None:
        parser.error(f"{problem.model} takes images, and this trains on text: give --problem tiny-cpu or tiny")
    how = plan(problem)
    print("mesh", dict(how.mesh.shape))
    step, _ = train_step(problem, how.config, jax.devices())
    state = initial_state(problem)
    state = jax.device_put(state, how.shardings(state))
    for number, tokens in zip(range(1, steps + 1), batches(problem, seed=0), strict=False):
        state, loss = step(state, jax.device_put(tokens, how.batch))
        if number == 1 or number % 10 == 0:
            print(f"step {number}: loss {float(loss):.3f}", flush=True)


if __name__ == "__main__":
    main()
