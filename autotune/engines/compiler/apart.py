"""Pallas calls of a large program, compiled apart from it so that their schedules can be played.

libtpu packs a program twice as soon as it is asked for any of its listings. So a worker for large programs asks for
none, and has a worker of its own, which does, for the kernels in them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from autotune.chips import Chip, get_chip
from autotune.engines._pool import JobError, JobTimeout, WorkerDied, WorkerPool
from autotune.engines.compiler.schedule import UnresolvedError, play_op, read_dumps
from autotune.engines.compiler.schedule.steering import ELEMENTS
from autotune.engines.compiler.support import worker_environment
from autotune.engines.compiler.timeline import PALLAS, Array, Instruction, OpTime, parse
from autotune.engines.compiler.toolchain import compile_program, target_device
from autotune.outcome import Outcome

LIMIT_S = 120.0  # for one kernel; most take one or two
_DTYPES = ELEMENTS | {
    "pred": "bool", "s4": "int4", "u4": "uint4", "s64": "int64", "u64": "uint64", "f64": "float64",
    "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
}  # fmt: skip
_known: dict[str, OpTime | None] = {}


def kernel_time(call: Instruction, operands: Sequence[Array], chip: Chip) -> OpTime | None:
    """What a Pallas call takes on one device; None where its schedule cannot be followed.

    Args:
        call: As the optimized HLO has it, its kernel inside.
        operands: What it is given.
        chip: The target.
    """
    config = json.loads(call.attribute("backend_config") or "{}")
    arguments = {
        "config": {name: config[name] for name in ("custom_call_config", "scoped_memory_configs") if name in config},
        "operands": [(array.dtype, array.shape) for array in operands],
        "results": [(array.dtype, array.shape) for array in call.arrays],
        "target": chip.name,
    }
    key = json.dumps(arguments)
    if key not in _known:
        try:
            job = _worker().submit(f"{__name__}:play_call", arguments, timeout_s=LIMIT_S)
            _known[key] = OpTime(*job.result())
        except WorkerDied:
            return None  # Killed from outside, perhaps: the next program that has it asks again.
        except (JobError, JobTimeout):
            _known[key] = None
    return _known[key]


@functools.cache
def _worker() -> WorkerPool:
    """It ends with this process."""
    return WorkerPool(
        1, warm_up="autotune.engines.compiler.toolchain:warm_up", environment=worker_environment(listings=True)
    )


def play_call(
    config: Mapping[str, Any],
    operands: Sequence[tuple[str, Sequence[int]]],
    results: Sequence[tuple[str, Sequence[int]]],
    target: str,
) -> tuple[float, float, float]:
    """In that worker: compiles a call alone, and plays it.

    Args:
        config: Its backend's, the kernel among it.
        operands: HLO dtype and shape of each.
        results: Likewise.
        target: The chip's name.

    Returns:
        Of one device, microseconds: all of it, without waits for transfers, and its HBM transfers back to back.

    Raises:
        UnresolvedError: It does not compile so, or its schedule cannot be followed.
    """
    chip = get_chip(target)
    sharding = jax.sharding.SingleDeviceSharding(target_device(chip))
    shapes = [jax.ShapeDtypeStruct(shape, _DTYPES[dtype]) for dtype, shape in results]
    call = jax.ffi.ffi_call(PALLAS, shapes, custom_call_api_version=1, legacy_backend_config=json.dumps(config))
    specs = [jax.ShapeDtypeStruct(shape, _DTYPES[dtype], sharding=sharding) for dtype, shape in operands]
    program = compile_program(jax.jit(call), specs)
    if isinstance(program, Outcome):
        raise UnresolvedError(program.message)
    (name,) = [one.name for one in parse(program.compiled.as_text()).entry if one.target == PALLAS]
    us = 1 / (chip.clock_ghz * 1e3)
    time, compute, memory = play_op(read_dumps(program.dumps), name, chip)
    return time * us, compute * us, memory * us
