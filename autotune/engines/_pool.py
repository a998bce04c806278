"""Worker processes that may die: each job runs in one of them, under a time limit that holds."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from autotune.processes import is_running

START_LIMIT_S = 120.0
# Compilers keep what they allocate; a worker above this size is replaced between jobs.
RECYCLE_BYTES = 900 * 1024**2
_SCRATCH = "autotune-"
_LAST_WORDS_S = 2.0
# Lines of a worker's log that say why it died; libtpu writes many that say nothing.
_TELLING = re.compile(r"^F\d{4} |Check fail|Fatal|Error: |MemoryError|Segmentation")


class JobError(Exception):
    """The job itself raised; the text is its exception's."""


class WorkerDied(Exception):
    """The process ended while the job ran."""


class JobTimeout(Exception):
    """The job overran its limit and its process was killed."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One call in a worker.

    Attributes:
        function: ``module:function``.
        arguments: Its arguments, in JSON types.
        timeout_s: After so many seconds the worker is killed.
        phase: What a failure's text begins with, where a worker does several jobs for one result.
    """

    function: str
    arguments: Mapping[str, Any]
    timeout_s: float
    phase: str = ""


class WorkerPool:
    """Runs jobs in `size` processes, each started on demand and replaced when it dies.

    Args:
        size: Jobs in flight at once.
        warm_up: ``module:function`` that a fresh worker runs before its first job.
        environment: Variables set for the workers on top of this process's own.
        own: Variables of each worker's own, on top of those: one mapping a worker.
        recycle_bytes: A worker above this size is replaced between jobs.
    """

    def __init__(
        self,
        size: int,
        *,
        warm_up: str,
        environment: Mapping[str, str],
        own: Sequence[Mapping[str, str]] = (),
        recycle_bytes: int = RECYCLE_BYTES,
    ) -> None:
        _remove_stale_scratch()
        self._scratch = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{os.getpid()}-"))
        self._warm_up = warm_up
        # Workers run elsewhere, but import what this process can.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        self._environment = {**os.environ, "PYTHONPATH": path, **environment}
        self._own = own or [{}] * size
        self._places = itertools.count()
        self._recycle_bytes = recycle_bytes
        self._local = threading.local()
        self._workers: list[_Worker] = []
        self._tickets: weakref.WeakKeyDictionary[Future[Any], _Ticket] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._closed = False
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="worker")

    def submit(self, job: str, arguments: Mapping[str, Any], *, timeout_s: float) -> Future[Any]:
        """Runs ``module:function`` with JSON arguments; the future gives its JSON result.

        The future raises `JobError`, `WorkerDied` or `JobTimeout`.
        """
        return self.submit_job(Job(job, arguments, timeout_s))

    def submit_job(self, job: Job) -> Future[Any]:
        """The same, of what is a `Job` already."""
        return self._start_thread(lambda ticket: self._run(ticket, job))

    def submit_all(
        self,
        jobs: Sequence[Job],
        *,
        until: Callable[[Any], bool] = lambda result: False,
        spent: Callable[[Any], bool] = lambda result: False,
        fresh: bool = False,
    ) -> Future[list[Any]]:
        """Runs the jobs one after the other in one worker; the future gives their results, or raises the first error.

        Args:
            jobs: What to run; each has a limit of its own.
            until: Whether a result makes those after it needless.
            spent: Whether the last result leaves a worker that should do nothing more.
            fresh: In a process that has done nothing before, and does nothing after.
        """

        def run(ticket: _Ticket) -> list[Any]:
            if fresh:
                self._replace()
            results: list[Any] = []
            done_with = True
            try:
                for number, job in enumerate(jobs, start=1):
                    # What one job left in the worker is there for the next: none is replaced in between.
                    results.append(self._run(ticket, job, recycle=number == len(jobs)))
                    if until(results[-1]):
                        break
                done_with = fresh or spent(results[-1])
            finally:
                if done_with:
                    self._replace()
            return results

        return self._start_thread(run)

    def _start_thread(self, call: Callable[[_Ticket], Any]) -> Future[Any]:
        ticket = _Ticket()
        future = self._threads.submit(call, ticket)
        self._tickets[future] = ticket
        return future

    def give_up(self, future: Future[Any]) -> None:
        """Cancels a job that has not begun; kills the worker that is at it."""
        if future.cancel():
            return
        ticket = self._tickets[future]
        ticket.given_up = True  # Between two of its jobs, or while its worker starts, there is none to kill.
        if (worker := ticket.worker) is not None:
            worker.kill()

    def start(self) -> Future[Any]:
        """Starts one worker ahead of its first job; the future gives its warm-up's result or raises `JobError`."""
        return self._threads.submit(lambda: self._worker().greeting)

    def close(self) -> None:
        """Kills every worker, and cancels what has not started."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for worker in self._workers:
                worker.kill()
        self._threads.shutdown(wait=True)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _worker(self) -> _Worker:
        worker: _Worker | None = getattr(self._local, "worker", None)
        if worker is None or not worker.alive:
            if self._closed:
                raise WorkerDied("the pool was closed")
            if not hasattr(self._local, "place"):
                self._local.place = next(self._places)
            environment = {**self._environment, **self._own[self._local.place]}
            try:
                worker = _Worker(self._warm_up, environment, self._scratch)
            except OSError as error:
                raise WorkerDied(f"no worker process can be started: {error}") from error
            with self._lock:
                self._workers.append(worker)
            if self._closed:  # it closed meanwhile and may have missed this one
                worker.kill()
            self._local.worker = worker
            try:
                worker.greet()
            finally:
                if not worker.alive:
                    self._forget(worker)
        return worker

    def _replace(self) -> None:
        """Ends this thread's worker, so that the next job starts another."""
        worker: _Worker | None = getattr(self._local, "worker", None)
        if worker is not None and worker.alive:
            worker.kill()
            self._forget(worker)

    def _forget(self, worker: _Worker) -> None:
        """A dead worker's process id may be someone else's by the time the pool closes."""
        with self._lock:
            self._workers.remove(worker)

    def _run(self, ticket: _Ticket, job: Job, *, recycle: bool = True) -> Any:
        try:
            worker = ticket.worker = self._worker()
        except (JobError, JobTimeout) as error:  # The job is not to blame.
            raise WorkerDied(f"no worker can be started: {error}") from error
        try:
            if ticket.given_up:
                raise WorkerDied("it was given up")
            answer = worker.ask({"job": job.function, "arguments": dict(job.arguments)}, job.timeout_s)
            if recycle and answer["rss_bytes"] > self._recycle_bytes:
                worker.kill()
        except (JobTimeout, WorkerDied) as error:
            if not job.phase:
                raise
            raise type(error)(f"{job.phase}: {error}") from error
        finally:
            ticket.worker = None
            if not worker.alive:
                self._forget(worker)
        if "error" in answer:
            raise JobError(answer["error"])
        return answer["result"]


class _Ticket:
    """Which worker is at a job, and whether anybody still wants it."""

    worker: _Worker | None = None
    given_up: bool = False


class _Worker:
    """One child process in a process group of its own, spoken to by one thread."""

    def __init__(self, warm_up: str, environment: Mapping[str, str], scratch: Path) -> None:
        directory = tempfile.mkdtemp(dir=scratch)
        self._log = Path(directory, "log")
        self.greeting: Any = None
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "autotune.engines._worker", warm_up],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # Relative to the worker, so that flags may name it: every worker dumps to a folder of its own.
                cwd=directory,
                env=dict(environment),
                # Ctrl-C reaches the tuner alone, and a kill reaches whatever the worker has started.
                start_new_session=True,
            )
        self._buffer = b""

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def greet(self) -> None:
        """Waits for the warm-up; raises `JobError` where it failed."""
        answer = self._read(START_LIMIT_S)
        if "error" in answer:
            self.kill()
            raise JobError(answer["error"])
        self.greeting = answer["result"]

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        with contextlib.suppress(OSError):  # where it is dead, reading says how it ended
            self._process.stdin.write(json.dumps(request).encode() + b"\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
        return self._read(timeout_s)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self, limit_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        stdout = self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.kill()
                    raise JobTimeout(f"no result within {limit_s:g} s")
                chunk = os.read(stdout.fileno(), 1 << 16)  # type: ignore[union-attr]
                if not chunk:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(_LAST_WORDS_S)  # it is ending by itself: how is what the user asks
                    self.kill()
                    raise WorkerDied(self._obituary())
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _obituary(self) -> str:
        code = self._process.returncode
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if _TELLING.search(line)]
        return f"the worker process ended {how}" + (f": {lines[-1].strip()}" if lines else "")


def _remove_stale_scratch() -> None:
    """Removes what tuners that were killed could not."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*-*"):
        pid = folder.name.removeprefix(_SCRATCH).partition("-")[0]
        if pid.isdigit() and not is_running(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
