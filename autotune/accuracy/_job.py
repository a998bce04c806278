"""The job that a worker runs for one row: JSON in, JSON out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.chips import get_chip
from autotune.engines._worker import resolve

WORKLOADS = "autotune.accuracy.workloads"


def predict_row(workload: str, row: Mapping[str, Any], target: str) -> dict[str, Any]:
    """The row's program, compiled for `target` and predicted: an `Outcome` as a dict."""
    import jax

    from autotune.engines.compiler.toolchain import compile_for, target_device

    chip = get_chip(target)
    program = resolve(f"{WORKLOADS}.{workload}")(row, chip)
    # Library kernels ask the current mesh which chip they run on.
    mesh = jax.sharding.Mesh([target_device(chip)], ("device",)).abstract_mesh
    with jax.sharding.use_abstract_mesh(mesh):
        # No arithmetic stands in for a schedule that cannot be played: such a row counts as not predicted.
        return compile_for(program.function, program.arguments, chip, roofline_ms=0.0, analytic_ms=None).to_dict()
