"""What all processes' answers to one job come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.outcome import Status

_MOST = ("compile_s", "run_s", "peak_bytes", "process_peak_bytes")


def refused(result: Any) -> bool:
    """Whether a job's result says that it did not work."""
    return isinstance(result, dict) and result.get("status", Status.OK.value) != Status.OK.value


def merged(names: Sequence[str], results: Sequence[Any]) -> Any:
    """One result: the first refusal, or what the slowest and largest took. Times agree already: they are taken in step.

    Args:
        names: Of the processes.
        results: Theirs; None of one that was stopped because another had failed.
    """
    for name, result in zip(names, results, strict=True):
        if refused(result):
            return {**result, "message": f"{name}: {result.get('message', '')}"}
    first = dict(results[0])
    for name, result in zip(names, results, strict=True):
        if result.get("program") != first.get("program"):
            why = f"{name} lowered another program than {names[0]}: are its presets or its settings others?"
            return {"status": Status.LOWERING_ERROR.value, "message": why}
    for figure in _MOST:
        if (found := [result[figure] for result in results if result.get(figure) is not None]) and figure in first:
            first[figure] = max(found)
    return first
