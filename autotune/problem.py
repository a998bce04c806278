"""One instance of a kernel: shapes, dtypes and static options, as a frozen dataclass read from text or JSON."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from autotune.errors import UsageError, one_of

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int32": 4}
LARGEST = 2**31 - 1  # of an integer field
OFF = (None, False, "none")  # defaults of options that are off unless asked for
_RIGHT = {bool: "true or false", int: "an integer", float: "a number", str: "a word"}
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Base of every kernel's problem. Subclasses are frozen dataclasses of int, bool, float and str fields.

    A field may be optional (``int | None``), written ``none`` in text. Subclasses state what must hold
    in `check`, which raises `UsageError`; an instance that exists is therefore a valid one.
    """

    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float32")

    def __post_init__(self) -> None:
        for name, (kind, optional) in field_kinds(type(self)).items():
            value = getattr(self, name)
            if not (optional and value is None) and not _is_a(value, kind):
                raise UsageError(f"{name}={value!r}: must be {_RIGHT[kind]}")
            if kind is int and value is not None and value < 1:
                raise UsageError(f"{name}={value}: must be a positive integer")
            if kind is int and value is not None and value > LARGEST:
                raise UsageError(f"{name}={value}: must be at most {LARGEST}, as a TPU's indices have 32 bits")
            if name == "dtype" and value not in self.dtypes:
                raise UsageError(f"dtype={value}: must be {one_of(self.dtypes)}")
        self.check()

    def check(self) -> None:
        """Raises `UsageError` where the fields do not fit together."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Builds a problem from plain values or text; unknown and malformed fields raise `UsageError`."""
        kinds = field_kinds(cls)
        for name in fields:
            if name not in kinds:
                raise UsageError(f"unknown problem field {name!r}: use {one_of(kinds)}")
        values = {name: parse_value(name, value, *kinds[name]) for name, value in fields.items()}
        required = {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}
        if missing := [name for name in kinds if name in required and name not in values]:
            raise UsageError(f"the problem lacks {one_of(missing)}: give all of {', '.join(sorted(required))}")
        return cls(**values)

    def replace(self, fields: Mapping[str, Any]) -> Self:
        """A copy with some fields changed, read like `from_dict`."""
        return self.from_dict({**self.to_dict(), **fields})

    def shown(self) -> dict[str, Any]:
        """The fields without the options that are off: where nothing else is said, they are."""
        off = {f.name for f in dataclasses.fields(self) if f.default in OFF and getattr(self, f.name) == f.default}
        return {name: value for name, value in self.to_dict().items() if name not in off}

    def likeness(self) -> tuple[tuple[Any, ...], list[float]]:
        """What must be equal of two problems for the one to stand for the other, and the log2 of what may be near.

        Numbers may be near; an option that one of them has and the other has not (a soft cap, a window) is no matter of
        degree.
        """
        form: list[Any] = []
        sizes: list[float] = []
        for name, (kind, _) in field_kinds(type(self)).items():
            value = getattr(self, name)
            if kind in (int, float) and value:
                form.append(value > 0)
                sizes.append(math.log2(abs(value)))
            else:
                form.append(value)
        return tuple(form), sizes

    def __str__(self) -> str:
        """What is `shown`, as `from_dict` reads it."""
        return ",".join(f"{name}={_text(value)}" for name, value in self.shown().items())


@functools.cache
def field_kinds(cls: type[Problem]) -> Mapping[str, tuple[type, bool]]:
    """Field name to (int, bool, float or str; whether None is allowed)."""
    hints = typing.get_type_hints(cls)
    kinds: dict[str, tuple[type, bool]] = {}
    for field in dataclasses.fields(cls):
        hint, optional = hints[field.name], False
        if isinstance(hint, types.UnionType):
            optional = True
            (hint,) = [arm for arm in hint.__args__ if arm is not type(None)]
        kinds[field.name] = (hint, optional)
    return types.MappingProxyType(kinds)


def parse_value(name: str, value: Any, kind: type, optional: bool = False) -> Any:
    """Reads `value` (text or already plain) as `kind`; raises `UsageError` with what would be right."""
    text = str(value).strip()
    if optional and (value is None or text.lower() in ("none", "")):
        return None
    try:
        if kind is bool:
            if text.lower() in _TRUE + _FALSE:
                return text.lower() in _TRUE
        elif kind is int:
            if not isinstance(value, bool) and float(text) == int(float(text)):
                return int(text) if text.lstrip("+-").isdigit() else int(float(text))
        elif kind is float:
            return float(text)
        elif text:
            return text
    except (ValueError, OverflowError):
        pass
    raise UsageError(f"{name}={text}: must be {_RIGHT[kind]}")


def _is_a(value: Any, kind: type) -> bool:
    if kind in (int, float):
        return isinstance(value, numbers.Integral if kind is int else numbers.Real) and not isinstance(value, bool)
    return isinstance(value, kind)


def parse_pairs(text: str, what: str) -> dict[str, str]:
    """Splits ``a=1,b=2``; `what` names the thing in the error."""
    pairs: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise UsageError(f"{part!r} in {what}: write name=value, separated by commas")
        if name.strip() in pairs:
            raise UsageError(f"{name.strip()} is given twice in {what}")
        pairs[name.strip()] = value.strip()
    return pairs


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
