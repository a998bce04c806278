"""What became of one config: a typed status, the time and how it is made up, never a sentinel number."""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
"""One point of a space: parameter name to value (int, bool or str)."""


class Status(enum.StrEnum):
    """How a trial ended."""

    OK = "ok"
    INVALID = "invalid"  # breaks a stated constraint: refused before any compile
    LOWERING_ERROR = "lowering_error"  # Pallas or Mosaic cannot lower it
    VMEM_OOM = "vmem_oom"
    HBM_OOM = "hbm_oom"
    COMPILE_ERROR = "compile_error"
    RUNTIME_ERROR = "runtime_error"
    WRONG_RESULT = "wrong_result"
    TIMEOUT = "timeout"
    CRASH = "crash"  # the worker process died

    @property
    def transient(self) -> bool:
        """Whether it may have been the machine's doing (memory short, disk full) and not the config's."""
        return self in (Status.TIMEOUT, Status.CRASH)


class Source(enum.StrEnum):
    """Where a time came from, best first. Only `DEVICE` is a measurement."""

    DEVICE = "device"  # timed on an accelerator
    SCHEDULE = "schedule"  # the compiler's final bundles, simulated with their DMAs
    HLO = "hlo"  # XLA's estimated cycles per fusion
    ANALYTIC = "analytic"  # arithmetic on the problem and the config; nothing was compiled


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The typed result of evaluating one config.

    Attributes:
        status: How it ended.
        time_ms: Predicted or measured time of one call, in milliseconds; None unless `status` is ok.
        compute_ms: Time the compute units would take alone.
        memory_ms: Time the HBM traffic would take alone. Of a program on many devices, this and `compute_ms` are what
            the ops take that the one or the other holds up.
        collective_ms: Time it waits for other devices; None of a program on one.
        bound: What holds the time up: "compute", "memory", "overhead", or of a program on many devices "collectives"
            or "host".
        source: Where the time came from.
        vmem_bytes: Scoped VMEM the compiler needed or was asked for, where it says so.
        hbm_bytes: Bytes moved to and from HBM in one call.
        compile_s: Seconds the compile took.
        run_s: Seconds of running it on the device, warm-up and all repeats.
        interval_ms: Where the time lies, as measured: with 95 % confidence in one process, 99 % over several; None for
            a prediction.
        repeats: Samples that the time is the median of; from several processes, all of theirs.
        timer: How it was measured: "profiler" (device time) or "wall clock".
        first_call_ms: The first call after the compile, end to end.
        latency_ms: A later call, end to end: what the caller waits.
        peak_bytes: Device memory that the program takes, by its compiler's account; also where there is not as much.
        over_bytes: By how much that is too much, where the compiler refused it.
        process_peak_bytes: What the device counted as its process's peak by then, where it counts: of whichever program
            took most so far.
        predicted_ms: What had been predicted for it before it was measured.
        predicted_by: The prediction's source.
        message: The compiler's own text where it refused, or a note on the source.
        provenance: Engine, target and versions.
    """

    status: Status
    time_ms: float | None = None
    compute_ms: float | None = None
    memory_ms: float | None = None
    collective_ms: float | None = None
    bound: str | None = None
    source: Source | None = None
    vmem_bytes: int | None = None
    hbm_bytes: int | None = None
    compile_s: float | None = None
    run_s: float | None = None
    interval_ms: tuple[float, float] | None = None
    repeats: int | None = None
    timer: str | None = None
    first_call_ms: float | None = None
    latency_ms: float | None = None
    peak_bytes: int | None = None
    over_bytes: int | None = None
    process_peak_bytes: int | None = None
    predicted_ms: float | None = None
    predicted_by: Source | None = None
    message: str = ""
    provenance: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.time_ms is not None) != (self.status is Status.OK):
            raise ValueError(f"an outcome has a time exactly when it is ok: {self.status}, {self.time_ms}")

    @property
    def ok(self) -> bool:
        return self.status is Status.OK

    @property
    def measured(self) -> bool:
        """True only for a time taken on a device."""
        return self.source is Source.DEVICE

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; fields that are None are left out."""
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if value is not None and value != {}}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Outcome:
        """The inverse of `to_dict`; what only a newer version knows is ignored.

        Raises:
            ValueError: A field is malformed, or there is no status.
        """
        if not isinstance(fields, Mapping) or "status" not in fields:
            raise ValueError("an outcome must be an object with a status")
        known = {field.name: fields[field.name] for field in dataclasses.fields(cls) if field.name in fields}
        for name in _FIGURES:
            if known.get(name) is not None and not is_figure(known[name]):
                raise ValueError(f"{name} must be a number, not {known[name]!r}")
        known["status"] = Status(known["status"])
        for name in ("source", "predicted_by"):
            if known.get(name):
                known[name] = Source(known[name])
        if (interval := known.get("interval_ms")) is not None:
            if not is_interval(interval):
                raise ValueError(f"interval_ms must be two numbers, the smaller first, not {interval!r}")
            known["interval_ms"] = tuple(interval)
        return cls(**known)


_FIGURES = (
    *("time_ms", "compute_ms", "memory_ms", "collective_ms", "vmem_bytes", "hbm_bytes", "compile_s", "run_s"),
    *("repeats", "first_call_ms", "latency_ms", "peak_bytes", "over_bytes", "process_peak_bytes", "predicted_ms"),
)


def is_figure(value: object) -> bool:
    """Whether `value` is a finite number that fits a float: what JSON may hold besides breaks arithmetic later."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_interval(value: object) -> bool:
    """Whether `value` is two figures, the smaller first."""
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_figure, value)) and value[0] <= value[1]
