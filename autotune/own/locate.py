"""How another process finds a function: by its module, or by its script's file."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.errors import UsageError

_SCRIPT = "autotune_script"  # what a script is called here: not __main__, so that what it guards is not done again
_loading = False


class LoadedSoFar(BaseException):
    """A script that is being loaded came to where it tunes: what it defines before is what is wanted."""


def path_of(function: Callable[..., Any]) -> str:
    """``module:name``, or ``file.py:name`` of a script.

    Raises:
        UsageError: No other process can find it.
    """
    module, name = function.__module__, function.__qualname__
    if "<" in name:
        raise UsageError(f"{name}: other processes cannot find it; define it in a module, not inside a function")
    if module not in ("__main__", _SCRIPT):
        return f"{module}:{name}"
    file = getattr(sys.modules[module], "__file__", None)
    if file is None or not os.path.isfile(file):
        raise UsageError(
            f"{name}: it is defined in a notebook or at a prompt, where other processes cannot find it; "
            "put it into a file"
        )
    return f"{os.path.abspath(file)}:{name}"


def stop_if_loading() -> None:
    """Ends the loading of a script here: it is only wanted for what it defines."""
    if _loading:
        raise LoadedSoFar


def find(path: str) -> Any:
    """What `path_of` names.

    Raises:
        UsageError: It is not there.
    """
    place, _, name = path.rpartition(":")
    module = _script(place) if place.endswith(".py") else importlib.import_module(place)
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        raise UsageError(f"{place} defines no {name}, or not before it tunes: define it first") from None


@functools.cache
def _script(file: str) -> Any:
    """The script as a module, up to where it tunes or prints what it has tuned."""
    global _loading
    spec = importlib.util.spec_from_file_location(_SCRIPT, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_SCRIPT] = module
    sys.path.insert(0, str(Path(file).parent))
    _loading = True
    try:
        spec.loader.exec_module(module)
    except LoadedSoFar:
        pass
    finally:
        _loading = False
    return module
