"""One preset: what was tuned, how fast it is said to be, and on what evidence."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autotune.outcome import Source, is_figure, is_interval

PREDICTED, MEASURED = "predicted", "measured"
FORMAT = 1  # of an entry; one that says nothing is of the first
_EVIDENCE = f"only a time by the method {Source.DEVICE} is measured"
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
        baselines: Name to ``{"time_ms": …}``; ``{"status": …}`` where the baseline did not work. Where both were
            measured in turn, with ``speedup`` and ``speedup_interval``.
        interval_ms: Where a measured time lies.
        timer: How it was measured.
        compute_ms: Time the compute units would take alone.
        memory_ms: Time the HBM traffic would take alone.
        roofline_ms: The least time the chip could take.
        bound: What holds the time up.
        validation: The verdict's figures.
        versions: Of jax, jaxlib, libtpu and the kernel.
        date: When it was tuned, ISO 8601, UTC.
        study: The study it came from.
        extra: Fields that only a newer version knows: kept, so that rewriting a file loses nothing.
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
    interval_ms: Sequence[float] | None = None
    timer: str | None = None
    compute_ms: float | None = None
    memory_ms: float | None = None
    roofline_ms: float | None = None
    bound: str | None = None
    validation: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    date: str | None = None
    study: str | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.method is not None and self.measured != (self.method == Source.DEVICE.value):
            raise ValueError(f"source {self.source} and method {self.method} contradict each other: {_EVIDENCE}")

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

        What was never shown right has no time worth comparing, and better evidence beats a better time. Times
        of different kernels or compilers are not comparable: the newer tuning then replaces the older.
        """
        if self.validated != other.validated:
            return self.validated
        if self.rank != other.rank:
            return self.rank > other.rank
        if dict(self.versions) != dict(other.versions):
            return True
        if self.interval_ms is not None and other.interval_ms is not None:
            # The luckier of two measurements is not the better one: the newer stays unless it was shown to be slower.
            return self.interval_ms[0] <= other.interval_ms[1]
        if self.time_ms != other.time_ms:
            return self.time_ms < other.time_ms
        return self._baselines_known > other._baselines_known  # One's worker had died, say.

    @property
    def _baselines_known(self) -> int:
        return sum(figures.get("time_ms") is not None for figures in self.baselines.values())

    def speedup(self, baseline: str) -> float | None:
        """The baseline's time over this one's; None where the baseline has no time."""
        figures = self.baselines.get(baseline, {})
        if figures.get("speedup") is not None:
            return figures["speedup"]
        time_ms = figures.get("time_ms")
        return time_ms / self.time_ms if time_ms is not None else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; fields that are None are left out."""
        fields = dataclasses.asdict(self)
        extra = fields.pop("extra")
        return {name: value for name, value in fields.items() if value is not None} | extra

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Preset:
        """Raises ValueError naming what is missing or malformed; fields that are not known are kept in `extra`."""
        if not isinstance(fields, Mapping):
            raise ValueError(f"an entry must be an object, not {type(fields).__name__}")
        if fields.get("format", FORMAT) != FORMAT:
            text = f"an entry is of format {str(fields['format'])[:20]}, and this version reads {FORMAT}"
            raise ValueError(f"{text}: install the newest tpu-autotune")
        if missing := [name for name in _REQUIRED if fields.get(name) is None]:
            raise ValueError(f"an entry lacks {', '.join(missing)}")
        known = {}
        for name, (right, words) in _FIELDS.items():
            if fields.get(name) is None:
                continue  # Not said, which every other field may be.
            if not right(fields[name]):
                raise ValueError(f"{name} must be {words}, not {str(fields[name])[:80]!r}")
            known[name] = fields[name]
        return cls(**known, extra={name: value for name, value in fields.items() if name not in _FIELDS})


def _is_word(value: Any) -> bool:
    return isinstance(value, str)


def _is_file_name(value: Any) -> bool:
    """A report is written under this name."""
    return _is_word(value) and re.fullmatch(r"(?!\.)[^/\\\0]{1,100}", value) is not None


def _is_time(value: Any) -> bool:
    return is_figure(value) and value > 0


def _is_duration(value: Any) -> bool:
    return is_figure(value) and value >= 0


def _mapping_of(right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a value is an object whose values are all right (its keys are words, in JSON)."""
    return lambda value: isinstance(value, Mapping) and all(map(right, value.values()))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | bool) or is_figure(value)


def _is_baseline(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    times = (value.get(name) for name in ("time_ms", "speedup"))
    interval = value.get("speedup_interval")
    return all(time is None or _is_time(time) for time in times) and (interval is None or _is_interval(interval))


def _is_interval(value: Any) -> bool:
    return is_interval(value) and _is_time(value[0])


def _is_verdict(value: Any) -> bool:
    if not isinstance(value, Mapping) or not _is_word(value.get("status")):
        return False
    figures = (value.get(name) for name in ("max_rel_error", "max_element_error", "tolerance"))
    return all(figure is None or is_figure(figure) for figure in figures)


_METHODS = tuple(source.value for source in Source)
_WORD = (_is_word, "a word")
_TIME = (_is_time, "a positive number")
_DURATION = (_is_duration, "a number of 0 or more")
_PLAIN_MAPPING = (_mapping_of(_is_plain), "an object of numbers, words and flags")
# Every field with what it must be: whatever reads a preset later may rely on that.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "kernel": (_is_file_name, "a kernel's name"),
    "device_kind": _WORD,
    "problem": _PLAIN_MAPPING,
    "config": _PLAIN_MAPPING,
    "time_ms": _TIME,
    "source": (lambda value: value in (PREDICTED, MEASURED), f"{PREDICTED} or {MEASURED}"),
    "method": (lambda value: value in _METHODS, " or ".join(_METHODS)),
    "engine": _WORD,
    "baselines": (_mapping_of(_is_baseline), "an object of objects with a positive time_ms"),
    "interval_ms": (_is_interval, "two positive numbers, the smaller first"),
    "timer": _WORD,
    "compute_ms": _DURATION,
    "memory_ms": _DURATION,
    "roofline_ms": _DURATION,
    "bound": _WORD,
    "validation": (_is_verdict, "an object with a status and finite errors"),
    "versions": (_mapping_of(_is_word), "an object of words"),
    "date": _WORD,
    "study": _WORD,
}
