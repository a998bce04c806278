"""Scalar memory: what the program stores there, and the arrays that steer a kernel as a transfer brings them in."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from autotune.engines.compiler.schedule.scalar import ADDRESS_SPACE, Unknown

_LAYOUT = re.compile(r"\{(?P<order>[\d,]*)(?::(?P<tiles>(?:T\([\d,]+\)(?:\([\d,]+\))*)?))?")
_TILE = re.compile(r"\(([\d,]+)\)")
_WORD_BYTES = 4

Words = tuple[int | None, ...]  # None: padding alone, whatever is there


@dataclasses.dataclass(frozen=True)
class Operands:
    """What is known of one call's operands, by number.

    Attributes:
        arrays: Contents of steering arrays, as 32-bit words in the order of the device's memory.
        scalars: Values of operands that are passed in registers.
    """

    arrays: Mapping[int, Words] = dataclasses.field(default_factory=dict)
    scalars: Mapping[int, Any] = dataclasses.field(default_factory=dict)


class ScalarMemory:
    """One call's scalar memory, word by word. What is not known to be there is unknown, never zero.

    Args:
        operands: Of the call.
        unknown: What a load of unknown content gives.
    """

    def __init__(self, operands: Operands, unknown: Unknown) -> None:
        self._operands = operands
        self._unknown = unknown
        self._words: dict[int, Any] = {}
        for number, words in operands.arrays.items():  # those that live here from the start
            self._write(operand_address(number), words)

    def scalar(self, number: int) -> Any:
        """The operand of that number where it is passed in a register."""
        value = self._operands.scalars.get(number, self._unknown)
        return self._unknown if isinstance(value, Unknown) else value

    def load(self, address: Any) -> Any:
        return self._unknown if isinstance(address, Unknown) else self._words.get(address, self._unknown)

    def store(self, address: Any, value: Any, predicate: Any = True, negated: bool = False) -> None:
        """Stores where the predicate says so; where it or the address is unknown, so is what it may have changed."""
        holds = None if isinstance(predicate, Unknown) else bool(predicate) != negated
        if holds is False:
            return
        if isinstance(address, Unknown):
            self._words.clear()
        elif holds is None:
            self._words.pop(address, None)
        else:
            self._words[address] = value

    def fill(self, address: Any, length: Any, operand: int | None) -> None:
        """A transfer of `length` words: the operand of that number from its start, or something else if None."""
        if isinstance(address, Unknown) or isinstance(length, Unknown):
            self._words.clear()
            return
        for offset in range(length):
            self._words.pop(address + offset, None)
        if operand is not None:
            self._write(address, self._operands.arrays.get(operand, ())[:length])

    def _write(self, address: int, words: Words) -> None:
        self._words.update((address + offset, word) for offset, word in enumerate(words) if word is not None)


def operand_address(number: int) -> int:
    """Where an operand lies that the compiler placed in scalar memory: apart from every allocation."""
    return -(number + 1) * ADDRESS_SPACE


def device_words(array: np.ndarray, layout: str) -> Words:
    """The array as 32-bit words in the order of its layout on the device.

    Args:
        layout: As HLO prints it: dimensions from minor to major, then tiles, the later ones within the earlier,
            for instance ``{1,0:T(8,128)(4,1)}``.
    """
    match = _LAYOUT.search(layout)
    order = [int(one) for one in match["order"].split(",") if one] if match else []
    tiles = [[int(side) for side in text.split(",")] for text in _TILE.findall(match["tiles"] or "")] if match else []
    data, real = (_tiled(part, order, tiles) for part in (array, np.ones(array.shape, array.dtype)))
    words, marks = (np.frombuffer(part, np.int32).tolist() for part in (data, real))
    return tuple(word if mark else None for word, mark in zip(words, marks, strict=True))


def _tiled(array: np.ndarray, order: list[int], tiles: list[list[int]]) -> bytes:
    """The array's bytes in that order, zeros where it is padded."""
    if len(order) == array.ndim:
        array = array.transpose(order[::-1])
    for tile in tiles:
        array = array.reshape((1,) * max(0, len(tile) - array.ndim) + array.shape)
        lead = array.ndim - len(tile)
        rest = array.shape[lead:]
        array = np.pad(array, [(0, 0)] * lead + [(0, -size % side) for size, side in zip(rest, tile, strict=True)])
        counts = [math.ceil(size / side) for size, side in zip(rest, tile, strict=True)]
        array = array.reshape(*array.shape[:lead], *(n for pair in zip(counts, tile, strict=True) for n in pair))
        outer = range(lead, array.ndim, 2)
        array = array.transpose(*range(lead), *outer, *(axis + 1 for axis in outer))
    data = np.ascontiguousarray(array).tobytes()
    return data + b"\0" * (-len(data) % _WORD_BYTES)
