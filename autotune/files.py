"""Files that must be whole or not be there, and folders that must be writable before the work starts."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from autotune.errors import UsageError


def write_text(path: Path, text: str) -> None:
    """Replaces `path` at once: a kill, or a full disk, leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's own mode would hide it from everybody else.
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def check_writable(folder: Path, given: object = None) -> None:
    """Raises UsageError unless `folder` can be written, or made; makes nothing.

    Args:
        folder: Where something will be written.
        given: What the user calls it in the message; the folder itself if None.
    """
    given = folder if given is None else given
    place = folder.absolute()
    while not _exists(place, given):
        place = place.parent
    if not place.is_dir():
        raise UsageError(f"{given}: {place} is a file; give a folder")
    if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        raise UsageError(f"{given}: {place} cannot be written; give another folder")


def check_file_writable(path: Path, given: object = None) -> None:
    """Raises UsageError unless `path` is a regular file that can be read and written, or can be made."""
    given = path if given is None else given
    if not _exists(path, given):
        check_writable(path.parent, given)
    elif not path.is_file():
        raise UsageError(f"{given}: {path} is no regular file; give another name")
    elif not os.access(path, os.R_OK | os.W_OK):
        raise UsageError(f"{given}: {path} cannot be read and written; give another name")


def _exists(path: Path, given: object) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:  # A name too long, a folder that may not be entered.
        raise UsageError(f"{given}: {error.strerror}") from None
    return True
