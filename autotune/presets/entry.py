"""One preset: what was tuned, how fast it is said to be, and on what evidence."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from autotune.outcome import Source

PREDICTED, MEASURED = "predicted", "measured"
_REQUIRED = ("kernel", "device_kind", "problem", "config", "time_ms")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A tuned config for one problem on one device kind.

    Attributes:
        kernel: The kernel's name.
        device_kind: As JAX names it (``TPU v5 lite``).
        problem: The problem's fields.
        config: The tuned config.
        time_ms: Time of one call, in milliseconds.
        source: "predicted" or "measured".
        method: Where the time came from, finer: a `Source` value.
        engine: Which engine gave it.
        baselines: Name to ``{"time_ms": …}``; ``{"status": …}`` where the baseline did not work.
        compute_ms: Time the compute units would take alone.
        memory_ms: Time the HBM traffic would take alone.
        roofline_ms: The least time the chip could take.
        bound: What holds the time up.
        validation: The verdict's figures.
        versions: Of jax, jaxlib, libtpu and the kernel.
        date: When it was tuned, ISO 8601, UTC.
        study: The study it came from.
    """

    kernel: str
    device_kind: str
    problem: Mapping[str, Any]
    config: Mapping[str, Any]
    time_ms: float
    source: str = PREDICTED
    method: str | None = None
    engine: str | None = None
    baselines: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    compute_ms: float | None = None
    memory_ms: float | None = None
    roofline_ms: float | None = None
    bound: str | None = None
    validation: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    date: str | None = None
    study: str | None = None

    @property
    def validated(self) -> bool:
        return self.validation is not None and self.validation.get("status") == "ok"

    @property
    def measured(self) -> bool:
        return self.source == MEASURED

    @property
    def rank(self) -> int:
        """How good the evidence is: a measurement above a compiled prediction above arithmetic."""
        return 2 if self.measured else int(self.method != Source.ANALYTIC.value)

    def beats(self, other: Preset) -> bool:
        """Whether this preset should take the place of `other`, which is for the same problem.

        Times of different kernel versions are not comparable: the newer tuning then replaces the older.
        """
        if self.versions.get("kernel") != other.versions.get("kernel"):
            return True
        if self.rank != other.rank:
            return self.rank > other.rank
        return self.time_ms < other.time_ms

    def speedup(self, baseline: str) -> float | None:
        """The baseline's time over this one's; None where the baseline has no time."""
        time_ms = self.baselines.get(baseline, {}).get("time_ms")
        return time_ms / self.time_ms if time_ms is not None else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; fields that are None are left out."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Preset:
        """Raises ValueError naming what is missing or malformed; fields that are not known are ignored."""
        if not isinstance(fields, Mapping):
            raise ValueError(f"an entry must be an object, not {type(fields).__name__}")
        if missing := [name for name in _REQUIRED if name not in fields]:
            raise ValueError(f"an entry lacks {', '.join(missing)}")
        for name in ("problem", "config"):
            if not isinstance(fields[name], Mapping):
                raise ValueError(f"{name} must be an object")
        time_ms = fields["time_ms"]
        if not isinstance(time_ms, int | float) or isinstance(time_ms, bool) or not time_ms > 0:
            raise ValueError(f"time_ms must be a positive number, not {time_ms!r}")
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in fields.items() if name in known})


def software_versions() -> dict[str, str]:
    """Installed versions of what decides a time; what is not installed is left out."""
    versions = {}
    for package in ("jax", "jaxlib", "libtpu"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
