"""Where studies are kept: a journal file by default, a database on request."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

from autotune.errors import ResultsError, UsageError

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

DATABASES = ("sqlite", "postgresql", "mysql")
JOURNAL_SUFFIX = ".journal"
LONGEST_RECORD = 1_000_000  # bytes


def journal_path(storage: str | None, results: Path, study: str) -> Path | None:
    """The journal file that `storage` means, or None where it means a database.

    Args:
        storage: ``journal:PATH``, a path, a database's URL, or None for a file of the study's own.
        results: The results folder.
        study: The study's name.

    Raises:
        UsageError: An unknown kind of URL.
    """
    if storage is None:
        return results / "studies" / f"{study}{JOURNAL_SUFFIX}"
    scheme, colon, rest = storage.partition(":")
    if scheme == "journal" and rest:
        return Path(rest)
    if not colon or (os.sep in scheme) or len(scheme) == 1:
        return Path(storage)
    if scheme.split("+")[0] in DATABASES and rest.startswith("//"):
        return None
    raise UsageError(f"--storage {storage}: use a path, journal:PATH, sqlite:///PATH or postgresql://USER@HOST/NAME")


def open_storage(storage: str | None, results: Path, study: str) -> BaseStorage:
    """Opens (and creates, where needed) the storage.

    Raises:
        ResultsError: The file or database cannot be read.
    """
    path = journal_path(storage, results, study)
    return _open_database(storage or "") if path is None else _open_journal(path)


def _open_journal(path: Path) -> BaseStorage:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    if path.is_dir():
        raise ResultsError(f"{path} is a folder: --storage needs a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _JournalLock(path)
        lock.acquire()
        try:
            _drop_torn_record(path)
        finally:
            lock.release()
        return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))  # type: ignore[arg-type]
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ResultsError(f"{path} cannot be read as a study ({error}): move it away, or give --storage") from None


def _open_database(url: str) -> BaseStorage:
    from optuna.storages import RDBStorage

    try:
        return RDBStorage(url)
    except ImportError as error:
        raise UsageError(f"--storage {url}: its driver is not installed ({error})") from None
    except Exception as error:  # SQLAlchemy and each driver have errors of their own.
        reason = str(error).strip().splitlines()[0]
        raise ResultsError(f"--storage {url} cannot be opened: {reason}") from None


def _drop_torn_record(path: Path) -> None:
    """Cuts a record that a power cut left half written: anything appended to it would be unreadable.

    Raises:
        ValueError: It is no journal, but somebody's other file.
    """
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        if b'"op_code"' not in file.readline(4096):
            raise ValueError("it is not a journal")
        end = file.seek(0, os.SEEK_END)
        start = max(0, end - LONGEST_RECORD)
        file.seek(start)
        tail = file.read()
        if not tail.endswith(b"\n"):
            file.truncate(start + tail.rfind(b"\n") + 1)


class _JournalLock:
    """Optuna's lock protocol over an advisory lock, which a killed process cannot leave behind."""

    def __init__(self, path: Path) -> None:
        self._lock = filelock.FileLock(f"{path}.lock")

    def acquire(self) -> bool:
        self._lock.acquire()
        return True

    def release(self) -> None:
        self._lock.release()
