"""Every config the search may still propose, best analytic estimate first."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from autotune.outcome import Config
from autotune.search.encoding import Encoding
from autotune.space import Space, config_key

STARTUP_TRIALS = 10  # that the sampler draws before it has learnt anything
# Beyond this many grid points the pool is a random sample of this size: a point takes some 10 µs.
GRID_LIMIT = 200_000
# The diverse choice looks no further down the ranking than this many times its size.
RANKING_DEPTH = 8
# Nor is it larger than this: each choice is compared with all before it.
RANKING_MOST = 500
# A sample of a vast grid has no config that is good in everything: so many of its best are improved upon.
DESCENTS = 16
# So many of the best leave alone what the estimate knows nothing of: drawn by chance, it would be no one's choice.
SETTLED = 2000
# Another word changes more than the next size does: moving a proposal must not undo what was learnt of words.
WORD_STEPS = 3


class Pool:
    """The valid configs of a space, ranked by estimate.

    Args:
        space: Where the configs come from.
        encoding: Its encoding, which measures how far apart two configs are.
        estimate: Analytic time of a config, in milliseconds.
        extra: Valid configs outside the candidates that belong to the pool all the same.
        seed: Of the sample, where the grid is too large to enumerate. To it is added what descents from its best, and
            from `extra`, come across; what the best of it have by chance alone is then as in the first of `extra`.
    """

    def __init__(
        self,
        space: Space,
        encoding: Encoding,
        estimate: Callable[[Config], float],
        extra: Iterable[Config] = (),
        *,
        seed: int = 0,
    ) -> None:
        self.complete = space.cardinality <= GRID_LIMIT
        extra = list(extra)
        found = {config_key(config): dict(config) for config in extra}
        for config in space if self.complete else _sample(space, seed):
            found.setdefault(config_key(config), config)
        estimates = {key: estimate(config) for key, config in found.items()}
        if not self.complete:
            best = sorted(found, key=lambda key: estimates[key])[:DESCENTS]
            for start in (*extra, *(found[key] for key in best)):
                for config, time_ms in _descent(space, estimate, start):
                    found[config_key(config)], estimates[config_key(config)] = config, time_ms
            if extra:
                best = sorted(found, key=lambda key: estimates[key])[:SETTLED]
                settled = [(_settled(space, estimate, found.pop(key), extra[0]), estimates.pop(key)) for key in best]
                estimates |= {config_key(config): time_ms for config, time_ms in settled}
                found = {config_key(config): config for config, _ in settled} | found  # first among equals
        ranked = sorted((estimates[key], i, config) for i, (key, config) in enumerate(found.items()))
        self._space = space
        self._encoding = encoding
        self.configs = [config for _, _, config in ranked]
        self._estimates = np.array([estimate for estimate, _, _ in ranked])
        self._rows = {config_key(config): row for row, config in enumerate(self.configs)}
        self._places = np.array([encoding.places(config) for config in self.configs], dtype=np.int32)

    def __len__(self) -> int:
        return len(self.configs)

    def admits(self, config: Config) -> bool:
        """Whether the search may propose `config` at all."""
        if self.complete:
            return config_key(config) in self._rows
        return self._space.why_invalid(config) is None

    def ranked(self, count: int) -> list[dict[str, Any]]:
        """The best `count` configs by estimate, passing over those that would say little new where that can be had.

        Passed over are neighbours of a better config (one parameter, one step apart: the search visits them
        anyway), and configs that differ from it in one parameter that the estimate takes no notice of.
        """
        count = min(count, RANKING_MOST)
        chosen: list[int] = []
        for row in range(min(len(self), count * RANKING_DEPTH)):
            if len(chosen) == count:
                break
            if not self._says_little_new(row, chosen):
                chosen.append(row)
        rest = sorted(set(range(len(self))).difference(chosen))
        chosen += rest[: count - len(chosen)]
        return [self.configs[row] for row in sorted(chosen)]

    def _says_little_new(self, row: int, chosen: list[int]) -> bool:
        steps = self._distance(self._places[chosen], self._places[row])
        differing = (self._places[chosen] != self._places[row]).sum(axis=1)
        alike = np.isclose(self._estimates[chosen], self._estimates[row], rtol=1e-9)
        return bool(((steps <= 1) | ((differing == 1) & alike)).any())

    def nearest(self, config: Config, taken: set) -> dict[str, Any] | None:
        """The untaken config closest to `config`, the better estimate first among equals; None when all are taken."""
        if not self.configs:
            return None
        distance = self._distance(self._places, np.array(self._encoding.places(config))).astype(float)
        distance[[self._rows[key] for key in taken if key in self._rows]] = math.inf
        row = int(distance.argmin())
        return None if math.isinf(distance[row]) else self.configs[row]

    def exhausted(self, taken: set) -> bool:
        """Whether every config is taken."""
        return len(taken) >= len(self) and taken.issuperset(self._rows)

    def _distance(self, places: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Steps between configs; two different words are some steps apart, as no order is known."""
        steps = np.abs(places - place)
        words = [name not in self._encoding.ordered for name in self._encoding.values]
        return np.where(words, np.minimum(steps, 1) * WORD_STEPS, steps).sum(axis=1)


def any_valid(space: Space) -> bool:
    """Whether the search would find anything: in a vast grid, whether a sample does."""
    configs = space if space.cardinality <= GRID_LIMIT else _sample(space, 0)
    return next(iter(configs), None) is not None


def _descent(
    space: Space, estimate: Callable[[Config], float], start: Config
) -> Iterator[tuple[dict[str, Any], float]]:
    """All valid configs, and their estimates, on the way to one that no change of a single parameter makes faster."""
    best, best_ms = dict(start), estimate(start)
    while True:
        before = best_ms
        for name, param in space.params.items():
            for candidate in param.candidates:
                config = {**best, name: candidate}
                if space.why_invalid(config) is None:
                    time_ms = estimate(config)
                    yield config, time_ms
                    if time_ms < best_ms:
                        best, best_ms = config, time_ms
        if best_ms == before:
            return


def _settled(space: Space, estimate: Callable[[Config], float], config: Config, usual: Config) -> dict[str, Any]:
    """`config` with the `usual` value of each parameter that the estimate takes no notice of there."""
    settled, time_ms = dict(config), estimate(config)
    for name, value in usual.items():
        changed = {**settled, name: value}
        if space.why_invalid(changed) is None and estimate(changed) == time_ms:
            settled = changed
    return settled


def _sample(space: Space, seed: int) -> Iterator[dict[str, Any]]:
    """Valid configs drawn evenly from a grid too large to enumerate."""
    rng = random.Random(seed)
    for _ in range(GRID_LIMIT):
        config = {name: rng.choice(param.candidates) for name, param in space.params.items()}
        if space.why_invalid(config) is None:
            yield config
