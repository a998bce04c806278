"""Presets by their problems: the one for a problem, then the nearest ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from autotune.errors import UsageError
from autotune.kernel import Kernel
from autotune.presets.entry import Preset
from autotune.presets.sources import Candidate
from autotune.problem import Problem, field_kinds

NUMBERS = (int, float)


def distance(problem: Problem, other: Problem) -> float:
    """How far apart two problems are: |log2| of their numbers' ratios, summed; infinite where another field differs.

    An option that one of them has and the other has not (a soft cap, a window) is no matter of degree.
    """
    (form, sizes), (other_form, other_sizes) = split(problem), split(other)
    if form != other_form:
        return math.inf
    return sum(abs(a - b) for a, b in zip(sizes, other_sizes, strict=True))


def split(problem: Problem) -> tuple[tuple[Any, ...], list[float]]:
    """What must be equal of two problems that are near each other, and the logarithms of the numbers that need not."""
    form: list[Any] = []
    sizes: list[float] = []
    for name, (kind, _) in field_kinds(type(problem)).items():
        value = getattr(problem, name)
        if kind in NUMBERS and value:
            form.append(value > 0)
            sizes.append(math.log2(abs(value)))
        else:
            form.append(value)
    return tuple(form), sizes


def problem_of(kernel: Kernel, preset: Preset) -> Problem | None:
    """The preset's problem; None where the kernel has no such problem any more."""
    try:
        return kernel.problem_type.from_dict(preset.problem)
    except UsageError:
        return None


class Index:
    """The presets of one kernel on one device kind.

    Args:
        kernel: Whose.
        candidates: Those that a lookup may take; others are told by `Index.left_out`.
    """

    def __init__(self, kernel: Kernel, candidates: Iterable[Candidate]) -> None:
        self.left_out: list[tuple[Candidate, str]] = []
        self._exact: dict[Problem, list[Candidate]] = {}
        self._alike: dict[tuple[Any, ...], list[tuple[Problem, list[float]]]] = {}
        for candidate in candidates:
            if not candidate.preset.validated:
                self.left_out.append((candidate, "it was never validated"))
            elif (problem := problem_of(kernel, candidate.preset)) is None:
                self.left_out.append((candidate, "the kernel has no such problem any more"))
            else:
                self._exact.setdefault(problem, []).append(candidate)
        for problem, group in self._exact.items():
            group.sort(key=lambda candidate: candidate.priority, reverse=True)
            form, sizes = split(problem)
            self._alike.setdefault(form, []).append((problem, sizes))

    def near(self, problem: Problem) -> Iterator[tuple[float, Candidate]]:
        """The presets that may stand for `problem`, with their distance: nearest first, then by priority."""
        for candidate in self._exact.get(problem, ()):
            yield 0.0, candidate
        form, sizes = split(problem)
        alike = [
            (sum(abs(a - b) for a, b in zip(sizes, theirs, strict=True)), other)
            for other, theirs in self._alike.get(form, ())
            if other != problem
        ]
        others = [(apart, candidate) for apart, other in alike for candidate in self._exact[other]]
        others.sort(key=lambda one: (one[0], [-rank for rank in one[1].priority]))
        yield from others

    def unlike(self, problem: Problem) -> Iterator[Candidate]:
        """Those that cannot stand for `problem`: dtype or an option is another."""
        form, _ = split(problem)
        for other, group in self._alike.items():
            if other != form:
                for their_problem, _ in group:
                    yield from self._exact[their_problem]
