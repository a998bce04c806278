"""The search: an Optuna study over a kernel's space, several trials in flight, resumable."""

from autotune.search.interrupt import Interrupt
from autotune.search.loop import Search, SearchSettings, StopReason, check_request
from autotune.search.trials import TrialRecord, counts, fastest_first, reasons

__all__ = [
    "Interrupt",
    "Search",
    "SearchSettings",
    "StopReason",
    "TrialRecord",
    "check_request",
    "counts",
    "fastest_first",
    "reasons",
]
