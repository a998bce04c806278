"""A function and the arrays it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from autotune.kernel import ArraySpec

DTYPES = {"bf16": "bfloat16", "f32": "float32", "i32": "int32"}


@dataclasses.dataclass(frozen=True)
class Program:
    """What a row timed: one call of `function` on arrays of those shapes and dtypes."""

    function: Callable[..., Any]
    arguments: tuple[ArraySpec, ...]


def spec(text: str) -> ArraySpec:
    """Reads ``bf16[1024,4096]``."""
    dtype, _, shape = text.rstrip("]").partition("[")
    return ArraySpec(tuple(int(length) for length in shape.split(",") if length), DTYPES[dtype])
