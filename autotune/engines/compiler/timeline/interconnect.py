"""The links between a topology's chips, and what a collective takes over them.

A dimension of the topology closes to a ring only where the whole of it is there: 16 chips on v5e and v6e, and cubes of
four on v4, v5p and v7x (`autotune.chips.Links`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Sequence

from autotune.chips import Chip, Links
from autotune.engines.compiler.schedule.scalar import UnresolvedError

Coordinates = tuple[int, ...]

# A collective reaches about nine tenths of a link's pace ("How to Scale Your Model" measures 8 to 10 % below it), and a
# hop takes 1 µs.
_EFFICIENCY = 0.9
_HOP_US = 1.0


@dataclasses.dataclass(frozen=True)
class Interconnect:
    """The devices of one program, in the order of their partition numbers.

    Attributes:
        chip: Their kind.
        coordinates: Of each device's chip. Two devices of one chip have the same.
    """

    chip: Chip
    coordinates: Sequence[Coordinates]

    @functools.cached_property
    def _shape(self) -> tuple[int, ...]:
        return tuple(1 + max(along) for along in zip(*self.coordinates, strict=True))

    @property
    def _links(self) -> Links:
        if self.chip.links is None:
            raise UnresolvedError(f"the links of {self.chip.name} are not known")
        return self.chip.links

    @property
    def _bytes_per_us(self) -> float:
        return self._links.gbps * 1e3 * _EFFICIENCY

    @property
    def host_bytes_per_us(self) -> float:
        """Between a chip and its host, in one direction."""
        return self._links.host_gbps * 1e3

    @functools.cached_property
    def _rings(self) -> tuple[bool, ...]:
        """Of each dimension, whether its ends are joined."""
        least = self._links.ring
        if least == 4:  # made of cubes, which are joined as wholes
            return (all(side % 4 == 0 for side in self._shape),) * len(self._shape)
        return tuple(side >= least for side in self._shape)

    def gather_us(self, group: Sequence[int], nbytes: float) -> float:
        """An all-gather to, or a reduce-scatter of, `nbytes` in all, within one of several equal groups.

        All dimensions that the group spans carry a share of it at once. What a device is given comes over both links
        of a dimension that is a ring, and over one at the end of a line.
        """
        if len(group) < 2:
            return 0.0
        places = [self.coordinates[device] for device in group]
        links, hops = 0.0, 0
        for axis in range(len(places[0])):
            along = sorted({place[axis] for place in places})
            if len(along) > 1:
                whole = len(along) == self._shape[axis] and self._rings[axis]
                links += 2.0 if whole else 1.0
                hops += len(along) // 2 if whole else along[-1] - along[0]
        received = nbytes * (len(group) - 1) / len(group)
        if not links:  # Two devices of one chip: their link is faster than any between chips.
            return _HOP_US + received / (2 * self._bytes_per_us)
        return hops * _HOP_US + received / (links * self._bytes_per_us)

    def reduce_us(self, group: Sequence[int], nbytes: float) -> float:
        """An all-reduce of `nbytes`: a reduce-scatter, and an all-gather of what it leaves."""
        return 2 * self.gather_us(group, nbytes)

    def exchange_us(self, groups: Sequence[Sequence[int]], nbytes: float) -> float:
        """An all-to-all in which each device of the groups gives away `nbytes` in all, in equal parts."""
        pairs = [(a, b) for group in groups for a, b in itertools.product(group, repeat=2) if a != b]
        return self.permute_us(pairs, nbytes / len(groups[0]))

    def permute_us(self, pairs: Sequence[tuple[int, int]], nbytes: float) -> float:
        """`nbytes` from each first device to its second, all at once, along shortest paths, dimension by dimension."""
        loads: Counter[tuple[Coordinates, Coordinates]] = Counter()
        hops = 0
        for source, target in pairs:
            path = self._path(self.coordinates[source], self.coordinates[target])
            loads.update(itertools.pairwise(path))
            hops = max(hops, len(path) - 1)
        busiest = max(loads.values(), default=0)
        if pairs and not loads:  # within a chip, as `gather_us` has it
            return _HOP_US + nbytes / (2 * self._bytes_per_us)
        return hops * _HOP_US + busiest * nbytes / self._bytes_per_us

    def _path(self, source: Coordinates, target: Coordinates) -> list[Coordinates]:
        path = [source]
        for axis, (start, end) in enumerate(zip(source, target, strict=True)):
            length = self._shape[axis]
            step = 1 if end >= start else -1
            if self._rings[axis] and abs(end - start) > length - abs(end - start):
                step = -step
            place = start
            while place != end:
                place = (place + step) % length if self._rings[axis] else place + step
                path.append((*path[-1][:axis], place, *path[-1][axis + 1 :]))
        return path
