"""How long the matrix units hold up the bundles.

The listing places matrix multiplies as close as the issue slots allow; the hardware stalls a bundle
whose MXU is still busy. That stall is what makes a large matmul take its roofline time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from autotune.engines.compiler.schedule.bundles import Bundle

_FLOAT32 = re.compile(r"vmatmul(\.mubr)?\.f32")


def block_stall(bundles: Sequence[Bundle], cycles_per_push: int, cycles_per_float32_push: int) -> int:
    """Cycles that a straight run of bundles takes beyond one each.

    Args:
        bundles: A basic block. Every MXU is taken to be idle where it starts.
        cycles_per_push: Cycles one multiply instruction of 16-bit operands occupies its MXU. A register of
            8-bit ones holds twice as many rows, at twice the rate.
        cycles_per_float32_push: The same of 32-bit operands, half as many rows.
    """
    free_at: dict[int, int] = {}
    now = 0
    for bundle in bundles:
        for opcode, unit in bundle.mxu:
            if opcode.startswith("vmatmul"):
                now = max(now, free_at.get(unit, 0))
                free_at[unit] = now + (cycles_per_float32_push if _FLOAT32.match(opcode) else cycles_per_push)
        now += 1
    return now - len(bundles)
