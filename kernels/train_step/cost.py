"""What the arithmetic of all train steps shares: their roofline, and a time to rank configs by. Loads no jax."""

from __future__ import annotations

import dataclasses

from autotune.chips import GIB, Chip
from autotune.kernel import Cost
from autotune.outcome import Config
from kernels.train_step.problem import TrainProblem

EFFICIENCY = 0.6  # of the peak, that matmuls reach
EXPOSED, EXPOSED_SYNC = 0.3, 1.0  # of collectives of parameters, where they may run beside compute and where not
OVERSHOOT = 20.0  # times the time, for each HBM's worth of memory too much
PARAMETER_BYTES, GRADIENT_BYTES = 12, 4  # with both moments, float32

ELSEWHERE = (1e11, 2e10, 1e10, 1e10)  # flops, memory, links and host of a device without figures: relative units


@dataclasses.dataclass(frozen=True)
class Load:
    """What one device has to do in one step.

    Attributes:
        flops: Operations, those that do not reach the peak counted as more.
        traffic: Bytes to and from its HBM.
        parameters: Bytes that it sends of parameters and gradients, which may run beside compute.
        activations: Bytes that it sends of activations, for which it waits.
        offloaded: Bytes to its host and back.
        peak: Bytes of HBM that it needs at once.
        overhead: Of the whole, as a factor.
    """

    flops: float
    traffic: float
    parameters: float
    activations: float
    offloaded: float
    peak: float
    overhead: float = 1.0

    def estimate_ms(self, problem: TrainProblem, config: Config, chip: Chip) -> float:
        """Milliseconds: compute or HBM, what does not hide behind it; more where memory runs out."""
        flops_s, hbm, link, host = ELSEWHERE
        if chip.known and chip.links is not None:
            flops_s, hbm = chip.peak_tflops(problem.dtype) * 1e12, chip.hbm_gbps * 1e9
            link, host = chip.links.device_gbps * 1e9, chip.links.host_gbps * 1e9 / chip.links.devices
        compute, memory = self.flops / flops_s, self.traffic / hbm
        exposed = EXPOSED if config["async_collectives"] else EXPOSED_SYNC
        offload = self.offloaded / host
        busy = max(compute, memory) + 0.3 * min(compute, memory)
        seconds = busy + exposed * self.parameters / link + max(0.0, (1 - exposed) * self.parameters / link - busy)
        seconds += self.activations / link + 0.1 * offload + max(0.0, 0.9 * offload - busy)
        room = chip.hbm_bytes or 16 * GIB
        over = max(0.0, self.peak / room - 0.95)
        return 1e3 * seconds * self.overhead * (1 + (OVERSHOOT * over + 2 if over else 0.0))


def roofline(problem: TrainProblem, flops: float, nbytes: float) -> Cost:
    """One device's share of a step of so many operations and bytes, and of the optimizer's.

    Parameters and both moments are read and written, gradients once.
    """
    nbytes += float(problem.shape.parameters) * (2 * PARAMETER_BYTES + GRADIENT_BYTES)
    return Cost(flops / problem.devices, nbytes / problem.devices, problem.dtype)


def parameter_collectives(nbytes: float, data: int, fsdp: int) -> float:
    """Bytes that one device sends of parameters that take `nbytes`: gathered twice, their gradients scattered over
    ``fsdp``, and summed over the `data` groups that have the same.
    """
    return 3 * nbytes * (fsdp - 1) / fsdp + 2 * nbytes / fsdp * (data - 1) / data
