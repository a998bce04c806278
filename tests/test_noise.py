"""What noisy times are taken to show."""

from __future__ import annotations

import math
import random

import pytest

from autotune.noise import MOST_RACES, median_interval, ratio_of_races, spread


def test_the_interval_of_a_median_holds_it_as_often_as_it_says():
    draw = random.Random(1)
    for count in (7, 12, 31):
        held = 0
        for _ in range(2000):
            _, low, high = median_interval([draw.lognormvariate(0, 1) for _ in range(count)])
            held += low <= 1.0 <= high
        assert held >= 0.94 * 2000, count


def test_few_samples_have_their_range_for_an_interval():
    assert median_interval([3.0]) == (3.0, 3.0, 3.0)
    assert median_interval([1.0, 2.0, 9.0]) == (2.0, 1.0, 9.0)
    # Of six, the chance that all lie on one side of the median is 1/32: less than 5 %.
    assert median_interval([1, 2, 3, 4, 5, 6]) == (3.5, 1, 6)
    # Of nine, 2 (1 + 9) / 512 = 3.9 % lie outside the second and the eighth.
    assert median_interval(list(range(1, 10))) == (5, 2, 8)


def races(draw: random.Random, ratio: float, *, processes: int = 7, rounds: int = 11):
    """Two candidates whose times drift together, in processes that each favour one of them a little."""
    made = []
    for _ in range(processes):
        luck = draw.gauss(0, 0.01)
        drift = [draw.uniform(0.8, 1.5) for _ in range(rounds)]
        noisy = [(d * ratio * math.exp(luck + draw.gauss(0, 0.02)), d * math.exp(draw.gauss(0, 0.02))) for d in drift]
        made.append(tuple(zip(*noisy, strict=True)))
    return made


def test_equal_candidates_are_declared_faster_hardly_ever():
    draw = random.Random(2)
    declared = sum(ratio_of_races(races(draw, 1.0)).low > 1 for _ in range(1000))
    assert declared <= 5  # fewer than one in 200


def test_a_real_gain_is_seen_and_another_measurement_gives_it_within_the_interval():
    draw = random.Random(3)
    found = [(ratio_of_races(races(draw, 1.1)), ratio_of_races(races(draw, 1.1))) for _ in range(500)]
    assert sum(one.low > 1 for one, _ in found) > 450
    assert sum(one.low <= 1.1 <= one.high for one, _ in found) >= 0.99 * 500
    held = sum(one.low <= other.value <= one.high for one, other in found)
    assert 0.98 * 500 <= held <= 0.999 * 500  # and not by being wider than it says


def test_a_spread_is_students_interval_of_the_logarithms():
    one = spread([2.0, 8.0])
    assert one.value == pytest.approx(4.0)
    half = 63.657 * (math.log(4) / math.sqrt(2)) * math.sqrt(2 / 2)
    assert math.log(one.high / one.value) == pytest.approx(half, rel=1e-4)
    assert one.low * one.high == pytest.approx(one.value**2)
    for count in (1, MOST_RACES + 1):
        with pytest.raises(ValueError, match="races"):
            spread([1.0] * count)
