"""Device times from a profiler's trace."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

# What JAX's profiler calls a device and the row that has one event for each run of a program, on a TPU.
_DEVICE = re.compile(r"/device:TPU:\d+")
_LINE = "XLA Modules"
# jit_NAME(fingerprint)
_EVENT = re.compile(r"jit_(?P<name>.+?)(\(\d+\))?")


class NoDeviceEvents(Exception):
    """The trace says nothing of a device: the platform's profiler records none."""


def device_times(profile: Any) -> dict[str, list[float]]:
    """Milliseconds of each run on the device, by the program's name, in the order they ran.

    Args:
        profile: A `jax.profiler.ProfileData`. Its events are exact to the nanosecond.

    Where several cores each ran the program (two act as one device), a run took as long as the slowest of them.

    Raises:
        NoDeviceEvents: There is no device, or it ran no program.
    """
    runs: dict[str, list[list[float]]] = defaultdict(list)
    for plane in profile.planes:
        if not _DEVICE.fullmatch(plane.name):
            continue
        here: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for line in plane.lines:
            if line.name == _LINE:
                for event in line.events:
                    if named := _EVENT.fullmatch(event.name):
                        here[named["name"]].append((event.start_ns, event.duration_ns))
        for name, events in here.items():
            runs[name].append([duration / 1e6 for _, duration in sorted(events)])
    if not runs:
        raise NoDeviceEvents("no program ran on a device in this trace")
    return {name: [max(run) for run in zip(*cores, strict=False)] for name, cores in runs.items()}


def read_trace(folder: Path) -> Any:
    """The profile that JAX wrote under `folder`. Raises NoDeviceEvents where it wrote none."""
    from jax.profiler import ProfileData

    found = sorted(folder.rglob("*.xplane.pb"))
    if not found:
        raise NoDeviceEvents("the profiler wrote no trace")
    return ProfileData.from_file(str(found[-1]))
