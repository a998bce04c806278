"""A process that is not the first: it does what process 0 says until that has finished."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from autotune import versions
from autotune.engines._pool import Job, JobError, JobTimeout, WorkerDied
from autotune.engines.device import hardware
from autotune.engines.device.pod.channel import SILENCE_S, Channel, Lost
from autotune.engines.device.pod.member import Here
from autotune.engines.device.pod.place import Place
from autotune.errors import UnavailableError

MEET_S = 300.0  # how long processes wait for each other at the start
_JOBS = "autotune.engines.device.jobs:"
FAILURES = {error.__name__: error for error in (JobError, JobTimeout, WorkerDied)}


def follow(place: Place, say: Callable[[str], None]) -> str:
    """Works for process 0 until it has finished.

    Args:
        place: Which process this is.
        say: Shows a line of progress.

    Returns:
        What process 0 says at its end.

    Raises:
        UnavailableError: Process 0 cannot be reached, does not take this one, or is gone.
    """
    channel = _meet(place)
    member = Here(f"process {place.process_id}")
    lock = None
    try:
        hello = {"process_id": place.process_id, "processes": place.processes, "host": socket.gethostname()}
        channel.send({**hello, "versions": versions.installed()})
        welcome = channel.receive()
        if "refused" in welcome:
            raise UnavailableError(f"process 0 at {place.address} refuses this process: {welcome['refused']}")
        if welcome["host"] != socket.gethostname():
            lock = hardware.reserve()  # On the same machine process 0 has it for all.
        say(f"process {place.process_id} of {place.processes} follows process 0 at {place.address}")
        while True:
            message = channel.receive()
            match message["do"]:
                case "start":
                    _reply(channel, message["id"], member.start(message["program"], message["cpu_devices"]))
                case "run":
                    if not message["job"]["function"].startswith(_JOBS):
                        raise UnavailableError(f"process 0 wants what it has no right to: {message['job']['function']}")
                    _reply(channel, message["id"], member.run(Job(**message["job"])))
                case "stop":
                    member.stop()
                case "end":
                    return message["text"]
    except Lost as error:
        raise UnavailableError(f"process 0 at {place.address} is gone ({error}): start all processes again") from error
    finally:
        member.stop()
        channel.close()
        if lock is not None:
            lock.release()


def _meet(place: Place) -> Channel:
    """Process 0 may be started later than this one."""
    deadline = time.monotonic() + MEET_S
    while True:
        try:
            return Channel(socket.create_connection((place.host, place.port), timeout=SILENCE_S))
        except OSError as error:
            if time.monotonic() > deadline:
                reason = f"process 0 cannot be reached at {place.address} ({error})"
                raise UnavailableError(f"{reason}: start it, and name its host and port with --coordinator") from error
            time.sleep(0.5)


def _reply(channel: Channel, number: int, job: Future[Any]) -> None:
    def answer(job: Future[Any]) -> None:
        if job.cancelled():
            reply = {"failed": WorkerDied.__name__, "text": "it was stopped"}
        elif (error := job.exception()) is None:
            reply = {"result": job.result()}
        else:
            kind = next((name for name, one in FAILURES.items() if isinstance(error, one)), JobError.__name__)
            reply = {"failed": kind, "text": str(error)}
        with contextlib.suppress(Lost):  # Who receives finds out.
            channel.send({"id": number, **reply})

    job.add_done_callback(answer)
