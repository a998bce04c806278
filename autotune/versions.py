"""Which compiler made a time, and which reading of its schedule: the versions of what decides it."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.resources
import os
import platform
from pathlib import Path

_AFFINITY = hasattr(os, "sched_getaffinity")
PACKAGES = ("jax", "jaxlib", "libtpu")
DECIDING = (*PACKAGES, "schedule", "machine")


def machine() -> str:
    """The processor and how many cores of it this process may use: what times on a CPU depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.machine())}, {len(os.sched_getaffinity(0)) if _AFFINITY else os.cpu_count()} cores"


def deciding(platform: str) -> dict[str, str]:
    """What decides a time on that platform: what is installed and, where a CPU is measured, the machine."""
    return installed() | ({"machine": machine()} if platform == "cpu" else {})


def installed() -> dict[str, str]:
    """Package to version, and ``schedule`` to a hash of what plays one; what is not installed is left out."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**found, "schedule": _schedule_hash()}


@functools.cache
def _schedule_hash() -> str:
    package = importlib.resources.files("autotune")
    compiler = package.joinpath("engines", "compiler")
    files = [file for room in ("schedule", "timeline") for file in compiler.joinpath(room).iterdir()]
    files.append(package.joinpath("chips.py"))  # The clocks and bandwidths that it plays at.
    sources = sorted((file.name, file.read_bytes()) for file in files if file.name.endswith(".py"))
    return hashlib.sha256(repr(sources).encode()).hexdigest()[:8]
