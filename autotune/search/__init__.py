"""The search: an Optuna study over a kernel's space, several trials in flight, resumable."""

from autotune.search.interrupt import Interrupt
from autotune.search.loop import Search, SearchSettings, StopReason
from autotune.search.trials import TrialRecord, counts, fastest_first

__all__ = ["Interrupt", "Search", "SearchSettings", "StopReason", "TrialRecord", "counts", "fastest_first"]
