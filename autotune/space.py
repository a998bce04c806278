"""Search spaces as data: parameters with their candidates, constraints with a text each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from autotune.errors import UsageError, one_of
from autotune.outcome import Config
from autotune.problem import parse_value


@dataclasses.dataclass(frozen=True)
class Param:
    """One thing that may vary.

    Attributes:
        name: As the kernel's config calls it.
        candidates: What the search proposes, in a meaningful order. All of one type.
        doc: One line on what it changes.
        default: Taken where a config leaves it out: a value, or a function of the parameters before it.
            None where a config must give it.
    """

    name: str
    candidates: tuple[Any, ...]
    doc: str
    default: Any = None

    def __post_init__(self) -> None:
        if not self.candidates:
            raise ValueError(f"{self.name} has no candidates")

    @property
    def kind(self) -> type:
        return type(self.candidates[0])

    def parse(self, value: Any) -> Any:
        """Reads text. Sizes need not be candidates (the constraints judge them); words and flags must be."""
        value = parse_value(self.name, value, self.kind)
        if self.kind is not int and value not in self.candidates:
            raise UsageError(f"{self.name}={value}: must be {one_of(self.candidates)}")
        return value


@dataclasses.dataclass(frozen=True)
class Constraint:
    """What must hold between parameters. `text` says so in words, and is shown when it does not."""

    text: str
    holds: Callable[[Config], bool]


class Space:
    """Every config worth trying for one problem on one chip.

    Args:
        params: The parameters, in the order shown.
        constraints: All must hold for a config to be valid; they are checked in order, so that later
            ones may rely on earlier ones.
    """

    def __init__(self, params: Sequence[Param], constraints: Sequence[Constraint]) -> None:
        self.params = {param.name: param for param in params}
        self.constraints = tuple(constraints)

    def parse(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """A whole config from text or plain values, defaults filled in; raises `UsageError`.

        The constraints are not checked: see `why_invalid` and `check`.
        """
        for name in fields:
            if name not in self.params:
                raise UsageError(f"unknown parameter {name!r}: use {one_of(self.params)}")
        config = {}
        for name, param in self.params.items():
            if name in fields:
                config[name] = param.parse(fields[name])
            elif param.default is not None:
                config[name] = param.default(config) if callable(param.default) else param.default
            else:
                raise UsageError(f"the config lacks {name}: give {', '.join(self.required)}")
        return config

    @property
    def required(self) -> list[str]:
        """The parameters without a default."""
        return [name for name, param in self.params.items() if param.default is None]

    def why_invalid(self, config: Config) -> str | None:
        """The text of the first constraint that `config` breaks, or None."""
        for constraint in self.constraints:
            if not constraint.holds(config):
                return constraint.text
        return None

    def check(self, config: Config) -> None:
        """Raises `UsageError` naming the config and the constraint it breaks."""
        if reason := self.why_invalid(config):
            raise UsageError(f"{format_config(config)}: {reason}")

    @property
    def cardinality(self) -> int:
        """Points of the grid of candidates, valid or not."""
        count = 1
        for param in self.params.values():
            count *= len(param.candidates)
        return count

    @functools.cached_property
    def size(self) -> int:
        """How many configs are valid."""
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every valid config, in candidate order."""
        for values in itertools.product(*(param.candidates for param in self.params.values())):
            config = dict(zip(self.params, values, strict=True))
            if self.why_invalid(config) is None:
                yield config


def format_config(config: Config) -> str:
    """``block_m=512,block_n=512``: what ``--config`` takes."""
    return ",".join(f"{name}={value}" for name, value in config.items())


def config_key(config: Config) -> tuple[tuple[str, Any], ...]:
    """A hashable identity, independent of the order of the parameters."""
    return tuple(sorted(config.items()))


def aligned_divisors(size: int, align: int, *, smallest: int = 0) -> list[int]:
    """Divisors of `size` that are multiples of `align`, and `size` itself (always a legal block).

    Args:
        size: The dimension's length.
        align: 128 for a minor dimension (lanes), 8 to 32 for the next (sublanes times packing).
        smallest: Smaller divisors are left out.
    """
    small = [d for d in range(1, math.isqrt(size) + 1) if size % d == 0]
    divisors = {*small, *(size // d for d in small)}
    return sorted({size} | {d for d in divisors if d % align == 0 and d >= smallest})
