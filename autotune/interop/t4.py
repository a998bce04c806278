"""kernel_tuner's T4: the results of a tuning run, one record a config.

Source: the schema ``T4/1.0.0/results-schema.json`` of kernel_tuner 1.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.outcome import Status
from autotune.presets import Preset
from autotune.search import TrialRecord

VERSION = "1.0.0"
_INVALIDITY = {
    Status.OK: "correct",
    Status.INVALID: "constraints",
    Status.LOWERING_ERROR: "compile",
    Status.VMEM_OOM: "compile",
    Status.HBM_OOM: "compile",
    Status.COMPILE_ERROR: "compile",
    Status.RUNTIME_ERROR: "runtime",
    Status.CRASH: "runtime",
    Status.WRONG_RESULT: "correctness",
    Status.TIMEOUT: "timeout",
}


def document(preset: Preset, records: Sequence[TrialRecord]) -> dict[str, Any]:
    """The run that a preset came from.

    Args:
        preset: What was found.
        records: Its trials; none where the study is not at hand: then the preset's config alone.
    """
    results = [_result(record) for record in records] or [_of_preset(preset)]
    about = {
        "timeunit": "milliseconds",
        "kernel": preset.kernel,
        "device": preset.device_kind,
        "problem": dict(preset.problem),
        "times": preset.source,  # predicted, or measured
        "engine": preset.engine,
        "versions": dict(preset.versions),
    }
    return {"schema_version": VERSION, "metadata": about, "results": results}


def _result(record: TrialRecord) -> dict[str, Any]:
    outcome = record.outcome
    status = record.status
    values: dict[str, Any] = {"time": outcome.time_ms, "peak_bytes": outcome.peak_bytes}
    if outcome.source is not None:
        values["source"] = outcome.source.value
    return _written(
        dict(record.config),
        invalidity=_INVALIDITY[status],
        # Only finalists are held against the reference: what was not, was not shown wrong.
        correctness=0 if status is Status.WRONG_RESULT else 1,
        compile_s=outcome.compile_s,
        values=values,
    )


def _of_preset(preset: Preset) -> dict[str, Any]:
    written = _written(
        dict(preset.config),
        invalidity="correct",
        correctness=1,
        compile_s=None,
        values={"time": preset.time_ms, "source": preset.method},
    )
    return written | ({"timestamp": preset.date} if preset.date else {})


def _written(
    configuration: dict[str, Any], *, invalidity: str, correctness: int, compile_s: float | None, values: dict[str, Any]
) -> dict[str, Any]:
    units = {"time": "ms", "peak_bytes": "B"}
    return {
        "configuration": configuration,
        "times": {"compilation_time": 1e3 * (compile_s or 0.0), "runtimes": []},
        "invalidity": invalidity,
        "correctness": correctness,
        "objectives": ["time"],
        "measurements": [
            {"name": name, "value": value, "unit": units.get(name, "")}
            for name, value in values.items()
            if value is not None
        ],
    }
