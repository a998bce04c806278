"""Predicted against measured, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autotune.accuracy.run import Result
from autotune.errors import UnavailableError, UsageError


def check_plot(path: Path) -> None:
    """Raises before any work is done where the picture could not be written afterwards."""
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.absolute().parent}")
    try:
        import matplotlib
    except ImportError:
        raise UnavailableError("--plot needs matplotlib: pip install 'tpu-autotune[plot]'") from None
    from matplotlib.backend_bases import FigureCanvasBase

    del matplotlib
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise UsageError(f"--plot {path}: end the name with one of {', '.join(sorted(known))}")


def write_plot(results: Sequence[Result], path: Path) -> None:
    """Log-log, one colour a table, fitted tables as open circles; a point on the line is a perfect prediction."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colors = colormaps["tab20"]
    times: list[float] = []
    for number, result in enumerate(results):
        rows = [(one.row.measured_ms, one.predicted_ms) for one in result.predicted]
        if not rows:
            continue
        measured, predicted = zip(*rows, strict=True)
        times += [*measured, *predicted]
        table, color = result.table, colors(number)
        role = "fitted" if table.fitted else "held out, wall clock" if table.wall_clock else "held out"
        axes.scatter(
            measured,
            predicted,
            s=24,
            label=f"{table.name} ({role}, {len(rows)})",
            edgecolors=color,
            facecolors="none" if table.fitted else color,
            alpha=0.8,
        )
    if times:
        ends = [min(times) / 1.3, max(times) * 1.3]
        axes.plot(ends, ends, color="black", linewidth=1, zorder=0, label="predicted = measured")
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
        axes.legend(fontsize="small")
    axes.set(xlabel="measured on the TPU, ms", ylabel="predicted without it, ms")
    axes.set_title("Time of one call: predicted against measured")
    axes.grid(which="both", linewidth=0.3)
    figure.savefig(path, dpi=150)
