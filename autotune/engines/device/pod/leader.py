"""Process 0: has the workers of all processes run the same jobs in step."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any

from autotune import versions
from autotune.engines._pool import Job, JobError, JobTimeout, WorkerDied
from autotune.engines.device import hardware
from autotune.engines.device.pod.channel import Channel, Lost
from autotune.engines.device.pod.follower import FAILURES, MEET_S
from autotune.engines.device.pod.member import Here, Member
from autotune.engines.device.pod.place import Place
from autotune.engines.device.pod.results import merged, refused
from autotune.errors import UnavailableError, UsageError

# Where one process has failed, the others may wait in a collective for ever: so long they may take to fail too.
GRACE_S = 10.0


class Elsewhere:
    """A follower, as process 0 sees it.

    Args:
        name: How messages call it.
        channel: To it.
    """

    def __init__(self, name: str, channel: Channel) -> None:
        self.name = name
        self._channel = channel
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lost: str | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, program: Mapping[str, Any], cpu_devices: int) -> Future[Any]:
        return self._ask({"do": "start", "program": program, "cpu_devices": cpu_devices})

    def run(self, job: Job) -> Future[Any]:
        return self._ask({"do": "run", "job": dataclasses.asdict(job)})

    def stop(self) -> None:
        with contextlib.suppress(Lost):
            self._channel.send({"do": "stop"})

    def end(self, text: str) -> None:
        with contextlib.suppress(Lost):
            self._channel.send({"do": "end", "text": text})
        self._channel.close()

    def _ask(self, message: dict[str, Any]) -> Future[Any]:
        future: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if self._lost is not None:
                future.set_exception(UnavailableError(self._lost))
                return future
            self._waiting[number] = future
        try:
            self._channel.send({**message, "id": number})
        except Lost as error:
            self._give_up(str(error))
        return future

    def _listen(self) -> None:
        try:
            while True:
                reply = self._channel.receive()
                future = self._waiting.pop(reply["id"])
                if "failed" in reply:
                    future.set_exception(FAILURES[reply["failed"]](reply["text"]))
                else:
                    future.set_result(reply["result"])
        except Lost as error:
            self._give_up(str(error))

    def _give_up(self, reason: str) -> None:
        with self._lock:
            self._lost = f"{self.name} is gone ({reason}): start all processes again, with the same command"
            waiting, self._waiting = list(self._waiting.values()), {}
        for future in waiting:
            future.set_exception(UnavailableError(self._lost))


class Pod:
    """All processes' workers, used as one: what a `WorkerPool` of one worker is to a single process.

    Args:
        place: Of this process, which is the first.
        followers: The others.
        cpu_devices: How many devices each process's CPU is to pass for.
    """

    def __init__(self, place: Place, followers: Sequence[Elsewhere], cpu_devices: int) -> None:
        self.place = place
        self._followers = followers
        self._members: list[Member] = [Here("process 0"), *followers]
        self._cpu_devices = cpu_devices
        self._running = False
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="pod")
        self._given_up: set[Future[Any]] = set()
        self._greeting: dict[str, Any] = {}

    def attached(self) -> hardware.Attached:
        """What all processes' devices are.

        Raises:
            UnavailableError: They do not come to work together.
        """
        if not self._greeting:
            try:
                self._threads.submit(self._assemble).result()
            except (JobError, JobTimeout, WorkerDied) as error:
                text = " ".join(str(error).split())[:400]
                raise UnavailableError(f"the processes do not come to work together: {text}") from None
        return hardware.Attached(self._greeting["platform"], self._greeting["device_kind"], 1)

    @property
    def devices(self) -> int:
        """Of all processes together."""
        self.attached()
        return self._greeting["devices"]

    def submit_all(
        self,
        jobs: Sequence[Job],
        *,
        until: Callable[[Any], bool] = lambda result: False,
        spent: Callable[[Any], bool] = lambda result: False,
        fresh: bool = False,
    ) -> Future[list[Any]]:
        """As `WorkerPool.submit_all`, in every process, the slowest of which counts."""
        box: list[Future[list[Any]]] = []

        def run() -> list[Any]:
            if fresh:
                self._stop()
            results: list[Any] = []
            done_with = True
            try:
                for job in jobs:
                    if box and box[0] in self._given_up:
                        raise WorkerDied("it was given up")
                    self._assemble()
                    results.append(self._in_step(job))
                    if until(results[-1]):
                        break
                done_with = fresh or spent(results[-1])
            finally:
                if done_with:
                    self._stop()
            return results

        future = self._threads.submit(run)
        box.append(future)
        return future

    def give_up(self, future: Future[Any]) -> None:
        """As `WorkerPool.give_up`."""
        if not future.cancel():
            self._given_up.add(future)
            self._stop()

    def close(self) -> None:
        """Ends every worker; the followers go on waiting for more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._stop()
        self._threads.shutdown(wait=True)

    def end(self, text: str) -> None:
        """Lets the followers go."""
        self.close()
        for follower in self._followers:
            follower.end(text)

    def _assemble(self) -> None:
        """Fresh workers that have joined one program, unless there are."""
        if self._running:
            return
        # Another port each time: what is left of the last program may still hold its own.
        program = {"coordinator": f"{self.place.host}:{_free_port()}", "processes": self.place.processes}
        joined = [
            member.start({**program, "process_id": number}, self._cpu_devices)
            for number, member in enumerate(self._members)
        ]
        try:
            self._greeting = self._all(joined, grace_s=None)[0]
        except BaseException:
            self._stop()
            raise
        self._running = True

    def _in_step(self, job: Job) -> Any:
        futures = [member.run(job) for member in self._members]
        try:
            return merged([member.name for member in self._members], self._all(futures, grace_s=GRACE_S))
        except BaseException:
            self._stop()
            raise

    def _all(self, futures: Sequence[Future[Any]], grace_s: float | None) -> list[Any]:
        """Their results; where one has failed, the others' too as far as they come within `grace_s`.

        Raises:
            The first exception.
        """
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            self._raise_failure(futures, done)
            if waiting and grace_s is not None and any(refused(one.result()) for one in done):
                done, late = wait(waiting, timeout=grace_s, return_when=FIRST_EXCEPTION)
                self._raise_failure(futures, done)  # One that died is why the other's collective failed.
                if late:
                    self._stop()
                    wait(late, timeout=GRACE_S)
                break
        return [_or_nothing(future) for future in futures]

    def _raise_failure(self, futures: Sequence[Future[Any]], done: set[Future[Any]]) -> None:
        for future in done:
            name = self._members[futures.index(future)].name
            if future.cancelled():
                raise WorkerDied(f"{name}: it was stopped")
            error = future.exception()
            if isinstance(error, JobError | JobTimeout | WorkerDied):
                raise type(error)(f"{name}: {error}")
            if error is not None:
                raise error

    def _stop(self) -> None:
        self._running = False
        for member in self._members:
            member.stop()


def _or_nothing(future: Future[Any]) -> Any:
    """The result; None of a worker that was stopped because another had failed."""
    try:
        return future.result(timeout=0)
    except (JobError, JobTimeout, WorkerDied, CancelledError, TimeoutError):
        return None


@contextlib.contextmanager
def lead(place: Place, devices: int, say: Callable[[str], None]) -> Iterator[Pod]:
    """Waits for the other processes, and has them as long as the context lasts.

    Args:
        place: Of this process, the first.
        devices: That a program is to have, of all processes together.
        say: Shows a line of progress.

    Raises:
        UsageError: The devices cannot be shared evenly, or the port cannot be used.
        UnavailableError: Not all came, or this machine's device is taken.
    """
    if devices % place.processes:
        raise UsageError(f"--num-processes {place.processes}: {devices} devices cannot be shared evenly by them")
    lock = hardware.reserve()
    try:
        followers = _gather(place, say)
        pod = Pod(place, followers, math.ceil(devices / place.processes))
        text = "process 0 has ended early"
        try:
            yield pod
            text = "process 0 has finished"
        finally:
            pod.end(text)
    finally:
        lock.release()


def _gather(place: Place, say: Callable[[str], None]) -> list[Elsewhere]:
    missing = set(range(1, place.processes))
    found: dict[int, Elsewhere] = {}
    deadline = time.monotonic() + MEET_S
    try:
        listener = socket.create_server(("", place.port))
    except OSError as error:
        raise UsageError(f"--coordinator {place.address}: its port cannot be used here ({error})") from None
    say(f"process 0 of {place.processes} waits for the others at {place.address}")
    with listener:
        while missing:
            listener.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                connection, (address, *_) = listener.accept()
            except TimeoutError:
                left = ", ".join(str(number) for number in sorted(missing))
                raise UnavailableError(f"process {left} did not come within {MEET_S:g} s") from None
            channel = Channel(connection)
            try:
                hello = channel.receive()
                if reason := _why_not(hello, place, missing):
                    channel.send({"refused": reason})
                    channel.close()
                    say(f"refused a process at {address}: {reason}")
                    continue
                channel.send({"host": socket.gethostname()})
            except Lost:
                channel.close()  # Somebody else's connection, or one that was ended: the right one may yet come.
                continue
            number = hello["process_id"]
            missing.remove(number)
            found[number] = Elsewhere(f"process {number} on {hello.get('host', address)}", channel)
    return [found[number] for number in sorted(found)]


def _why_not(hello: Mapping[str, Any], place: Place, missing: set[int]) -> str | None:
    if hello.get("processes") != place.processes:
        return f"it says --num-processes {hello.get('processes')}, and process 0 says {place.processes}"
    if hello.get("process_id") not in missing:
        return f"there is a process {hello.get('process_id')} already"
    if hello.get("versions") != versions.installed():
        return f"its versions are {hello.get('versions')}, those of process 0 {versions.installed()}"
    return None


def _free_port() -> int:
    with socket.create_server(("", 0)) as listener:
        return listener.getsockname()[1]
