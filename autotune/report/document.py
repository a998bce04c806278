"""A report as headings, sentences and tables, and its two renderings."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from autotune import render
from autotune.foresight import agreement
from autotune.presets import Preset
from autotune.report.frames import (
    batch_frames,
    memory_frame,
    pairs,
    presets_frame,
    progress_frame,
    refused_frame,
    status_frame,
    target_of,
    top_frame,
)
from autotune.search.study import load_records
from autotune.search.trials import TrialRecord

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:75em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0;display:block;overflow-x:auto}"
    "th,td{padding:.25em .8em;border-bottom:1px solid #ccc;text-align:left}"
)


@dataclasses.dataclass(frozen=True)
class Part:
    """A heading of some depth, or a sentence, or a table."""

    content: str | pd.DataFrame
    depth: int = 0


def build(results: Path, kernel: str, presets: Sequence[Preset]) -> list[Part]:
    """The report on one kernel: all presets at a glance, then each with its study where that is at hand."""
    parts = [Part(f"{kernel}: tuned beside baseline", 1), *map(Part, _sources(presets)), Part(_overview(presets))]
    for title, frame in batch_frames(presets).items():
        parts += [Part(f"Time against batch, {title}", 2), Part(_formatted(frame))]
    for preset in presets:
        parts += [Part(f"{target_of(preset)}: {pairs(preset.problem)}", 2), Part(_details(preset))]
        records = load_records(results, preset.study) if preset.study else None
        if records is None:
            parts.append(Part(f"The study {preset.study} is not in this results folder."))
            continue
        parts += [
            Part("Trials by status", 3),
            Part(status_frame(records)),
            Part("Fastest configs", 3),
            Part(_formatted(top_frame(records))),
            *_memory(records),
            *_finals(preset),
            *_foresight(records),
            Part("Best so far", 3),
            Part(_formatted(progress_frame(records))),
        ]
    return parts


def _memory(records: Sequence[TrialRecord]) -> list[Part]:
    """What less memory costs in time, and what did not fit; nothing where everything did."""
    front, refused = memory_frame(records), refused_frame(records)
    parts = []
    if len(refused) and len(front) > 1:
        parts += [Part("Time against memory", 3), Part(_formatted(front))]
    if len(refused):
        parts += [Part("Out of memory", 3), Part(refused)]
    return parts


def _finals(preset: Preset) -> list[Part]:
    """Why a measured preset need not be the fastest of the trials."""
    if not preset.measured:
        return []
    return [Part("Each trial's time is of one process; the finals measured the fastest again, and decided.")]


def _foresight(records: Sequence[TrialRecord]) -> list[Part]:
    """Whether predictions can be trusted on that device."""
    agreed = agreement(records)
    if agreed is None:
        return []
    return [
        Part(
            f"Predicted beside measured, over {agreed.configs} configs: rank correlation {agreed.spearman:.2f} "
            f"(predictions: {render.METHODS[agreed.source]})."
        )
    ]


def to_markdown(parts: Sequence[Part]) -> str:
    """GitHub-flavoured Markdown."""
    blocks = []
    for part in parts:
        if isinstance(part.content, pd.DataFrame):
            blocks.append(_markdown_table(part.content))
        else:
            blocks.append("#" * part.depth + " " * bool(part.depth) + part.content)
    return "\n\n".join(blocks) + "\n"


def to_html(parts: Sequence[Part]) -> str:
    """One page that needs nothing else."""
    title = html.escape(str(parts[0].content))
    body = []
    for part in parts:
        if isinstance(part.content, pd.DataFrame):
            body.append(part.content.to_html(index=False, border=0, na_rep="–"))
        else:
            tag = f"h{part.depth}" if part.depth else "p"
            body.append(f"<{tag}>{html.escape(part.content)}</{tag}>")
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f"<!doctype html>\n<html><head>{head}</head><body>\n" + "\n".join(body) + "\n</body></html>\n"


def _sources(presets: Sequence[Preset]) -> list[str]:
    """Says of all times at once whether they are predictions or measurements."""
    targets: dict[str | None, dict[str, None]] = {}
    for preset in presets:
        targets.setdefault(preset.method, {})[target_of(preset)] = None
    return [f"Times are {render.provenance(method, ', '.join(names))}." for method, names in targets.items()]


def _overview(presets: Sequence[Preset]) -> pd.DataFrame:
    frame = presets_frame(presets)
    return pd.DataFrame(
        {
            "target": frame["target"],
            "problem": frame["problem"],
            "tuned": frame["time_ms"].map(_time),
            "default": frame["default_ms"].map(_time),
            "xla": frame["xla_ms"].map(_time),
            "over default": frame["speedup_default"].map(_factor),
            "over xla": frame["speedup_xla"].map(_factor),
            "bound": frame["bound"].fillna("–"),
            "of roofline": frame["roofline_share"].map(lambda share: render.percent(_known(share))),
            "relative error": frame["max_rel_error"].map(lambda error: "–" if pd.isna(error) else f"{error:.1e}"),
            "source": frame["source"],
            "config": frame["config"].str.replace(",", ", "),
        }
    )


def _details(preset: Preset) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in preset.versions.items())
    surely = ""
    for name, figures in preset.baselines.items():
        if (interval := figures.get("speedup_interval")) and (ratio := preset.speedup(name)) is not None:
            low, high = interval
            surely += f" Over {name}: {ratio:.3f}×, {low:.3f} to {high:.3f} with 99 % confidence."
    origin = f"{preset.source.capitalize()} with the {preset.engine} engine ({versions}) on {preset.date}"
    timer = f" Timer: {preset.timer}." if preset.timer else ""
    return f"Config `{pairs(preset.config)}`. {origin}.{timer}{surely}"


def _formatted(frame: pd.DataFrame) -> pd.DataFrame:
    """Times with their unit; nothing where nothing is known."""
    times = {name: name.removesuffix("_ms") for name in frame.columns if name.endswith("_ms")}
    return frame.assign(**{name: frame[name].map(_time) for name in times}).rename(columns=times).fillna("–")


def _markdown_table(frame: pd.DataFrame) -> str:
    rows = [list(frame.columns), ["---"] * len(frame.columns), *frame.astype(object).values.tolist()]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)


def _known(value: float | None) -> float | None:
    return None if pd.isna(value) else value


def _time(value: float | None) -> str:
    return render.milliseconds(_known(value))


def _factor(value: float | None) -> str:
    return render.times(_known(value))
