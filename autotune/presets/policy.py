"""What becomes of presets of another version, and of problems that have none."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any, Self

from autotune import versions
from autotune.errors import UsageError, one_of
from autotune.kernel import Kernel
from autotune.presets.entry import Preset

STALE_VARIABLE, MISS_VARIABLE = "AUTOTUNE_STALE", "AUTOTUNE_ON_MISS"
CHOICES = ("use", "warn", "refuse")
ASPECTS = ("kernel", "compiler")
MISS = ("heuristic", "tune")
_COMPILERS = ("jax", "jaxlib", "libtpu")


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a lookup does with a preset of another version; "use", "warn" or "refuse".

    Attributes:
        kernel: Of another version of its kernel: its time is no longer true, its config still works or is invalid.
        compiler: Of another jax, jaxlib or libtpu.
    """

    kernel: str = "warn"
    compiler: str = "use"

    def __post_init__(self) -> None:
        for aspect in ASPECTS:
            if (choice := getattr(self, aspect)) not in CHOICES:
                raise UsageError(f"{aspect}={choice!r}: what becomes of a stale preset is {one_of(CHOICES)}")


@dataclasses.dataclass(frozen=True)
class OnMiss:
    """What a lookup does where a problem has no preset of its own.

    Attributes:
        action: "heuristic": takes the nearest, else the kernel's own config; "tune": tunes first.
        budget_s: So many seconds at most, beside validation and what starting takes.
    """

    action: str = MISS[0]
    budget_s: float = 120.0

    def __post_init__(self) -> None:
        if self.action not in MISS:
            raise UsageError(f"{self.action!r}: on a miss there is {one_of(MISS)}")
        if not 1.0 <= self.budget_s <= 86400.0:
            raise UsageError(f"budget={self.budget_s}: must be seconds, from 1 to 86400 (a day)")


class Changed:
    """A setting that was changed: as a context manager, it is what it was again at the end."""

    def __init__(self, name: str, value: Any) -> None:
        self._name, self._before = name, _settings.get(name)
        _settings[name] = value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        _settings[self._name] = self._before


_settings: dict[str, Any] = {}


def policy(*, kernel: str | None = None, compiler: str | None = None) -> Changed:
    """Says what becomes of presets of another version, from now on, or within a ``with``.

    Args:
        kernel: As `Policy.kernel`; None leaves it.
        compiler: As `Policy.compiler`; None leaves it.

    Raises:
        UsageError: It is none of "use", "warn" and "refuse".

    Example:
        >>> with policy(kernel="refuse"):
        ...     pass
    """
    given = {name: value for name, value in (("kernel", kernel), ("compiler", compiler)) if value is not None}
    return Changed("policy", dataclasses.replace(current_policy(), **given))


def on_miss(action: str, *, budget: float = OnMiss.budget_s) -> Changed:
    """Says what a lookup does where a problem has no preset of its own, from now on, or within a ``with``.

    Tuning is done by another process, by the compiler engine for a TPU and by the device engine elsewhere; its preset
    is kept in ``./results``. Whatever goes wrong, the lookup takes what it would have taken without.

    Args:
        action: "heuristic" (as it is from the start) or "tune".
        budget: Seconds of search; starting, validation and baselines come on top, twice as much at most.

    Raises:
        UsageError: There is no such action, or the budget is none.

    Example:
        >>> with on_miss("tune", budget=60):
        ...     pass
    """
    return Changed("on_miss", OnMiss(action, float(budget)))


def current_policy() -> Policy:
    """What `policy` said, else ``$AUTOTUNE_STALE`` (``kernel=refuse,compiler=warn``), else the default."""
    return _settings.get("policy") or _policy_from(os.environ.get(STALE_VARIABLE, ""))


def current_on_miss() -> OnMiss:
    """What `on_miss` said, else ``$AUTOTUNE_ON_MISS`` (``tune`` or ``tune:60``), else the default."""
    return _settings.get("on_miss") or _on_miss_from(os.environ.get(MISS_VARIABLE, ""))


@functools.lru_cache(maxsize=16)
def _policy_from(text: str) -> Policy:
    choices = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    right = f"${STALE_VARIABLE}={text}: must be as in kernel=refuse,compiler=warn"
    if text and (len(choices) != text.count(",") + 1 or not set(choices) <= set(ASPECTS)):
        raise UsageError(right)
    try:
        return Policy(**choices)
    except UsageError as error:
        raise UsageError(f"{right} ({error})") from None


@functools.lru_cache(maxsize=16)
def _on_miss_from(text: str) -> OnMiss:
    if not text:
        return OnMiss()
    action, _, budget = text.partition(":")
    try:
        return OnMiss(action, float(budget) if budget else OnMiss.budget_s)
    except (ValueError, UsageError) as error:
        why = f" ({error})" if isinstance(error, UsageError) else ""
        raise UsageError(f"${MISS_VARIABLE}={text}: must be as in tune or tune:60{why}") from None


@functools.cache
def _installed() -> dict[str, str]:
    """It does not change while the process runs, and takes a lookup's time to find out."""
    return versions.installed()


def staleness(kernel: Kernel, preset: Preset) -> Mapping[str, str]:
    """In which aspects the preset is of another version than what is here, each with its words; {} where in none."""
    stale = {}
    if preset.versions.get("kernel") != kernel.version:
        stale["kernel"] = "is of an older kernel"
    here = _installed()
    others = [
        f"{name} {preset.versions[name]} (here {here[name]})"
        for name in _COMPILERS
        if name in preset.versions and name in here and preset.versions[name] != here[name]
    ]
    if others:
        stale["compiler"] = f"was tuned with {', '.join(others)}"
    return stale
