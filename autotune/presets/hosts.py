"""Whether all hosts of a pod would be given the same configs: programs that differ wait for each other for ever."""

from __future__ import annotations

import hashlib
import json

from autotune.chips import get_chip
from autotune.errors import AutotuneError, ResultsError
from autotune.kernel import get_kernel, kernel_names
from autotune.presets import sources
from autotune.presets.policy import current_policy


def digest(device_kind: str) -> str:
    """Of all that lookups on that device depend on: presets in effect, kernels' versions, policy. Equal: equal answers.

    Files are compared by what is in them, and not by where they are.

    Args:
        device_kind: What `jax.Device.device_kind` says, or a target's name.

    Raises:
        ResultsError: A preset file cannot be read.

    Example:
        >>> digest("TPU v6 lite")
    """
    kind = get_chip(device_kind).device_kind
    content = hashlib.sha256(repr((kind, sources.given_digest(), current_policy())).encode())
    for name in kernel_names():
        content.update(f"{name} {_version(name)}".encode())
        for one in sources.candidates(name, kind, sources.stamps(name, kind), ()):
            content.update(json.dumps([one.preset.to_dict(), one.priority[:3]], sort_keys=True).encode())
    return content.hexdigest()


def _version(name: str) -> str:
    """The kernel's; of one that cannot be used here (what it needs is not installed) that it cannot."""
    try:
        return get_kernel(name).version
    except AutotuneError:
        return "none"


def check_hosts(device_kind: str | None = None) -> None:
    """Compares the digests of all processes of this `jax.distributed` program; all of them must call it.

    It runs a small collective on the devices: call it before training, not while tracing.

    Args:
        device_kind: None is that of the first device.

    Raises:
        ResultsError: They differ; the text names the processes, in each of them.

    Example:
        >>> check_hosts()
    """
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    own = digest(device_kind or jax.devices()[0].device_kind)
    if jax.process_count() == 1:
        return
    mine = np.frombuffer(bytes.fromhex(own)[:16], np.uint32)
    every = [row.tobytes() for row in np.asarray(multihost_utils.process_allgather(mine))]
    if others := [str(number) for number, theirs in enumerate(every) if theirs != every[0]]:
        raise ResultsError(
            f"process {', '.join(others)} has other presets, kernels or policies than process 0: install the same "
            f"version and the same preset files everywhere (./results/presets, ${sources.ENVIRONMENT})"
        )
