"""Standard input, output and error, as a shell may leave them: closed, full, ASCII, or a pipe that nobody reads."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

# While standard output is reserved for a JSON document: where that goes.
_reserved: tuple[int, TextIO] | None = None


def prepare() -> None:
    """Makes writing safe, whatever the three streams are."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # Closed: the next file opened would take its place, and get what children print.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for number, name, errors in ((1, "stdout", "replace"), (2, "stderr", "backslashreplace")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False, errors=errors))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)


@contextlib.contextmanager
def reserved_stdout(json_wanted: bool) -> Iterator[None]:
    """While entered, what anybody (child processes too) prints goes to standard error where JSON is wanted.

    `print_json` alone writes to standard output then. Entering it again changes nothing.
    """
    global _reserved
    if not json_wanted or _reserved is not None:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    _reserved = (kept, sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _reserved = None
        os.dup2(kept, 1)
        os.close(kept)


def print_json(document: Any) -> None:
    """Writes the one JSON document of a command."""
    stream = _reserved[1] if _reserved else sys.stdout
    # Where the terminal cannot show a letter, its escape is still the same document.
    ascii_only = "utf" not in (getattr(stream, "encoding", None) or "").lower()
    text = json.dumps(document, indent=1, ensure_ascii=ascii_only, allow_nan=False)
    with contextlib.suppress(BrokenPipeError), _given_back():
        print(text, file=stream, flush=True)


@contextlib.contextmanager
def _given_back() -> Iterator[None]:
    if _reserved is None:
        yield
        return
    os.dup2(_reserved[0], 1)
    try:
        yield
    finally:
        os.dup2(2, 1)


def flush_stdout() -> None:
    """Writes out what is buffered. What cannot be written is dropped, or Python would try again when it exits.

    Raises:
        OSError: It could not be written, but for a reader that has gone.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop()
    except OSError:
        _drop()
        raise


def _drop() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
