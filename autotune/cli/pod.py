"""Tuning by several processes, a pod's hosts: process 0 leads, the others follow."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING

from autotune import render
from autotune.cli.common import load_kernel
from autotune.errors import UsageError

if TYPE_CHECKING:
    from autotune.engines.device.pod import Place, Pod


def find_place(arguments: argparse.Namespace) -> Place | None:
    """Which of several processes this one is; None where it is the only one.

    Raises:
        UsageError: Only a part of it is said, or what is asked for is nothing for several processes.
    """
    given = (arguments.coordinator, arguments.num_processes, arguments.process_id)
    if arguments.engine != "device" and given == (None, None, None):
        return None  # JAX's own variables are set for other programs of this machine too.
    from autotune.engines.device.pod import Place

    kernel = load_kernel(arguments.kernel)
    if not kernel.spread and given == (None, None, None):
        return None
    place = Place.find(*given)
    if place is None:
        return None
    if arguments.engine != "device":
        raise UsageError(f"--engine {arguments.engine}: several processes measure together; use --engine device")
    if not kernel.spread:
        raise UsageError(f"{kernel.name} runs on one device: tune it by one process, without --coordinator")
    return place


def follow(place: Place) -> int:
    """Works for process 0 until that has finished."""
    from autotune.engines.device import pod

    console = render.console(stderr=True)
    console.print(pod.follow(place, lambda line: console.print(line, soft_wrap=True)), soft_wrap=True)
    return 0


def lead(place: Place, arguments: argparse.Namespace) -> contextlib.AbstractContextManager[Pod]:
    """All processes, once they have come."""
    from autotune.engines.device import pod

    kernel = load_kernel(arguments.kernel)
    devices = kernel.devices(kernel.parse_problem(arguments.problem))
    console = render.console(stderr=True)
    return pod.lead(place, devices, lambda line: console.print(line, soft_wrap=True))
