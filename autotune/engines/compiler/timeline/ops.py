"""What one op takes on the core: a Pallas kernel's bundles played, of any other XLA's own estimate and its traffic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from autotune.chips import Chip
from autotune.engines.compiler.schedule.core import HBM_EFFICIENCY
from autotune.engines.compiler.timeline.hlo import Array, Instruction, Module
from autotune.engines.compiler.timeline.traffic import traffic_bytes

PALLAS = "tpu_custom_call"
# XLA counts the cycles of a matmul's fusion about right (5 % on the whole, each by itself up to 40 % off), those of
# elementwise ops and copies twice. Fitted on the schedules of seven train steps of llama3-1b on v5e, where the steps'
# times then differ by 1.7 % on average, 4.6 % at most, from those of their schedules.
LOOP_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class OpTime:
    """One op on one device.

    Attributes:
        time_us: From its first bundle to its last transfer's end.
        compute_us: Without waits for transfers.
        memory_us: Its HBM transfers back to back.
        estimate: What the time is where no schedule was played: "XLA's estimate" or "its bytes"; else "".
    """

    time_us: float
    compute_us: float
    memory_us: float
    estimate: str = ""


class OpTimes:
    """Times of a program's ops, each found once.

    Args:
        module: The program.
        chip: Its target.
        kernel_time: Of a Pallas call and what it is given; None where it cannot be told.
    """

    def __init__(
        self, module: Module, chip: Chip, kernel_time: Callable[[Instruction, Sequence[Array]], OpTime | None]
    ) -> None:
        self._module, self._chip, self._kernel_time = module, chip, kernel_time
        self._inside = {one.name: computation for computation in module.computations.values() for one in computation}
        self._known: dict[str, OpTime] = {}

    def __call__(self, one: Instruction) -> OpTime:
        if one.name not in self._known:
            self._known[one.name] = self._played(one) or self._estimated(one)
        return self._known[one.name]

    def _played(self, one: Instruction) -> OpTime | None:
        if one.target != PALLAS:
            return None
        return self._kernel_time(one, [self._inside[one.name][name].arrays[0] for name in one.operands])

    def _estimated(self, one: Instruction) -> OpTime:
        nbytes = traffic_bytes(self._module, self._inside[one.name], one)
        memory_us = nbytes / (self._chip.hbm_gbps * 1e3 * HBM_EFFICIENCY)
        if (cycles := one.estimated_cycles) is None:
            return OpTime(memory_us, 0.0, memory_us, "its bytes")
        multiplies = one.attribute("kind") == "kOutput"
        compute_us = cycles * (1.0 if multiplies else LOOP_SHARE) / (self._chip.clock_ghz * 1e3)
        return OpTime(max(compute_us, memory_us), compute_us, memory_us, "XLA's estimate")
