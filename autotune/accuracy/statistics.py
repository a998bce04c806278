"""How well predictions rank and how far they are off. Times are in any one unit; all functions take equal lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def ranks(values: Sequence[float]) -> np.ndarray:
    """1 for the smallest; equal values share the mean of their places."""
    array = np.asarray(values, dtype=float)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse.ravel()]


def spearman(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Correlation of the ranks; None where one side is constant or fewer than two rows exist."""
    a, b = ranks(predicted), ranks(measured)
    a, b = a - a.mean() if a.size else a, b - b.mean() if b.size else b
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / scale if scale else None


def kendall(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Tau-b: pairs in the same order less pairs in the opposite one, with ties taken out of the denominator."""
    a, b = (np.asarray(values, dtype=float) for values in (predicted, measured))
    upper = np.triu_indices(a.size, 1)
    sign_a, sign_b = (np.sign(v[:, None] - v[None, :])[upper] for v in (a, b))
    scale = float(np.sqrt((sign_a != 0).sum() * (sign_b != 0).sum()))
    return float((sign_a * sign_b).sum()) / scale if scale else None


def regret(predicted: Sequence[float], measured: Sequence[float], best: float, top: int) -> float | None:
    """How much slower than `best` the fastest of the `top` rows is that the predictions put first, in percent.

    Args:
        best: The least time measured in the whole sweep, rows that could not be predicted included.
        top: How many of the first-ranked rows one would try on the device. Rows predicted equal come in the
            worst order, so that the order of a file (often the measured one) cannot help.
    """
    if not len(predicted):
        return None
    predictions, times = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
    chosen = np.lexsort((-times, predictions))[:top]
    return 100 * (float(times[chosen].min()) / best - 1)


def median_ratio(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """The median of predicted over measured: below 1 where predictions are too fast."""
    ratios = _ratios(predicted, measured)
    return float(np.median(ratios)) if ratios.size else None


def mean_abs_error(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """The mean of |predicted / measured - 1|, in percent."""
    ratios = _ratios(predicted, measured)
    return 100 * float(np.abs(ratios - 1).mean()) if ratios.size else None


def _ratios(predicted: Sequence[float], measured: Sequence[float]) -> np.ndarray:
    return np.asarray(predicted, dtype=float) / np.asarray(measured, dtype=float)
