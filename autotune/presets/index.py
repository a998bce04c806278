"""Presets by their problems: the one for a problem, then the nearest ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from autotune.errors import UsageError
from autotune.kernel import Kernel
from autotune.presets.entry import Preset
from autotune.presets.sources import Candidate
from autotune.problem import Problem


def distance(problem: Problem, other: Problem) -> float:
    """How far apart two problems are: |log2| of their sizes' ratios, summed; infinite where anything else differs."""
    (form, sizes), (other_form, other_sizes) = problem.likeness(), other.likeness()
    if form != other_form:
        return math.inf
    return sum(abs(a - b) for a, b in zip(sizes, other_sizes, strict=True))


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
            form, sizes = problem.likeness()
            self._alike.setdefault(form, []).append((problem, sizes))

    def near(self, problem: Problem) -> Iterator[tuple[float, Candidate]]:
        """The presets that may stand for `problem`, with their distance: nearest first, then by priority."""
        for candidate in self._exact.get(problem, ()):
            yield 0.0, candidate
        form, sizes = problem.likeness()
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
        form, _ = problem.likeness()
        for other, group in self._alike.items():
            if other != form:
                for their_problem, _ in group:
                    yield from self._exact[their_problem]
