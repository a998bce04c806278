"""Numbers and tables as people read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.outcome import Source

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 80
METHODS = {
    Source.SCHEDULE: "compiler schedule",
    Source.HLO: "XLA cycle estimate",
    Source.ANALYTIC: "arithmetic alone",
}


def milliseconds(time_ms: float | None) -> str:
    """Four digits and a unit: ``5.907 ms``, ``81.20 µs``."""
    if time_ms is None:
        return "–"
    value, unit = (time_ms, "ms") if time_ms >= 0.1 else (time_ms * 1e3, "µs")
    digits = 0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 10 else 3
    return f"{value:.{digits}f} {unit}"


def memory(nbytes: float) -> str:
    """``1.25 GiB``, ``12.0 MiB``."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**29 else f"{nbytes / 2**20:.1f} MiB"


def seconds(value: float) -> str:
    """``8.3 s``, ``2 min 5 s``."""
    if value < 60:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s"


def times(factor: float | None) -> str:
    """``3.42×``."""
    return "–" if factor is None else f"{factor:.2f}×"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def provenance(source: str | Source | None, target: str) -> str:
    """Whether a time is a prediction or a measurement, in words."""
    if source == Source.DEVICE:
        return f"measured on {target}"
    method = METHODS[Source(source)] if source else "compiler"
    return f"predicted for {target} ({method}), not measured"


def count_text(counts: Mapping[str, int]) -> str:
    """``80 ok, 20 vmem_oom``."""
    return ", ".join(f"{number} {status}" for status, number in counts.items()) or "none"


def console(*, stderr: bool = False) -> Console:
    """A console that adds no colours of its own to numbers; 80 columns where there is no terminal."""
    from rich.console import Console

    class Quiet(Console):
        """Says no more where its reader has gone (``| head``); the work goes on."""

        def on_broken_pipe(self) -> None:
            self.quiet = True

    made = Quiet(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not made.is_terminal:
        made.width = WIDTH
    return made


def table(*columns: str, left: int = 1) -> Any:
    """An empty table; the first `left` columns are words, the others figures."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):
        made.add_column(column, justify="left" if place < left else "right", overflow="fold")
    return made
