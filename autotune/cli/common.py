"""What several commands need: reading the task, checking folders, writing JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.chips import get_chip
from autotune.engines._base import Task
from autotune.errors import UsageError
from autotune.kernel import get_kernel


def read_task(arguments: argparse.Namespace) -> Task:
    """The task that KERNEL, --problem and --target name. Raises UsageError."""
    kernel = get_kernel(arguments.kernel)
    return Task(kernel, kernel.parse_problem(arguments.problem), get_chip(arguments.target))


def check_writable(folder: Path) -> None:
    """Raises UsageError unless `folder` can be written, or made; makes nothing."""
    parent = folder.absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise UsageError(f"--results {folder}: {parent} is a file; give a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"--results {folder}: {parent} cannot be written; give another folder")


@contextlib.contextmanager
def reserved_stdout(json_wanted: bool) -> Iterator[None]:
    """While entered, what anybody (child processes too) prints goes to standard error where JSON is wanted."""
    if not json_wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def print_json(document: Any) -> None:
    """Writes the one JSON document of a command."""
    print(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False))
