"""The problem of any function: shapes and dtypes of its arrays, and the options it is called with."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.errors import UsageError, one_of
from autotune.kernel import ArraySpec
from autotune.problem import DTYPE_BYTES, Problem

_ARRAY = re.compile(r"(?P<dtype>\w+):(?P<shape>(\d+(x\d+)*)?)")
_OPTION = re.compile(r"[A-Za-z_]\w*:[\w.\-]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnProblem(Problem):
    """One call of a function.

    Attributes:
        arguments: Its arrays in order, ``float32:4096x4096+float32:4096``; ``float32:`` is a scalar.
        options: Its other arguments, ``causal:true+scale:0.5``; None without any.
    """

    arguments: str
    options: str | None = None

    def check(self) -> None:
        for part in self.arguments.split("+"):
            found = _ARRAY.fullmatch(part)
            if not found or found["dtype"] not in DTYPE_BYTES:
                right = "as in float32:4096x4096+float32:4096"
                raise UsageError(
                    f"arguments={self.arguments}: {part!r} must be DTYPE:SIZES, {right}, with a dtype of "
                    f"{one_of(DTYPE_BYTES)}"
                )
        for part in (self.options or "").split("+") if self.options else ():
            if not _OPTION.fullmatch(part):
                raise UsageError(f"options={self.options}: {part!r} must be NAME:VALUE, as in causal:true+scale:0.5")

    @property
    def specs(self) -> tuple[ArraySpec, ...]:
        """Shape and dtype of each array."""
        found = (part.split(":") for part in self.arguments.split("+"))
        return tuple(ArraySpec(tuple(int(size) for size in sizes.split("x") if size), dtype) for dtype, sizes in found)

    @property
    def keywords(self) -> dict[str, Any]:
        """The options as Python values."""
        pairs = (part.split(":", 1) for part in self.options.split("+")) if self.options else ()
        return {name: _value(text) for name, text in pairs}

    def likeness(self) -> tuple[tuple[Any, ...], list[float]]:
        """Of two calls, dtypes, numbers of dimensions and options must be equal; sizes may be near."""
        specs = self.specs
        form = (*((spec.dtype, len(spec.shape)) for spec in specs), self.options)
        return form, [math.log2(max(size, 1)) for spec in specs for size in spec.shape]

    @classmethod
    def of(cls, arrays: Sequence[Any], options: Mapping[str, Any]) -> OwnProblem:
        """Of what a function was called with.

        Args:
            arrays: Whatever has a shape and a dtype.
            options: Numbers, flags and words by name.

        Raises:
            UsageError: One of them is something else.
        """
        for place, array in enumerate(arrays):
            if not hasattr(array, "shape") or not hasattr(array, "dtype"):
                raise UsageError(
                    f"argument {place} is a {type(array).__name__}: a tunable function takes arrays by position (no "
                    "trees of them), and numbers, flags and words by name"
                )
        for name, value in options.items():
            if not isinstance(value, bool | int | float | str):
                raise UsageError(f"{name} is a {type(value).__name__}: it must be a number, a flag or a word")
        shown = [f"{array.dtype}:{'x'.join(str(size) for size in array.shape)}" for array in arrays]
        pairs = [
            f"{name}:{str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()
        ]
        return cls(arguments="+".join(shown), options="+".join(sorted(pairs)) or None)


def _value(text: str) -> bool | int | float | str:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
