"""Where studies are kept: a journal file by default, a database on request."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock

from autotune.errors import AutotuneError, ResultsError, UsageError
from autotune.files import check_file_writable

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


def shown(storage: str | None, results: Path, study: str) -> str:
    """How messages name the storage; a URL's password is left out."""
    path = journal_path(storage, results, study)
    return re.sub(r"//([^:/@]*):[^@]*@", r"//\1:…@", f"--storage {storage}") if path is None else str(path)


def open_storage(storage: str | None, results: Path, study: str) -> BaseStorage:
    """Opens (and creates, where needed) the storage.

    Raises:
        ResultsError: The file or database cannot be read.
    """
    path, name = journal_path(storage, results, study), shown(storage, results, study)
    if path is None:
        return _open_database(storage or "", name)
    check_file_writable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with reading(name):
        lock = _JournalLock(path)
        lock.acquire()
        try:
            _drop_torn_record(path)
        finally:
            lock.release()
        return _journal(path, lock)


def look_into(storage: str | None, results: Path, study: str) -> BaseStorage | None:
    """The storage as it is, to be read only; None where there is none yet. A journal is not touched.

    Raises:
        UsageError: It could not be used: no regular file, say, or a name too long.
        ResultsError: The file or database cannot be read.
    """
    path, name = journal_path(storage, results, study), shown(storage, results, study)
    if path is None:
        return _open_database(storage or "", name)
    for file in (path, Path(f"{path}.lock")):
        check_file_writable(file, f"--storage {storage}" if storage else None)
    if not path.exists():
        return None
    with reading(name):
        _check_journal(path)
        return _journal(path, None)


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """While entered, whatever a study's content makes its reader raise becomes one line that names it."""
    try:
        yield
    except (AutotuneError, OSError):
        raise
    except Exception as error:  # Optuna replays a journal without checking it: anything may be raised.
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ResultsError(f"{name} cannot be read as a study ({reason[0]}): move it away, or give --storage") from None


@contextlib.contextmanager
def working(name: str) -> Iterator[None]:
    """While entered, a database that fails becomes one line that names it."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("sqlalchemy", "optuna"):
            raise
        cause = error.__cause__ or error
        raise AutotuneError(f"{name} failed: {str(cause).strip().splitlines()[0]}; the same command goes on") from error


def _open_database(url: str, name: str) -> BaseStorage:
    from optuna.storages import RDBStorage

    try:
        return RDBStorage(url)
    except ImportError as error:
        raise UsageError(f"{name}: its driver is not installed ({error})") from None
    except Exception as error:  # SQLAlchemy and each driver have errors of their own.
        reason = str(error).strip().splitlines()[0]
        raise ResultsError(f"{name} cannot be opened: {reason}") from None


def _check_journal(path: Path) -> None:
    """Raises ValueError where it is no journal, but somebody's other file."""
    with path.open("rb") as file:
        lines = iter(functools.partial(file.readline, LONGEST_RECORD), b"")
        first = next((line for line in lines if line.strip()), b"")
    if first and b'"op_code"' not in first:
        raise ValueError("it is not a journal")


def _drop_torn_record(path: Path) -> None:
    """Cuts a record that a power cut left half written: anything appended to it would be unreadable.

    Raises:
        ValueError: It is no journal.
    """
    if not path.exists():
        return
    _check_journal(path)
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        start = max(0, end - LONGEST_RECORD)
        file.seek(start)
        tail = file.read()
        if tail and not tail.endswith(b"\n"):
            file.truncate(start + tail.rfind(b"\n") + 1)


def _journal(path: Path, lock: _JournalLock | None) -> BaseStorage:
    """Optuna's journal over a backend of our own; without a lock, to read."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import BaseJournalBackend

    class Journal(BaseJournalBackend):
        """One JSON record a line, as Optuna's own file backend has it, but blank lines do no harm, and an append
        that failed half way (a full disk) leaves nothing behind."""

        def __init__(self) -> None:
            self._offsets = {0: 0}  # Of the records by number.

        def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
            number = max(known for known in self._offsets if known <= log_number_from)
            if not path.exists():
                return
            with path.open("rb") as file:
                file.seek(self._offsets[number])
                for line in iter(file.readline, b""):
                    if not line.endswith(b"\n"):
                        return  # Somebody is writing it.
                    if line.strip():
                        if number >= log_number_from:
                            yield _record(path, line)
                        number += 1
                    self._offsets[number] = file.tell()

        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            assert lock is not None, "opened to be read"
            data = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
            lock.acquire()
            try:
                with path.open("ab", buffering=0) as file:
                    end = file.seek(0, os.SEEK_END)
                    try:
                        written = file.write(data)
                        while written < len(data):
                            written += file.write(data[written:])
                        os.fsync(file.fileno())
                    except OSError as error:
                        file.truncate(end)
                        raise OSError(error.errno, error.strerror, str(path)) from None
            finally:
                lock.release()

    return JournalStorage(Journal())


def _record(path: Path, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ResultsError(f"{path} cannot be read as a study ({error}): move it away, or give --storage") from None
    if not isinstance(record, dict):
        raise ResultsError(f"{path} cannot be read as a study (a record is no object): move it away")
    return record


class _JournalLock:
    """An advisory lock, which a killed process cannot leave behind."""

    def __init__(self, path: Path) -> None:
        self._lock = filelock.FileLock(f"{path}.lock")

    def acquire(self) -> None:
        self._lock.acquire()

    def release(self) -> None:
        self._lock.release()
