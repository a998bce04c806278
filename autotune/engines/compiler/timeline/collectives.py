"""Collectives of the scheduled HLO: who takes part in them, and how long each takes."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

from autotune.engines.compiler.schedule.scalar import UnresolvedError
from autotune.engines.compiler.timeline.hlo import Array, Computation, Instruction, Module
from autotune.engines.compiler.timeline.interconnect import Interconnect

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_PAIR = re.compile(r"\{(\d+),(\d+)\}")
_MESH = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\]"
    r"(?:, device_ids=\(\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?\))?"
    r"\s*\{(?P<along>'[^'}]+'(?:,\s*'[^'}]+')*)\}"
)
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_IOTA = re.compile(r"\[(?P<shape>[\d,]+)\]<=\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?")


def collective_in(module: Module, computation: Computation, one: Instruction) -> tuple[Computation, Instruction] | None:
    """The collective that an instruction is, or that what it calls holds, and where; None where there is none."""
    if kind_of(one):
        return computation, one
    if "calls" in one.called:
        called = module.computations[one.called["calls"]]
        for inner in called:
            if found := collective_in(module, called, inner):
                return found
    return None


def kind_of(one: Instruction) -> str | None:
    """``all-gather`` of an ``all-gather-start`` as well; None of another op."""
    kind = one.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def microseconds(links: Interconnect, computation: Computation, one: Instruction, *, scattered: bool) -> float:
    """What a collective takes once it has the links for itself.

    Args:
        links: Between the devices.
        computation: The one it is in.
        one: The collective.
        scattered: An all-reduce of which each device keeps its part alone, fused with the slice: a reduce-scatter.
    """
    kind = kind_of(one)
    given = [array for name in one.operands for array in computation[name].arrays]
    if kind == "collective-permute":
        pairs = [(int(a), int(b)) for a, b in _PAIR.findall(one.attribute("source_target_pairs") or "")]
        # Each operand's own results and semaphores come with it.
        return links.permute_us([pair for pair in pairs if pair[0] != pair[1]], _total(given))
    groups = replica_groups(one, len(links.coordinates))
    if kind in ("all-to-all", "ragged-all-to-all"):
        return links.exchange_us(groups, _total(given))
    longest = 0.0
    for group in groups:
        if kind == "all-gather":
            took = links.gather_us(group, _total(given) * len(group))
        elif kind == "reduce-scatter" or scattered:
            took = links.gather_us(group, _total(given))
        else:
            took = links.reduce_us(group, _total(given))
        longest = max(longest, took)
    return longest


def _total(arrays: Sequence[Array]) -> float:
    return float(sum(array.nbytes for array in arrays))


def replica_groups(one: Instruction, devices: int) -> list[list[int]]:
    """The groups of partition numbers, in any of HLO's three notations.

    Raises:
        UnresolvedError: In another one.
    """
    text = (one.attribute("replica_groups") or "").strip()
    if text in ("", "{}"):
        return [list(range(devices))]
    if match := _MESH.search(one.text):
        return _mesh_groups(match)
    if match := _IOTA.match(text):
        return _iota(match["dims"], match["order"]).reshape(_integers(match["shape"])).tolist()
    groups = [_integers(group) for group in re.findall(r"\{([\d,]+)\}", text)]
    if not groups:
        raise UnresolvedError(f"the groups of {one.name} are in an unknown notation: {text[:80]}")
    return groups


def _mesh_groups(match: re.Match[str]) -> list[list[int]]:
    """``mesh['a'=2,'b'=8] {'b'}``: devices that differ in their place along b alone are one group.

    With ``device_ids=([2,8]T(1,0))`` the mesh is of these, in that order.
    """
    axes = {name: int(size) for name, size in _AXIS.findall(match["axes"])}
    along = re.findall(r"'([^']+)'", match["along"])
    if not axes or not set(along) <= set(axes):
        raise UnresolvedError(f"the groups of a collective are in an unknown notation: {match[0][:80]}")
    count = math.prod(axes.values())
    ids = _iota(match["dims"] or str(count), match["order"]).reshape(tuple(axes.values()))
    names = list(axes)
    others = [name for name in names if name not in along]
    order = [names.index(name) for name in itertools.chain(others, along)]
    size = math.prod(axes[name] for name in along)
    return ids.transpose(order).reshape(-1, size).tolist()


def _iota(dims_text: str, order_text: str | None) -> np.ndarray:
    """Numbers from 0, as an array of these dimensions, transposed."""
    dims = _integers(dims_text)
    order = _integers(order_text) if order_text else list(range(len(dims)))
    return np.arange(math.prod(dims)).reshape(dims).transpose(order)


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
