"""Puts reports together and writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autotune import presets
from autotune.errors import UsageError
from autotune.files import write_text
from autotune.presets import Preset


def write_reports(results: Path, kernels: Sequence[str], formats: Sequence[str]) -> dict[str, list[Path]]:
    """Writes ``reports/<kernel>.<format>`` under `results`; returns the files by kernel.

    Args:
        results: The results folder, whose presets and studies are read.
        kernels: Kernel names; none for all that have presets.
        formats: Of ``md``, ``csv`` and ``html``.

    Raises:
        UsageError: A kernel has no preset there. Nothing has been written then.
        ResultsError: A results file cannot be read. Nothing has been written then.
    """
    found = _read(results)
    for kernel in kernels:
        if kernel not in found:
            raise UsageError(f"{results} has no presets for {kernel}: run `python -m autotune {kernel}` first")
    if not found:
        raise UsageError(f"{results} has no presets: run `python -m autotune KERNEL` first")
    texts = {kernel: _texts(results, kernel, found[kernel], formats) for kernel in kernels or sorted(found)}
    written: dict[str, list[Path]] = {}
    for kernel, by_format in texts.items():
        for extension, text in by_format.items():
            path = results / "reports" / f"{kernel}.{extension}"
            write_text(path, text)
            written.setdefault(kernel, []).append(path)
    return written


def _read(results: Path) -> dict[str, list[Preset]]:
    found: dict[str, list[Preset]] = {}
    for path in presets.files(results / "presets"):
        for preset in presets.read(path):
            found.setdefault(preset.kernel, []).append(preset)
    return found


def _texts(results: Path, kernel: str, entries: Sequence[Preset], formats: Sequence[str]) -> dict[str, str]:
    from autotune.report.document import build, to_html, to_markdown
    from autotune.report.frames import presets_frame

    texts = {}
    document = build(results, kernel, entries) if {"md", "html"} & set(formats) else None
    for extension in formats:
        if extension == "csv":
            texts[extension] = presets_frame(entries).to_csv(index=False, lineterminator="\n")
        elif document is not None:
            texts[extension] = to_markdown(document) if extension == "md" else to_html(document)
    return texts
