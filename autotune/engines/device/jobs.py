"""What the worker that owns the device is asked to do: JSON in, JSON out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from autotune.engines._jobs import open_kernel
from autotune.engines._refusals import classify_run_error, text_of
from autotune.engines.device import timing
from autotune.engines.device.check import check_on_device
from autotune.engines.device.programs import Program, load
from autotune.engines.device.trace import NoDeviceEvents
from autotune.outcome import Config, Outcome, Source, Status


def describe() -> dict[str, Any]:
    """Opens the device, and says what it is."""
    with contextlib.suppress(OSError):  # Where memory runs out, the system ends this process and not the tuner.
        Path("/proc/self/oom_score_adj").write_text("1000")
    device = jax.local_devices()[0]
    return {"platform": device.platform, "device_kind": device.device_kind, "devices": jax.device_count()}


def join(coordinator: str, processes: int, process_id: int) -> dict[str, Any]:
    """Becomes part of one program with the other processes' workers, and opens the devices.

    Args:
        coordinator: ``HOST:PORT`` where the workers meet; process 0 listens there.
        processes: How many there are.
        process_id: Which one this is.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # of other devices nothing
    jax.distributed.initialize(coordinator, processes, process_id, initialization_timeout=60)
    return describe()


@functools.cache
def _clock() -> timing.Clock:
    return timing.choose_clock()


def compile_program(kernel: str, problem: Mapping[str, Any], config: Config | None, seed: int) -> dict[str, Any]:
    """Compiles the kernel with `config`, or its reference, and keeps it here.

    Returns:
        Which program it is, the same in all processes of a pod; where it does not compile, the outcome.
    """
    loaded = load(*open_kernel(kernel, problem), config, seed)
    return loaded.to_dict() if isinstance(loaded, Outcome) else {"program": loaded.digest}


def run_program(kernel: str, problem: Mapping[str, Any], config: Config | None, seed: int) -> dict[str, Any]:
    """Times what was compiled; the outcome."""
    program = _loaded(kernel, problem, config, seed)
    started = time.monotonic()
    try:
        outcome = Outcome(Status.OK, source=Source.DEVICE, **timing.measure(program, _clock()))
    except Exception as error:
        outcome = _failure(error)
    else:
        program.inputs.restore()  # Not after a failure: this process is then given up.
    return dataclasses.replace(
        outcome,
        compile_s=program.compile_s,
        peak_bytes=program.peak_bytes,
        process_peak_bytes=(jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        run_s=time.monotonic() - started,
    ).to_dict()


def race(
    kernel: str, problem: Mapping[str, Any], configs: Sequence[Config | None], seed: int, seconds: float
) -> dict[str, Any]:
    """Times what was compiled, all in turn; the samples of each, or the outcome that ended it."""
    programs = [_loaded(kernel, problem, config, seed) for config in configs]
    try:
        return {"samples": timing.race(programs, _clock(), seconds), "timer": _clock().name}
    except Exception as error:
        return _failure(error).to_dict()


def check(kernel: str, problem: Mapping[str, Any], config: Config, seed: int) -> dict[str, Any]:
    """Compares the kernel with its reference here, on inputs of full size."""
    return check_on_device(*open_kernel(kernel, problem), config, seed).to_dict()


def _failure(error: Exception) -> Outcome:
    """What a run came to; a profiler that lost its events says nothing of the config, which may be tried again."""
    if isinstance(error, NoDeviceEvents):
        return Outcome(Status.CRASH, message=text_of(error))
    return classify_run_error(text_of(error))


def _loaded(kernel: str, problem: Mapping[str, Any], config: Config | None, seed: int) -> Program:
    loaded = load(*open_kernel(kernel, problem), config, seed)
    if isinstance(loaded, Outcome):  # it had been compiled a moment ago, in this process
        raise RuntimeError(loaded.message)
    return loaded
