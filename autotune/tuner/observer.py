"""Who is told how a run goes."""

from __future__ import annotations

from autotune.search import TrialRecord


class Observer:
    """Is told how a run goes. Every method may be overridden and does nothing here."""

    def started(self, study: str, known: list[TrialRecord], trials: int) -> None:
        """The study is open; `known` are the trials of earlier runs, `trials` the number aimed at."""

    def trial(self, record: TrialRecord) -> None:
        """A trial ended."""

    def validating(self, record: TrialRecord) -> None:
        """The fastest config so far is being compared with the reference."""

    def validated(self, record: TrialRecord) -> None:
        """Its verdict is known."""

    def says(self, line: str) -> None:
        """What goes on beside the trials."""
