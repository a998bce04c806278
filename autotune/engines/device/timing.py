"""How long programs take: device time from the profiler's trace where there is one, the wall clock elsewhere."""

from __future__ import annotations

import abc
import contextlib
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax

from autotune.engines.device.in_step import slowest
from autotune.engines.device.programs import Program
from autotune.engines.device.trace import NoDeviceEvents, device_times, read_trace
from autotune.noise import median_interval

SAMPLE_S = 2e-3  # A sample is at least so long: the clock and the dispatch are then a small part of it.
MOST_CALLS = 64  # in one sample: results wait in memory until the sample ends
ROUNDS = 5  # between two looks at how sure the time is
LEAST_SAMPLES, MOST_SAMPLES = 7, 60
SURE = 0.01  # half of the interval, over the time
MEASURE_S = 1.0  # A time that is not sure by then stays so, and its interval says it.
LEAST_ROUNDS, MOST_ROUNDS = 5, 31  # of a race


class Clock(abc.ABC):
    """Takes times of several programs in turn, so that drift hits all alike.

    Attributes:
        name: How outcomes call it.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def rounds(self, programs: Sequence[Program], count: int) -> list[list[float]]:
        """Of each program, `count` samples in milliseconds, one a round; every round has its own order.

        Where several processes run the programs, all get the slowest one's samples.
        """


class WallClock(Clock):
    """From the first call of a sample until its last result is there.

    In a race each sample follows an untimed call of its own program: what another left in the caches and of the
    allocator's memory would else be timed, and who came before would decide.
    """

    name = "wall clock"

    def rounds(self, programs: Sequence[Program], count: int) -> list[list[float]]:
        samples: list[list[float]] = [[] for _ in programs]
        orders = random.Random(slowest([random.random()])[0])  # the same in all processes
        for _ in range(count):
            for place in orders.sample(range(len(programs)), len(programs)):
                for _ in range(_untimed(programs)):
                    jax.block_until_ready(programs[place].call(*programs[place].next_arguments()))
                samples[place].append(_sample(programs[place]))
        return [slowest(times) for times in samples]


class ProfilerClock(Clock):
    """The device's own account of each run, in one trace of many."""

    name = "profiler"

    def rounds(self, programs: Sequence[Program], count: int) -> list[list[float]]:
        lost: NoDeviceEvents | None = None
        for _ in range(2):  # A trace's buffers are finite, and what does not fit is dropped: once more.
            try:
                samples, lost = self._traced(programs, count), None
            except NoDeviceEvents as error:
                samples, lost = [], error
            if not any(slowest([lost is not None])):
                return [slowest(times) for times in samples]
        raise lost or NoDeviceEvents("another process's trace lacks runs")

    def _traced(self, programs: Sequence[Program], count: int) -> list[list[float]]:
        with tempfile.TemporaryDirectory() as folder:
            with _tracing(folder):
                WallClock().rounds(programs, count)
            times = device_times(read_trace(Path(folder)))
        for program in programs:
            seen, ran = len(times.get(program.name, ())), count * (_untimed(programs) + program.calls)
            if seen != ran:  # Which runs belong to which round would be a guess.
                raise NoDeviceEvents(f"the trace has {seen} of {ran} runs of {program.name}")
        return [_by_sample(times[program.name], program.calls, _untimed(programs)) for program in programs]


def _untimed(programs: Sequence[Program]) -> int:
    """How many calls before each sample are not part of it."""
    return 1 if len(programs) > 1 else 0


def _by_sample(times: Sequence[float], calls: int, untimed: int) -> list[float]:
    step = untimed + calls
    return [statistics.median(times[start + untimed : start + step]) for start in range(0, len(times), step)]


def _sample(program: Program) -> float:
    """Milliseconds a call."""
    arguments = [program.next_arguments() for _ in range(program.calls)]
    jax.block_until_ready(arguments)  # copies are no part of the work
    one_by_one = jax.default_backend() == "cpu"  # where calls in flight side by side would share the cores
    started = time.perf_counter()
    for one in arguments:
        result = program.call(*one)
        if one_by_one:
            jax.block_until_ready(result)
    jax.block_until_ready(result)
    return 1e3 * (time.perf_counter() - started) / program.calls


def choose_clock() -> Clock:
    """The profiler's, where a trifle that ran on this device shows up in its trace; else the wall clock."""
    trifle = jax.jit(lambda x: x + 1)
    unseen = False
    try:
        with tempfile.TemporaryDirectory() as folder:
            with _tracing(folder):
                jax.block_until_ready(trifle(jax.numpy.zeros(8)))
            device_times(read_trace(Path(folder)))
    except Exception:  # No device in it, or no trace: another profiler may be at work.
        unseen = True
    return WallClock() if any(slowest([unseen])) else ProfilerClock()


def _tracing(folder: str) -> contextlib.AbstractContextManager[None]:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's own calls would slow the dispatch, and fill the trace.
    return jax.profiler.trace(folder, profiler_options=options)


def warm_up(program: Program) -> tuple[float, float]:
    """Calls it once for each set of inputs, and settles how many calls make a sample.

    Returns:
        Milliseconds of the first call and of a later one, end to end.
    """
    program.calls = 1
    first_ms = _sample(program)
    latency_ms = min(_sample(program) for _ in program.inputs.sets)
    first_ms, latency_ms = slowest([first_ms, latency_ms])
    program.calls = min(MOST_CALLS, max(1, math.ceil(1e3 * SAMPLE_S / latency_ms)))
    return first_ms, latency_ms


def measure(program: Program, clock: Clock) -> dict[str, Any]:
    """The figures of an outcome: the median of as many samples as make it sure, within a limit."""
    started = time.monotonic()
    first_ms, latency_ms = warm_up(program)
    samples: list[float] = []
    while True:
        samples += clock.rounds([program], ROUNDS if samples else LEAST_SAMPLES)[0]
        time_ms, low, high = median_interval(samples)
        sure = (high - low) / 2 <= SURE * time_ms
        (elapsed_s,) = slowest([time.monotonic() - started])
        if sure or len(samples) >= MOST_SAMPLES or elapsed_s > MEASURE_S:
            break
    return {
        "time_ms": time_ms,
        "interval_ms": (low, high),
        "repeats": len(samples),
        "timer": clock.name,
        "first_call_ms": first_ms,
        "latency_ms": latency_ms,
    }


def race(programs: Sequence[Program], clock: Clock, seconds: float) -> list[list[float]]:
    """Of each program, its times round by round; as many rounds as `seconds` allow."""
    round_s = sum(warm_up(program)[1] * (_untimed(programs) + program.calls) for program in programs) / 1e3
    return clock.rounds(programs, min(MOST_ROUNDS, max(LEAST_ROUNDS, int(seconds / round_s))))
