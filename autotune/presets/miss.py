"""Tuning a problem that has no preset, by another process, while its training waits."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import filelock

from autotune.chips import Chip
from autotune.kernel import Kernel
from autotune.presets.notice import PresetWarning
from autotune.presets.store import preset_path
from autotune.problem import Problem

RESULTS = Path("results")
STARTING_S = 120.0  # the compiler's start, validation and baselines, besides twice the budget
_tried: set[tuple[str, str, str]] = set()


def tune_now(kernel: Kernel, problem: Problem, chip: Chip, budget_s: float) -> bool:
    """Whether there is a new preset; whatever goes wrong is warned of. Once a problem and process.

    Another process that misses the same problem waits for the first to end, and then finds its preset.
    """
    what = (kernel.name, str(problem), chip.device_kind)
    if what in _tried:
        return False
    _tried.add(what)
    limit_s = 2 * budget_s + STARTING_S
    presets = preset_path(RESULTS / "presets", chip.device_kind, kernel.name)
    before = _state(presets)
    try:
        presets.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(presets.with_name(f".{presets.name}.miss.lock"), timeout=limit_s):
            if _state(presets) != before:
                return True  # Another process has been at it.
            _run(kernel, problem, chip, budget_s, limit_s)
    except Exception as error:  # A training run does not die of it, whatever it is.
        text = f"{kernel.name} {problem} could not be tuned ({error}): going on without"
        warnings.warn(text, PresetWarning, stacklevel=3)
    return _state(presets) != before


def _run(kernel: Kernel, problem: Problem, chip: Chip, budget_s: float, limit_s: float) -> None:
    # A TPU that trains cannot be measured on: what is predicted for it needs none.
    where = ["--target", chip.name, "--engine", "compiler"] if chip.known else ["--engine", "device"]
    command = [sys.executable, "-m", "autotune", kernel.name, "--problem", str(problem), *where]
    command += ["--trials", "10000", "--budget", str(budget_s), "--results", str(RESULTS)]
    with tempfile.TemporaryFile("w+") as words:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=words, stderr=words, timeout=limit_s, start_new_session=True
        )
        if done.returncode:
            words.seek(0)
            last = words.read().strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise RuntimeError(last[0])


def _state(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino
