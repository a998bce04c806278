"""Which accelerator is attached, found out without taking it, and how a worker gets its own part of it."""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import filelock

from autotune.chips import Chip, get_chip, other_chip
from autotune.engines._pool import JobError, JobTimeout, WorkerDied, WorkerPool
from autotune.errors import UnavailableError, UsageError

# TPUs on the PCI bus: Google's vendor id, and the device ids of v3 to 7x (its network cards have that vendor too).
_PCI = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
_TPU_IDS = {"0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA's, AMD's, Windows' under Linux
_FIRST_PORT = 8476
DESCRIBE = "autotune.engines.device.jobs:describe"


@dataclasses.dataclass(frozen=True)
class Attached:
    """What this machine's JAX runs on.

    Attributes:
        platform: "tpu", "gpu" or "cpu".
        device_kind: As JAX names it.
        count: Chips that can be worked with side by side: each worker has one.
    """

    platform: str
    device_kind: str
    count: int

    @property
    def chip(self) -> Chip:
        """Raises UnavailableError where it is a TPU of a generation that is not in the table."""
        if self.platform != "tpu":
            return other_chip(self.platform, self.device_kind)
        try:
            return get_chip(self.device_kind)
        except UsageError:
            raise UnavailableError(f"{self.device_kind} is no TPU generation this project knows") from None


def tpu_chips() -> int:
    """TPU chips on the PCI bus, counted without loading anything."""
    return sum(
        _read(device / "vendor") == _GOOGLE and _read(device / "device") in _TPU_IDS
        for device in (_PCI.iterdir() if _PCI.is_dir() else ())
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


@functools.cache
def attached() -> Attached:
    """Asks a process that opens the device and ends.

    Raises:
        UnavailableError: JAX finds none it can use; the text is its own.
    """
    lock = reserve()  # Opening it would disturb who measures there.
    pool = WorkerPool(1, warm_up=DESCRIBE, environment=environment(), own=own_environments(1))
    try:
        found = pool.start().result()
    except (JobError, WorkerDied, JobTimeout) as error:
        raise UnavailableError(f"no device can be opened: {' '.join(str(error).split())[:300]}") from None
    finally:
        pool.close()
        lock.release()
    count = tpu_chips() if found["platform"] == "tpu" else 1
    return Attached(found["platform"], found["device_kind"], max(1, count))


def environment() -> dict[str, str]:
    """What must be set before a worker loads jax and opens the device."""
    here = {
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a compile from the cache has no compile time
        "NPROC": str(max(2, os.cpu_count() or 2)),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
    }
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        here["JAX_PLATFORMS"] = f"{platforms},cpu"  # where the inputs of several devices are made
    if not tpu_chips():
        # libtpu may be installed for its compiler: it would ask the cloud what TPU there is, and complain at length.
        here["TPU_SKIP_MDS_QUERY"] = "1"
        if not platforms and not any(Path(device).exists() for device in _GPU_DEVICES):
            here["JAX_PLATFORMS"] = "cpu"
    return here


def own_environments(count: int) -> list[dict[str, str]]:
    """For each of `count` workers, what makes it see one chip of this host and none of its neighbours'."""
    if count == 1 and tpu_chips() <= 1:
        return [{}]
    return [_one_chip(place) for place in range(count)]


def _one_chip(place: int) -> dict[str, str]:
    port = _FIRST_PORT + place
    return {
        "TPU_VISIBLE_CHIPS": str(place),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
        "TPU_PROCESS_PORT": str(port),
        "CLOUD_TPU_TASK_ID": "0",
    }


def reserve() -> filelock.FileLock:
    """The right to measure here: two runs at once would each slow the other down.

    Raises:
        UnavailableError: Another run has it.
    """
    lock = filelock.FileLock(Path(tempfile.gettempdir(), f"autotune-{os.getuid()}-device.lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise UnavailableError("another run is measuring on this machine's device: wait for it to end") from None
    return lock


def memory_limit(stats: Mapping[str, int] | None) -> int | None:
    """Bytes a program may take.

    Args:
        stats: The device's `memory_stats`, where it counts; a CPU does not, and has what the system has available.
    """
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    if stats:
        return None
    lines = _read(Path("/proc/meminfo")).splitlines()
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    group = _read(Path("/sys/fs/cgroup/memory.max"))
    if group.isdigit():  # A container's own limit; what it holds of files can be dropped.
        counted = dict(line.split() for line in _read(Path("/sys/fs/cgroup/memory.stat")).splitlines())
        left = max(0, int(group) - int(counted.get("anon", 0)))
        available = left if available is None else min(available, left)
    return available
