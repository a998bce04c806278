"""Runs inside a worker: compiles a function for a target and reads what the compiler says of it."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from autotune.chips import DEFAULT_TARGET, Chip, get_chip
from autotune.engines._refusals import classify_compile_error, text_of
from autotune.engines.compiler.prefetch import steered_calls
from autotune.engines.compiler.schedule import Timing, UnresolvedError, estimated_cycles, play_module, read_dumps
from autotune.engines.compiler.schedule.core import SPARSE_CORE_EFFICIENCY
from autotune.engines.compiler.support import DUMP_FOLDER
from autotune.engines.compiler.timeline import awaited_bytes, parse
from autotune.kernel import ArraySpec
from autotune.outcome import Outcome, Source, Status

_OVERHEAD_SHARE = 1.25  # beyond both bounds by this much, waits and step overheads hold the time up
POSSIBLE = 0.98  # of the roofline: chip figures and schedules are no more exact than that
_FOREIGN_NOTE = "waits {} times for other cores (SparseCores), which are not played: their copies count by bytes"


def warm_up() -> dict[str, str]:
    """Loads the compiler and compiles a trifle, so that a broken environment shows before any trial."""
    device = target_device(get_chip(DEFAULT_TARGET))
    spec = jax.ShapeDtypeStruct((8, 128), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
    jax.jit(lambda x: x + 1).lower(spec).compile()
    return {"device_kind": device.device_kind}


def topology_devices(chip: Chip, topology: str) -> list[jax.Device]:
    """The devices of a topology that exists only in the compiler."""
    options = {"chip_config_name": chip.chip_config} if chip.chip_config else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices


def target_device(chip: Chip) -> jax.Device:
    """One device of its smallest topology."""
    return topology_devices(chip, chip.topology)[0]


@dataclasses.dataclass(frozen=True)
class Program:
    """What was compiled.

    Attributes:
        traced: The jaxpr it came from.
        compiled: The executable.
        seconds: All of it took.
        dumps: The folder of the compiler's listings.
    """

    traced: Any
    compiled: Any
    seconds: float
    dumps: Path


def compile_program(jitted: Any, specs: Sequence[Any], options: Mapping[str, Any] | None = None) -> Program | Outcome:
    """Compiles for the devices that the arguments' shardings name; the refusal where it does not work."""
    dumps = Path(DUMP_FOLDER)
    shutil.rmtree(dumps, ignore_errors=True)
    dumps.mkdir()
    started = time.monotonic()
    try:
        traced = jitted.trace(*specs)
        lowered = traced.lower()
    except Exception as error:  # whatever tracing raises is this config's own fault
        return Outcome(Status.LOWERING_ERROR, message=text_of(error), compile_s=time.monotonic() - started)
    try:
        compiled = lowered.compile(compiler_options=dict(options or {}))
    except Exception as error:
        seconds = time.monotonic() - started
        return dataclasses.replace(classify_compile_error(text_of(error)), compile_s=seconds)
    return Program(traced, compiled, time.monotonic() - started, dumps)


def compile_for(
    function: Callable[..., Any],
    arguments: Sequence[ArraySpec],
    chip: Chip,
    *,
    roofline_ms: float,
    analytic_ms: float | None,
    options: Mapping[str, Any] | None = None,
) -> Outcome:
    """Compiles `function` for `chip` and predicts one call's time from its schedule.

    Args:
        roofline_ms: The least time the chip could take; a schedule that seems to beat it was misread.
        analytic_ms: The time to give, with source `analytic`, where the program compiles but its schedule
            cannot be followed; None where only XLA's own estimate of its fusions may be given then.
        options: Of XLA's compiler.
    """
    device = target_device(chip)
    sharding = jax.sharding.SingleDeviceSharding(device)
    specs = [jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding) for spec in arguments]
    # A library's code may ask which TPU it is traced for (`pltpu.get_tpu_info`).
    with jax.sharding.use_abstract_mesh(jax.sharding.Mesh([device], ("device",)).abstract_mesh):
        program = compile_program(jax.jit(function), specs, options)
    if isinstance(program, Outcome):
        return program
    seconds = program.seconds
    try:
        calls = steered_calls(program.traced.jaxpr, [spec.example for spec in arguments])
        timing = play_module(read_dumps(program.dumps), chip, calls)
        if timing.time_ms < POSSIBLE * roofline_ms:
            raise UnresolvedError(f"the schedule seems to take {timing.time_ms:.4g} ms, below the roofline")
        return _predicted(_with_awaited(timing, program.compiled.as_text(), chip), seconds)
    except UnresolvedError as error:
        reason = str(error)
    except Exception as error:  # the player's own failure is not the config's: another libtpu may list otherwise
        reason = f"the schedule cannot be read ({text_of(error)[:200]})"
    if analytic_ms is not None:
        note, source = f"an analytic figure, because {reason}", Source.ANALYTIC
        return Outcome(Status.OK, time_ms=analytic_ms, source=source, compile_s=seconds, message=note)
    return _estimated_by_xla(program.compiled.as_text(), chip, roofline_ms, seconds, reason)


def _with_awaited(timing: Timing, hlo: str, chip: Chip) -> Timing:
    """The schedule's time, and that of the copies by SparseCores that it waits for, at their rate."""
    if not timing.foreign_waits or not (nbytes := awaited_bytes(parse(hlo))):
        return timing
    more_ms = nbytes / (SPARSE_CORE_EFFICIENCY * chip.hbm_gbps * 1e6)
    return dataclasses.replace(
        timing,
        time_ms=timing.time_ms + more_ms,
        memory_ms=timing.memory_ms + more_ms,
        hbm_bytes=timing.hbm_bytes + nbytes,
    )


def _estimated_by_xla(hlo: str, chip: Chip, roofline_ms: float, compile_s: float, reason: str) -> Outcome:
    cycles = estimated_cycles(hlo)
    time_ms = cycles / (chip.clock_ghz * 1e6) if cycles else 0.0
    if time_ms < roofline_ms:
        return Outcome(Status.RUNTIME_ERROR, compile_s=compile_s, message=f"no time can be given: {reason}")
    note = f"XLA's estimate of its fusions, without their HBM traffic, because {reason}"
    return Outcome(Status.OK, time_ms=time_ms, source=Source.HLO, compile_s=compile_s, message=note)


def _predicted(timing: Timing, compile_s: float) -> Outcome:
    bound = "compute" if timing.compute_ms >= timing.memory_ms else "memory"
    if timing.time_ms > _OVERHEAD_SHARE * max(timing.compute_ms, timing.memory_ms):
        bound = "overhead"
    return Outcome(
        Status.OK,
        time_ms=timing.time_ms,
        compute_ms=timing.compute_ms,
        memory_ms=timing.memory_ms,
        bound=bound,
        source=Source.SCHEDULE,
        hbm_bytes=timing.hbm_bytes,
        compile_s=compile_s,
        message=_FOREIGN_NOTE.format(timing.foreign_waits) if timing.foreign_waits else "",
    )
