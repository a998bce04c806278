"""How a space's configs become the sampler's parameters and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from autotune.outcome import Config
from autotune.space import Space

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


class Encoding:
    """Sizes become their place in the list of candidates, words and flags stay categories.

    A place, not the size itself: candidates are divisors, unevenly spaced, and neighbours in the list
    are the neighbours worth trying.

    Args:
        space: The space to encode.
        extra: Configs that must be expressible although their sizes need not be candidates (baselines).
    """

    def __init__(self, space: Space, extra: Iterable[Config] = ()) -> None:
        extra = list(extra)
        self.values: dict[str, tuple[Any, ...]] = {}
        for name, param in space.params.items():
            values = dict.fromkeys(param.candidates)
            values.update(dict.fromkeys(config[name] for config in extra))
            self.values[name] = tuple(sorted(values)) if param.kind is int else tuple(values)
        self.ordered = {name for name, param in space.params.items() if param.kind is int}
        self._places = {name: {v: i for i, v in enumerate(values)} for name, values in self.values.items()}

    def distributions(self) -> dict[str, BaseDistribution]:
        """Optuna's side of the encoding."""
        from optuna.distributions import CategoricalDistribution, IntDistribution

        return {
            name: IntDistribution(0, len(values) - 1) if name in self.ordered else CategoricalDistribution(values)
            for name, values in self.values.items()
        }

    def holds(self, config: Config) -> bool:
        """Whether the config has its place here: all its values are candidates."""
        return all(config[name] in places for name, places in self._places.items())

    def places(self, config: Config) -> list[int]:
        """The config as one index per parameter."""
        return [self._places[name][config[name]] for name in self.values]

    def encode(self, config: Config) -> dict[str, Any]:
        """The sampler's parameters for `config`."""
        return {n: self._places[n][config[n]] if n in self.ordered else config[n] for n in self.values}

    def decode(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The config of the sampler's parameters."""
        return {n: self.values[n][params[n]] if n in self.ordered else params[n] for n in self.values}

    @property
    def digest(self) -> str:
        """Changes with any candidate: studies of different encodings must not be mixed."""
        return hashlib.sha256(json.dumps(self.values).encode()).hexdigest()[:8]
