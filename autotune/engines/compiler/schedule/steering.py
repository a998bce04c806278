"""Which compiled op is which Pallas call of the program, so that the values that steer the call reach its listing."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from autotune.engines.compiler.schedule.hlo import pallas_calls
from autotune.engines.compiler.schedule.smem import Operands, Words, device_words

Shapes = tuple[tuple[int, ...], ...]
_DIMENSIONS = re.compile(r"\w+\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class PallasCall:
    """One `pallas_call` of a program.

    Attributes:
        shapes: Of every operand, in the order of the compiled call's.
        steering: Operand number to value, for the leading operands (grid bounds, scalar prefetch) that are known.
    """

    shapes: Shapes
    steering: Mapping[int, np.ndarray]


def known_operands(hlo: str, calls: Sequence[PallasCall]) -> dict[str, Operands]:
    """Op name to what is known of its operands.

    Calls are matched with ops by their operands' shapes, and in program order among equals. Where their numbers
    differ (one of two equal calls was merged), the values are used only if all of them agree.
    """
    ops: dict[Shapes, list[tuple[str, list[str]]]] = defaultdict(list)
    for name, types in pallas_calls(hlo).items():
        ops[tuple(_shape(text) for text in types)].append((name, types))
    wanted: dict[Shapes, list[PallasCall]] = defaultdict(list)
    for call in calls:
        wanted[call.shapes].append(call)
    known = {}
    for shapes, candidates in wanted.items():
        named = ops.get(shapes, [])
        if len(named) != len(candidates):
            candidates = candidates[:1] * len(named) if all(_equal(candidates[0], one) for one in candidates) else []
        for (name, types), call in zip(named, candidates, strict=False):
            known[name] = _operands(types, call)
    return known


def _operands(types: Sequence[str], call: PallasCall) -> Operands:
    arrays: dict[int, Words] = {
        number: device_words(array, types[number].partition("]")[2]) for number, array in call.steering.items()
    }
    # A value of one word may be passed in a register.
    return Operands(arrays, {number: arrays[number][0] for number, a in call.steering.items() if a.size == 1})


def _equal(first: PallasCall, second: PallasCall) -> bool:
    return first.steering.keys() == second.steering.keys() and all(
        np.array_equal(array, second.steering[number]) for number, array in first.steering.items()
    )


def _shape(text: str) -> tuple[int, ...]:
    match = _DIMENSIONS.match(text)
    return tuple(int(length) for length in match[1].split(",") if length) if match else ()
