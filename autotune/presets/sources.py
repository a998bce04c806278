"""Where presets are looked for, and their cached contents."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import difflib
import functools
import hashlib
import json
import os
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.chips import slug
from autotune.errors import ResultsError, UsageError
from autotune.kernel import kernel_names
from autotune.presets import store
from autotune.presets.entry import Preset
from autotune.presets.notice import warn_once

ENVIRONMENT = "AUTOTUNE_PRESETS"
_PACKAGE = Path(__file__).resolve().parent.parent

_NOTHING: Mapping[str, dict[str, Any]] = types.MappingProxyType({})
_pinned: contextvars.ContextVar[Mapping[str, dict[str, Any]]] = contextvars.ContextVar("pinned", default=_NOTHING)
_in_use: contextvars.ContextVar[tuple[Given, ...]] = contextvars.ContextVar("in_use", default=())

# A file as it is now: path, time of change, size, inode (a replaced file has another); None where there is none.
Stamp = tuple[str, int, int, int] | None


@dataclasses.dataclass(frozen=True)
class Given:
    """Presets that `using` put before all others.

    Attributes:
        place: The file or folder.
        presets: As they were when it was entered.
        digest: Of these.
    """

    place: str
    presets: tuple[Preset, ...] = dataclasses.field(compare=False)
    digest: str


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A preset that a lookup may take.

    Attributes:
        preset: It.
        place: The file or folder it is from.
        priority: Of two for the same problem the higher wins. What `using` gave comes first, the innermost before the
            others; then what was validated; then a measurement before a prediction; then the later place of the path.
    """

    preset: Preset
    place: str
    priority: tuple[int, bool, bool, int]


def search_path() -> list[Path]:
    """Presets folders and files, later ones first asked: the package's, the project's, ``$AUTOTUNE_PRESETS``."""
    return [Path(place) for place in _places() if os.path.exists(place)]


def _places() -> list[str]:
    return _places_of(os.getcwd(), os.environ.get(ENVIRONMENT, ""))


@functools.lru_cache(maxsize=64)
def _places_of(folder: str, variable: str) -> list[str]:
    shipped = _PACKAGE / "data" / "presets"
    if not shipped.is_dir():  # An editable install: the source tree's own results.
        shipped = _PACKAGE.parent / "results" / "presets"
    own = os.path.join(folder, "results", "presets")
    given = [os.path.join(folder, os.path.expanduser(place)) for place in variable.split(os.pathsep) if place]
    for place in given:  # Presets that were meant and are not used would cost time that nobody sees.
        if not os.path.exists(place):
            warn_once(f"${ENVIRONMENT}: {place} does not exist (yet); give preset files and presets folders")
        elif not os.path.isdir(place) and not place.endswith(".json"):
            raise ResultsError(f"${ENVIRONMENT}: {place} is no presets folder, and no file of presets (.json)")
    return list(dict.fromkeys([str(shipped), own, *given]))


@contextlib.contextmanager
def using(presets: str | os.PathLike[str] | Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Puts presets before all others, in this context and the calls made from it.

    Functions that were jitted outside are traced anew in here, and have their own program again outside; the same
    presets given again cost no new trace.

    Args:
        presets: A preset file, a presets folder, or kernel name to config (for every problem of that kernel).

    Raises:
        ResultsError: The file cannot be read or does not exist.
        UsageError: `presets` is none of these.

    Example:
        >>> with using({"matmul": {"block_m": 512, "block_n": 512, "block_k": 512}}):
        ...     pass
    """
    variable: contextvars.ContextVar[Any]
    value: Any
    if isinstance(presets, Mapping):
        variable, value = _pinned, {**_pinned.get(), **_checked(presets)}
    elif not isinstance(presets, str | os.PathLike):
        raise UsageError(f"{presets!r}: give a preset file, a presets folder, or kernel name to config")
    elif Path(presets).exists():
        found = tuple(_load(Path(presets)))
        text = json.dumps([preset.to_dict() for preset in found], sort_keys=True)
        given = Given(os.fspath(presets), found, hashlib.sha256(text.encode()).hexdigest())
        variable, value = _in_use, (*_in_use.get(), given)
    else:
        raise ResultsError(f"{presets} does not exist: give a preset file or a presets folder")
    token = variable.set(value)
    try:
        with jit_context()(given_digest()):
            yield
    finally:
        variable.reset(token)


def _checked(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The configs given by kernel; a name that looks mistyped is warned of: it may be a tunable function's."""
    for kernel, config in configs.items():
        if not isinstance(kernel, str) or not isinstance(config, Mapping):
            raise UsageError(f"{kernel!r}: {config!r} must be kernel name to config, {{'matmul': {{'block_m': 512}}}}")
        known = kernel_names()
        if kernel not in known and (near := difflib.get_close_matches(kernel, known, n=1)):
            warn_once(f"presets.using: there is no kernel {kernel!r}; did you mean {near[0]!r}?")
    return {kernel: dict(config) for kernel, config in configs.items()}


@functools.cache
def jit_context() -> Any:
    """A context whose value is a part of the key of `jax.jit`'s caches.

    Making it costs every function that was traced before another trace: the kernels make it when they are imported.
    """
    import jax  # What is entered here is meant for code that traces.

    return jax.make_user_context(default_value=None)


def given_digest() -> str | None:
    """Of all that `using` has put before the search path; None where it has put nothing."""
    pinned, given = _pinned.get(), _in_use.get()
    if not pinned and not given:
        return None
    parts = [sorted((kernel, sorted(config.items())) for kernel, config in pinned.items()), [g.digest for g in given]]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def pinned(kernel: str) -> dict[str, Any] | None:
    """The config that `using` gave for every problem of `kernel`."""
    return _pinned.get().get(kernel)


def stamps(kernel: str, device_kind: str) -> tuple[Stamp, ...]:
    """The files of the search path that hold presets of `kernel` on `device_kind`, as they are now.

    Asked at every lookup, for a file may change at any time: hence as cheap as it can be.
    """
    found: list[Stamp] = []
    for place in _places():
        path = place if place.endswith(".json") else f"{place}/{_file(kernel, device_kind)}"
        try:
            stat = os.stat(path)
        except FileNotFoundError:
            found.append(None)
            continue
        except OSError as error:
            raise store.unreadable(path, error) from None
        found.append((path, stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _file(kernel: str, device_kind: str) -> str:
    return f"{slug(device_kind)}/{kernel}.json"


def given() -> tuple[Given, ...]:
    """What `using` has put before the search path, the innermost last."""
    return _in_use.get()


def candidates(
    kernel: str, device_kind: str, files: tuple[Stamp, ...], extra: tuple[Given, ...]
) -> Iterator[Candidate]:
    """The presets of `kernel` on `device_kind`, from the files of the search path and from what `using` gave.

    Raises:
        ResultsError: A file cannot be read.
    """
    groups = [(0, stamp[0], _cached(*stamp)) for stamp in files if stamp is not None]
    groups += [(number, one.place, list(one.presets)) for number, one in enumerate(extra, start=1)]
    for place, (explicit, where, presets) in enumerate(groups):
        for preset in presets:
            if preset.kernel == kernel and preset.device_kind == device_kind:
                yield Candidate(preset, where, (explicit, preset.validated, preset.measured, place))


def _load(path: Path) -> list[Preset]:
    if path.is_dir():
        return [preset for file in store.files(path) for preset in _load(file)]
    try:
        stat = path.stat()
    except OSError:
        return store.read(path)  # Says what is wrong, unless it only is not there.
    return _cached(str(path), stat.st_mtime_ns, stat.st_size, stat.st_ino)


@functools.lru_cache(maxsize=256)
def _cached(path: str, mtime_ns: int, size: int, inode: int) -> list[Preset]:
    """Parsed once per version of the file."""
    return store.read(Path(path))
