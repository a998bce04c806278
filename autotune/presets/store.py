"""Preset files: one per device kind and kernel, a JSON list, readable and diffable."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import filelock

from autotune.chips import slug
from autotune.errors import ResultsError
from autotune.files import write_text
from autotune.presets.entry import Preset


def preset_path(folder: Path, device_kind: str, kernel: str) -> Path:
    """Where the presets of `kernel` on `device_kind` are, under a presets folder."""
    return folder / slug(device_kind) / f"{kernel}.json"


def read(path: Path) -> list[Preset]:
    """The presets in a file; none where there is no file.

    Raises:
        ResultsError: The file is not a list of presets. It is left as it is.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(entries, list):
            raise ValueError("it must be a list of presets")
        presets = [Preset.from_dict(fields) for fields in entries]
        _text(presets).encode()  # What could not be written again must not be found out after a search.
        return presets
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:  # Bad JSON and bad UTF-8 are ValueErrors.
        raise unreadable(path, error) from None


def unreadable(path: str | Path, error: Exception) -> ResultsError:
    """What to raise where `error` keeps the file from being read."""
    why: object = error
    if isinstance(error, OSError) and error.strerror:
        why = error.strerror
    elif isinstance(error, json.JSONDecodeError) and error.pos >= len(error.doc.rstrip()):
        why = f"it is cut off after {len(error.doc)} characters" if error.doc.strip() else "it is empty"
    return ResultsError(f"{path} cannot be read as presets ({why}): repair it or move it away")


def save(
    path: Path,
    preset: Preset,
    usable: Callable[[Preset], bool] = lambda preset: True,
    same: Callable[[Preset], bool] | None = None,
) -> bool:
    """Keeps `preset` if it beats those for the same problem, and says whether it did.

    Safe beside other processes that write the same file, and a kill at any moment leaves the old file or
    the new one.

    Args:
        path: The file.
        preset: A validated preset.
        usable: Whether a lookup could use an older one at all: what it could not never stays for being faster.
        same: Whether an older one is for the same problem; None compares what is written. (A kernel's problems may
            have got new fields since.)

    Raises:
        ValueError: The preset was not validated.
        ResultsError: The file cannot be read. It is left as it is.
    """
    if not preset.validated:
        raise ValueError("a config that was not shown right never becomes a preset")
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        presets = read(path)
        same = same or (lambda old: old.problem == preset.problem)
        places = [i for i, old in enumerate(presets) if same(old)]
        if any(usable(presets[i]) and not preset.beats(presets[i]) for i in places):
            return False
        if not places:
            places = [len(presets)]
        kept = [old for i, old in enumerate(presets) if i not in places]
        kept.insert(places[0], preset)
        write_text(path, _text(kept))
    return True


def files(folder: Path) -> Iterator[Path]:
    """The preset files under a presets folder, sorted."""
    return iter(sorted(folder.glob("*/*.json")))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock lies beside the file, for the file itself is replaced."""
    with filelock.FileLock(path.with_name(f".{path.name}.lock")).acquire(poll_interval=0.005):
        yield


def _text(presets: Sequence[Preset]) -> str:
    entries = [preset.to_dict() for preset in presets]
    return json.dumps(entries, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
