"""Arithmetic that the analytic estimates share. It only has to rank; the compiler's schedule predicts."""

from __future__ import annotations

from autotune.chips import MIB, Chip
from autotune.problem import DTYPE_BYTES

# Fitted to a published sweep of 63 matmul block shapes on a v5e (mean error 3%, Spearman 0.997).
USABLE_BANDWIDTH = 0.85  # of the nominal one
DMA_LATENCY_S = 0.6e-6  # from the start of a fetch to its first bytes
OVERLAP_POWER = 5.0
STEP_S = 0.01e-6  # a step that fetches nothing still runs its index maps, semaphores and branches
LANES, SUBLANES = 128, 8


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def sublanes(dtype: str) -> int:
    """Rows of one VMEM tile: 8 of 32 bits, 16 of 16 bits."""
    return SUBLANES * 4 // DTYPE_BYTES[dtype]


def vmem_limits(chip: Chip) -> tuple[int, ...]:
    """The compiler's default, then what a kernel may take of the physical VMEM, in MiB."""
    default, physical = chip.scoped_vmem_bytes // MIB, chip.vmem_bytes // MIB
    return tuple(sorted({default} | {size for size in (32, 64, 96) if default < size <= 0.8 * physical}))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def mxu_s(rows: int, columns: int, depth: int, dtype: str, chip: Chip) -> float:
    """Seconds one core's MXUs take for ``[rows, depth] @ [depth, columns]``, padded to the array's sides."""
    padded = round_up(rows, SUBLANES) * round_up(columns, chip.mxu) * round_up(depth, chip.mxu)
    return 2 * padded / (chip.peak_tflops(dtype) * 1e12 / chip.cores)


def vpu_s(operations: float, chip: Chip, *, slots: int = 4) -> float:
    """Seconds for that many elementwise float32 operations on `slots` ALUs of 8×128 lanes."""
    return operations / (slots * SUBLANES * LANES * chip.clock_ghz * 1e9)


def dma_s(nbytes: float, chip: Chip) -> float:
    """Seconds the HBM takes for `nbytes`, one core's share of the bandwidth."""
    return nbytes * chip.cores / (USABLE_BANDWIDTH * chip.hbm_gbps * 1e9)


def step_s(compute: float, dma: float) -> float:
    """Seconds of a pipelined grid step whose blocks take `dma` to fetch and `compute` to work through.

    Overlap is not perfect where the two are close (a smooth maximum), and with two buffers a fetch has two
    steps to arrive, so that two steps cannot take less than its latency and both parts after each other.
    """
    overlapped = (compute**OVERLAP_POWER + dma**OVERLAP_POWER) ** (1 / OVERLAP_POWER)
    return max(overlapped, (DMA_LATENCY_S + dma + compute) / 2 if dma else 0.0) + STEP_S
