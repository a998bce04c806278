"""What one op takes on the core: a Pallas kernel's bundles played, of any other XLA's own estimate and its traffic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from autotune.chips import Chip
from autotune.engines.compiler.schedule.core import HBM_EFFICIENCY
from autotune.engines.compiler.timeline.hlo import Array, Instruction, Module
from autotune.engines.compiler.timeline.traffic import traffic_bytes

PALLAS = "tpu_custom_call"
# What a schedule takes of the cycles that XLA counts: of matmuls with what is fused into them, and of all else. Fitted
# where both are known: on v5e the schedules of seven train steps of llama3-1b, whose times then differ by 1.7 % on
# average, 4.6 % at most, from those of their schedules; on v6e one of llama3-8b. One by one they are up to 40 % off.
SHARES = {"v5e": (1.0, 0.5), "v6e": (0.83, 0.3)}
ELSEWHERE = SHARES["v5e"]  # no schedule of a step was held against XLA's count there


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
        matmul, other = SHARES.get(self._chip.name, ELSEWHERE)
        share = matmul if one.attribute("kind") == "kOutput" else other
        compute_us = share * cycles / (self._chip.clock_ghz * 1e3)
        return OpTime(max(compute_us, memory_us), compute_us, memory_us, "XLA's estimate")
