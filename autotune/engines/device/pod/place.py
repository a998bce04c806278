"""Which of several processes this one is, and where they meet."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from autotune.errors import UsageError

AUTO = "auto"
_PORT = 8470  # where the hosts of a TPU slice meet, unless it is said
_COORDINATOR, _COUNT, _ID = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"  # as JAX calls them


@dataclasses.dataclass(frozen=True)
class Place:
    """One process among several.

    Attributes:
        host: Of process 0, as all others reach it.
        port: On which it waits for them.
        processes: How many there are.
        process_id: Which one this is, from 0.
    """

    host: str
    port: int
    processes: int
    process_id: int

    def __post_init__(self) -> None:
        if self.processes < 2:
            raise UsageError(f"--num-processes {self.processes}: must be 2 or more; leave it out for one process")
        if not 0 <= self.process_id < self.processes:
            raise UsageError(f"--process-id {self.process_id}: must be from 0 to {self.processes - 1}")
        if not self.host or not 0 < self.port < 65536:
            raise UsageError(f"--coordinator {self.host}:{self.port}: must be HOST:PORT of process 0")

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def find(
        cls,
        coordinator: str | None,
        processes: int | None,
        process_id: int | None,
        environment: Mapping[str, str] = os.environ,
    ) -> Place | None:
        """What the command line says, and where it is silent JAX's own variables; None for a single process.

        Args:
            coordinator: ``HOST:PORT`` of process 0; ``auto``: the first host of this TPU slice.
            processes: How many there are.
            process_id: Which one this is.
            environment: ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES``, ``JAX_PROCESS_ID``; for ``auto``
                ``TPU_WORKER_HOSTNAMES`` and ``TPU_WORKER_ID``, which Cloud TPU machines have.

        Raises:
            UsageError: Only a part of it is said, or it makes no sense.
        """
        if coordinator == AUTO:
            hosts = [host for host in environment.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
            number = environment.get("TPU_WORKER_ID", "")
            if not hosts or not number.isdigit():
                needed = "TPU_WORKER_HOSTNAMES and TPU_WORKER_ID, which a TPU slice's hosts have"
                raise UsageError(f"--coordinator auto: needs {needed}; or give HOST:PORT, as in 10.0.0.2:{_PORT}")
            return cls(hosts[0], _PORT, len(hosts), int(number)) if len(hosts) > 1 else None
        coordinator = coordinator or environment.get(_COORDINATOR)
        found = {
            "--coordinator": coordinator,
            "--num-processes": _number(processes, environment, _COUNT),
            "--process-id": _number(process_id, environment, _ID),
        }
        missing = [name for name, value in found.items() if value is None]
        if coordinator is None and processes is None and process_id is None:
            return None  # JAX_NUM_PROCESSES alone is not meant for us.
        if missing:
            raise UsageError(f"a process among several needs {', '.join(found)}: {', '.join(missing)} lacks")
        host, _, port = str(coordinator).rpartition(":")
        return cls(host, int(port) if port.isdigit() else 0, found["--num-processes"], found["--process-id"])  # type: ignore[arg-type]


def _number(given: int | None, environment: Mapping[str, str], name: str) -> int | None:
    if given is not None:
        return given
    text = environment.get(name, "")
    return int(text) if text.isdigit() else None
