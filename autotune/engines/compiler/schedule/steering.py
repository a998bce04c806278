"""Which compiled ops are which Pallas calls of the program, so that the values that steer a call reach its listing."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from autotune.engines.compiler.schedule.hlo import pallas_calls
from autotune.engines.compiler.schedule.smem import Operands, device_words

RAGGED_DOT = "ragged-dot"  # how XLA calls its kernels of one
Types = tuple[tuple[tuple[int, ...], str], ...]
_TYPE = re.compile(r"(?P<element>\w+)\[(?P<shape>[\d,]*)\](?P<layout>.*)")
# HLO's names of dtypes whose values may lie in scalar memory, and NumPy's.
ELEMENTS = {
    "s8": "int8", "u8": "uint8", "s16": "int16", "u16": "uint16", "s32": "int32", "u32": "uint32", "f32": "float32",
    "bf16": "bfloat16", "f16": "float16",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PallasCall:
    """One `pallas_call` of a program.

    Attributes:
        operands: Shape and dtype of every one, in the order of the compiled call's.
        steering: Operand number to value, for the leading operands (grid bounds, scalar prefetch) that are known.
    """

    operands: Types
    steering: Mapping[int, np.ndarray]


def known_operands(hlo: str, calls: Sequence[PallasCall]) -> dict[str, Operands]:
    """Op name to what is known of its operands.

    Calls are matched with ops by their operands' shapes. The compiler orders and merges ops as it likes, so that
    among calls of equal shapes nothing is used but what all of them agree on.

    Args:
        calls: All of the program's.
    """
    if not calls:
        return {}
    by_shape: dict[tuple[tuple[int, ...], ...], list[PallasCall]] = defaultdict(list)
    for call in calls:
        by_shape[tuple(shape for shape, _ in call.operands)].append(call)
    known = {}
    for name, texts in pallas_calls(hlo).items():
        types = [_TYPE.match(text) for text in texts]
        candidates = by_shape.get(tuple(_shape(match) for match in types), [])
        if not candidates and name.startswith(RAGGED_DOT):
            candidates = _of_ragged_dot(types, by_shape)
        if candidates and all(_equal(candidates[0], one) for one in candidates):
            known[name] = _operands(types, candidates[0])
    return known


def _of_ragged_dot(
    types: Sequence[re.Match[str] | None], by_shape: Mapping[tuple[tuple[int, ...], ...], list[PallasCall]]
) -> list[PallasCall]:
    """XLA's own kernel for a ragged dot, steered by tables that another of its kernels makes of the groups' sizes.

    Its operands: how many visits there are, the rows before each group, each visit's group and row tile, how many
    again, then the matrices. A visit is one group's part of one tile.
    """
    shapes = [_shape(match) for match in types]
    if len(shapes) != 7 or shapes[0] != (1,) or shapes[4] != (1,) or shapes[2] != shapes[3] or len(shapes[5]) != 2:
        return []
    (groups,), (most,), (rows, _) = shapes[1], shapes[2], shapes[5]
    groups, tiles = groups - 1, most - groups + 2
    if tiles < 1 or rows % tiles:
        return []
    operands = tuple((shape, "") for shape in shapes)
    return [
        PallasCall(operands, dict(enumerate(_ragged_tables(call.steering[0], rows, rows // tiles, most))))
        if 0 in call.steering
        else PallasCall(operands, {})  # of other sizes, perhaps
        for call in by_shape.get(((groups,),), [])
    ]


def _ragged_tables(sizes: np.ndarray, rows: int, tile: int, most: int) -> list[np.ndarray]:
    bounds = np.minimum(np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]), rows)
    visits = [
        (group, row_tile)
        for group, (start, end) in enumerate(itertools.pairwise(bounds))
        if end > start
        for row_tile in range(start // tile, -(-end // tile))
    ]
    tables = np.zeros((2, most), np.int32)
    tables[:, : len(visits)] = np.transpose(visits) if visits else 0
    count = np.array([len(visits)])
    return [array.astype(np.int32) for array in (count, bounds, *tables, count)]


def _operands(types: Sequence[re.Match[str] | None], call: PallasCall) -> Operands:
    arrays, scalars = {}, {}
    for number, array in call.steering.items():
        match = types[number]
        if match is None:
            continue
        if array.dtype == bool and match["element"] == "s32":
            array = array.astype(np.int32)  # as Mosaic passes them
        if ELEMENTS.get(match["element"]) != str(array.dtype):
            continue  # another width: how it is packed is not known here
        arrays[number] = device_words(array, match["layout"])
        if array.size == 1 and array.dtype.itemsize == 4:
            scalars[number] = arrays[number][0]  # may be passed in a register
    return Operands(arrays, scalars)


def _equal(first: PallasCall, second: PallasCall) -> bool:
    return first.steering.keys() == second.steering.keys() and all(
        np.array_equal(array, second.steering[number]) and array.dtype == second.steering[number].dtype
        for number, array in first.steering.items()
    )


def _shape(match: re.Match[str] | None) -> tuple[int, ...]:
    return tuple(int(length) for length in match["shape"].split(",") if length) if match else ()
