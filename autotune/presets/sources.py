"""Where presets are looked for, and their cached contents."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import ResultsError
from autotune.presets import store
from autotune.presets.entry import Preset

ENVIRONMENT = "AUTOTUNE_PRESETS"
_PACKAGE = Path(__file__).resolve().parent.parent

_NOTHING: Mapping[str, dict[str, Any]] = types.MappingProxyType({})
_pinned: contextvars.ContextVar[Mapping[str, dict[str, Any]]] = contextvars.ContextVar("pinned", default=_NOTHING)
_in_use: contextvars.ContextVar[tuple[tuple[Preset, ...], ...]] = contextvars.ContextVar("in_use", default=())


def search_path() -> list[Path]:
    """Presets folders and files, later ones first asked: the package's, the project's, ``$AUTOTUNE_PRESETS``."""
    shipped = _PACKAGE / "data" / "presets"
    if not shipped.is_dir():  # An editable install: the source tree's own results.
        shipped = _PACKAGE.parent / "results" / "presets"
    places = [shipped, Path.cwd() / "results" / "presets"]
    places += [Path(place) for place in os.environ.get(ENVIRONMENT, "").split(os.pathsep) if place]
    return [place for place in dict.fromkeys(places) if place.exists()]


@contextlib.contextmanager
def using(presets: str | os.PathLike[str] | Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Puts presets before all others, in this context and the calls made from it.

    Args:
        presets: A preset file, a presets folder, or kernel name to config (for every problem of that kernel).

    Raises:
        ResultsError: The file cannot be read or does not exist.

    Example:
        >>> with using({"matmul": {"block_m": 512, "block_n": 512, "block_k": 512}}):
        ...     pass
    """
    if isinstance(presets, Mapping):
        variable, value = _pinned, {**_pinned.get(), **{kernel: dict(config) for kernel, config in presets.items()}}
    elif Path(presets).exists():
        variable, value = _in_use, (*_in_use.get(), tuple(_load(Path(presets))))
    else:
        raise ResultsError(f"{presets} does not exist: give a preset file or a presets folder")
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def pinned(kernel: str) -> dict[str, Any] | None:
    """The config that `using` gave for every problem of `kernel`."""
    return _pinned.get().get(kernel)


def candidates(kernel: str, device_kind: str) -> Iterator[tuple[tuple[int, bool, bool, int], Preset]]:
    """The presets of `kernel` on `device_kind`, each with its priority (the highest wins).

    What `using` gave comes first, the innermost before the others; then what was validated; then a measurement
    before a prediction; then the later place of the search path.
    """
    groups: list[tuple[int, Sequence[Preset]]] = []
    for place in search_path():
        groups.append((0, _load(place if place.is_file() else store.preset_path(place, device_kind, kernel))))
    groups += enumerate(_in_use.get(), start=1)
    for place, (explicit, presets) in enumerate(groups):
        for preset in presets:
            if preset.kernel == kernel and preset.device_kind == device_kind:
                yield (explicit, preset.validated, preset.measured, place), preset


def _load(path: Path) -> list[Preset]:
    if path.is_dir():
        return [preset for file in store.files(path) for preset in _load(file)]
    try:
        stat = path.stat()
    except OSError:
        return store.read(path)  # Says what is wrong, unless it only is not there.
    return _cached(path, stat.st_mtime_ns, stat.st_size, stat.st_ino)


@functools.lru_cache(maxsize=256)
def _cached(path: Path, mtime_ns: int, size: int, inode: int) -> list[Preset]:
    """Parsed once per version of the file: a replaced file has another inode."""
    return store.read(path)
