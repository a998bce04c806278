"""What processes that run one program together must agree on: who calls it once more than the others waits for ever."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np


def slowest(values: Sequence[float]) -> list[float]:
    """Of each value, the largest that any process has: the same in all. All must ask, in the same order.

    Alone, a process keeps its own. Others' come as 32-bit floats.
    """
    if jax.process_count() == 1:
        return list(values)
    from jax.experimental import multihost_utils

    gathered = multihost_utils.process_allgather(np.asarray(values, np.float32))  # [processes, values]
    return [float(value) for value in gathered.max(axis=0)]
