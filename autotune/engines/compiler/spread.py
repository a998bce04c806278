"""Runs inside a worker: compiles a program for all devices of a topology and predicts its time op by op.

Without the listings that a kernel's prediction reads: they would double the compile's time, which is all of a trial's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from autotune.chips import Chip
from autotune.engines._memory import program_bytes
from autotune.engines._refusals import text_of
from autotune.engines.compiler.apart import kernel_time
from autotune.engines.compiler.schedule import UnresolvedError
from autotune.engines.compiler.timeline import Interconnect, OpTimes, Timeline, parse, walk
from autotune.engines.compiler.toolchain import POSSIBLE, Program, compile_program, topology_devices
from autotune.kernel import Compilable, Kernel
from autotune.outcome import Config, Outcome, Source, Status


def compile_spread(
    kernel: Kernel,
    problem: Any,
    config: Config | None,
    chip: Chip,
    topology: str,
    *,
    roofline_ms: float,
    analytic_ms: float | None,
) -> Outcome:
    """The outcome of a kernel with a topology.

    Args:
        config: None is the reference.
        roofline_ms: The least time one of the devices could take.
        analytic_ms: The time to give, with source `analytic`, where the program compiles but its schedule cannot be
            followed; None where there is none.
    """
    try:
        devices = topology_devices(chip, topology)
    except Exception as error:
        return Outcome(Status.COMPILE_ERROR, message=f"the compiler has no topology {topology}: {text_of(error)[:300]}")
    try:
        form = kernel.compilable(problem, config, devices)
    except Exception as error:  # Whatever building it raises is this config's own fault.
        return Outcome(Status.LOWERING_ERROR, message=text_of(error))
    program = compile_program(form.function, form.arguments, form.options)
    if isinstance(program, Outcome):
        return program
    peak = program_bytes(program.compiled, chip.platform)
    try:
        timeline = _timeline(program, chip, _in_order(form))
        if timeline.total_us < POSSIBLE * roofline_ms * 1e3:
            raise UnresolvedError(f"the schedule seems to take {timeline.total_us / 1e3:.4g} ms, below the roofline")
        return _predicted(timeline, program.seconds, peak)
    except UnresolvedError as error:
        reason = str(error)
    except Exception as error:  # The reader's own failure is not the config's: another libtpu may write otherwise.
        reason = f"the schedule cannot be read ({text_of(error)[:200]})"
    if analytic_ms is None:
        message = f"no time can be given: {reason}"
        return Outcome(Status.RUNTIME_ERROR, compile_s=program.seconds, peak_bytes=peak, message=message)
    return Outcome(
        Status.OK,
        time_ms=analytic_ms,
        source=Source.ANALYTIC,
        compile_s=program.seconds,
        peak_bytes=peak,
        message=f"an analytic figure, because {reason}",
    )


def _timeline(program: Program, chip: Chip, devices: Sequence[Any]) -> Timeline:
    module = parse(program.compiled.as_text())
    ops = OpTimes(module, chip, functools.partial(kernel_time, chip=chip))
    links = Interconnect(chip, [tuple(device.coords) for device in devices])
    return walk(module, ops, links)


def _in_order(form: Compilable) -> list[Any]:
    """The program's devices, by their partition numbers: as its arguments' mesh has them."""
    import jax

    first = next(leaf for leaf in jax.tree.leaves(form.arguments) if leaf.shape)
    return list(first.sharding.mesh.devices.flat)


def _predicted(timeline: Timeline, compile_s: float, peak: int | None) -> Outcome:
    parts = dict(timeline.parts_us)
    parts["memory"] = parts.get("memory", 0.0) + parts.pop("copies", 0.0)
    notes = [f"{1e-3 * took:.4g} ms of it by {how}" for how, took in sorted(timeline.estimated_us.items())]
    notes += [f"{1e-3 * parts['host']:.4g} ms of it waits for the host"] if parts.get("host") else []
    return Outcome(
        Status.OK,
        time_ms=timeline.total_us / 1e3,
        compute_ms=parts.get("compute", 0.0) / 1e3,
        memory_ms=parts["memory"] / 1e3,
        collective_ms=parts.get("collectives", 0.0) / 1e3,
        bound=max(parts, key=lambda name: parts[name]),
        source=Source.HLO,
        compile_s=compile_s,
        peak_bytes=peak,
        message="; ".join(notes),
    )
