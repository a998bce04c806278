"""What a handful of noisy times says: a median with its interval, and a ratio that may or may not be a gain."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

CONFIDENCE = 0.95  # of one time's interval
# Student's t, two-sided 99 %, by degrees of freedom.
_T_99 = {1: 63.657, 2: 9.925, 3: 5.841, 4: 4.604, 5: 4.032, 6: 3.707, 7: 3.499, 8: 3.355, 9: 3.250}
MOST_RACES = len(_T_99) + 1


def median_interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """The median and an interval that holds the true one with 95 % confidence, whatever the distribution.

    From order statistics: how many of n samples lie below the median is binomial. With fewer than six samples their
    whole range holds it less surely than that, and is what is given.
    """
    ordered, count = sorted(samples), len(samples)
    outside, below = 0.0, 0
    while below < count // 2:
        outside += 2 * math.comb(count, below) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        below += 1
    first = max(0, below - 1)
    return statistics.median(ordered), ordered[first], ordered[count - 1 - first]


@dataclasses.dataclass(frozen=True)
class Spread:
    """A positive figure that several processes gave, each its own.

    Attributes:
        value: The estimate, their geometric mean.
        low: Where it lies when as many other processes give it again, with 99 % confidence: from here
        high: to here. That is wider, by the root of two, than the interval of the true figure: another measurement has
            luck of its own.
    """

    value: float
    low: float
    high: float


def spread(figures: Sequence[float]) -> Spread:
    """Of two to `MOST_RACES` figures, by Student's t over their logarithms."""
    if not 2 <= len(figures) <= MOST_RACES:
        raise ValueError(f"{len(figures)} races: two to {MOST_RACES} can be judged")
    logs = [math.log(figure) for figure in figures]
    middle = statistics.mean(logs)
    half = _T_99[len(logs) - 1] * statistics.stdev(logs) * math.sqrt(2 / len(logs))
    return Spread(*(math.exp(middle + off) for off in (0.0, -half, half)))


def ratio_of_races(races: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Spread:
    """The ratio of two times, first over second, from races in processes of their own.

    Args:
        races: Of each process, the two candidates' times, round by round: those of one round were taken one after the
            other, so that drift hits both alike.

    A process's own luck (where its buffers lie, how its code is aligned) hits all its rounds; so each process gives
    one figure, the median over its rounds, and the interval comes from how the processes differ.
    """
    return spread(
        [statistics.median(one / two for one, two in zip(first, second, strict=True)) for first, second in races]
    )
