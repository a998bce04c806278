"""Errors that a user can act on. Each message is one line: what is wrong, and what would be right."""

from __future__ import annotations


class AutotuneError(Exception):
    """Base of every error this project raises on purpose."""


class UsageError(AutotuneError):
    """The request cannot be met as written (an unknown name, a bad value). The command line exits with 2."""


class UnavailableError(AutotuneError):
    """Something that the machine lacks (a TPU compiler, a device) is needed for this request."""


class ResultsError(UsageError):
    """A results file cannot be read. It is left untouched."""


def one_of(names) -> str:
    """``a, b or c``: how an error message lists what would have been right."""
    *init, last = [str(name) for name in names]
    return f"{', '.join(init)} or {last}" if init else last
