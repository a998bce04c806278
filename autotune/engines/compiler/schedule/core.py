"""What the listings do not say of each generation's TensorCore."""

from __future__ import annotations

import dataclasses

from autotune.chips import Chip
from autotune.engines.compiler.schedule.memory import Memory, TransferTiming


@dataclasses.dataclass(frozen=True)
class Core:
    """One TensorCore's timing.

    Attributes:
        delay_slots: Bundles that still issue after a branch: read off what the listings predicate with it.
        folds_slots: Whether slots with nothing in them may be listed as one empty bundle.
        cycles_per_push: Cycles one matrix multiply instruction occupies its MXU: the rows of one packed
            register (16) over the rows the array takes a cycle (1 where it is 128 wide, 2 where 256).
        cycles_per_float32_push: The same where the register holds 8 rows of 32 bits.
        granule_bytes: The unit of a DMA's size; follows from any block whose size is known.
        sparse_cores: Whether the chip has SparseCores, for which a program may wait.
        one_write_efficiency: What a single write reaches of the nominal bandwidth; None where it has no limit
            of its own.
    """

    delay_slots: int
    cycles_per_push: int
    cycles_per_float32_push: int
    folds_slots: bool = False
    granule_bytes: int = 32
    sparse_cores: bool = True
    one_write_efficiency: float | None = None


# 8 rows of 32 bits take 8 cycles at 1 row a cycle and 4 at 2; libtpu's own walk charges them more than 4 on v6e.
CORES = {
    "v4": Core(delay_slots=1, cycles_per_push=16, cycles_per_float32_push=8, granule_bytes=512),
    "v5e": Core(
        delay_slots=4, cycles_per_push=16, cycles_per_float32_push=8, sparse_cores=False, one_write_efficiency=0.221
    ),
    "v5p": Core(delay_slots=4, cycles_per_push=16, cycles_per_float32_push=8),
    "v6e": Core(delay_slots=4, cycles_per_push=8, cycles_per_float32_push=5),
    "v7x": Core(delay_slots=6, cycles_per_push=8, cycles_per_float32_push=4, folds_slots=True),
}

# Fitted on v5e, like its limit of a single write, to matmul 8192x8192x8192 in 63 block sizes and an elementwise
# 8192x8192 kernel in 24; taken over by the others as a fraction of their nominal bandwidth and in nanoseconds.
# The limit is not taken over: with it, XLA's attention on v5p, v6e and v7x, bound by what it writes, would come
# out 25 to 40% too slow; without it, it is right within 5 to 9%.
HBM_EFFICIENCY = 0.916
# What SparseCores reach when they copy or turn an array: fitted on v7x, on attention in ten shapes.
SPARSE_CORE_EFFICIENCY = 0.33
READ_LATENCY_NS = 491.0
WRITE_LATENCY_NS = 236.0
ROW_NS = 0.31


def new_memory(chip: Chip) -> Memory:
    """HBM as one of the chip's cores sees it; cores of one device share the bandwidth evenly."""
    core = CORES[chip.name]
    granule = core.granule_bytes
    nominal = chip.hbm_gbps / chip.cores / chip.clock_ghz  # bytes a cycle
    return Memory(
        TransferTiming(
            granule_bytes=granule,
            pipe=granule / (HBM_EFFICIENCY * nominal),
            write=granule / ((core.one_write_efficiency or HBM_EFFICIENCY) * nominal),
            row=ROW_NS * chip.clock_ghz,
            read_latency=READ_LATENCY_NS * chip.clock_ghz,
            write_latency=WRITE_LATENCY_NS * chip.clock_ghz,
        ),
        cores=chip.cores,
        foreign=core.sparse_cores,
    )
