"""The TPU generations this project tunes for: one table, the source of each figure beside it.

Other devices (a CPU, a GPU) can be measured on and nothing else: no figure is known of them.

A *device* is what JAX calls one: a whole chip on v4 to v6e (both cores of v4 and v5p act as one),
one TensorCore of two on v7x. All figures are per device.
"""

from __future__ import annotations

import dataclasses
import re

from autotune.errors import UsageError, one_of

GIB = 1024**3
MIB = 1024**2


@dataclasses.dataclass(frozen=True)
class Links:
    """How chips of one generation hang together.

    Attributes:
        dimensions: Of their torus; a chip has two links along each.
        gbps: GB/s of one link in one direction.
        ring: The side from which on a dimension's ends are joined; where it is 4, all are or none, as cubes of four are
            joined as wholes.
        host_gbps: GB/s between a chip and its host, in one direction.
        devices: JAX devices a chip.
    """

    dimensions: int
    gbps: float
    ring: int
    host_gbps: float
    devices: int = 1

    @property
    def device_gbps(self) -> float:
        """GB/s that one device sends over all its links."""
        return 2 * self.dimensions * self.gbps / self.devices


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TPU generation.

    Attributes:
        name: The target's name on the command line.
        device_kind: What `jax.Device.device_kind` says.
        topology: A topology that libtpu compiles for; its first device is used.
        chip_config: Passed to libtpu with it; v4 is two devices a chip unless asked to be one.
        platform: As JAX names it; other devices than TPUs have no figures.
        clock_ghz: TensorCore clock that programs run at.
        cores: TensorCores that act as one device; "parallel" grid dimensions are split over them.
        mxu: Side of the systolic array.
        tflops: Peak dense TFLOP/s (or TOP/s) by operand dtype; a missing dtype has no native support.
        hbm_gbps: Nominal HBM bandwidth, GB/s.
        hbm_bytes: HBM capacity.
        vmem_bytes: VMEM per core.
        scoped_vmem_bytes: What the compiler lets one kernel use by default.
        links: To other chips and the host; None where they are not known.
    """

    name: str
    device_kind: str
    topology: str
    clock_ghz: float
    cores: int
    mxu: int
    tflops: dict[str, float]
    hbm_gbps: float
    hbm_bytes: int
    vmem_bytes: int
    scoped_vmem_bytes: int
    links: Links | None = None
    chip_config: str | None = None
    platform: str = "tpu"

    @property
    def known(self) -> bool:
        """Whether its peak and its bandwidth are, without which there is no roofline and no prediction."""
        return bool(self.tflops)

    def peak_tflops(self, dtype: str) -> float:
        """Peak for matmuls with operands of `dtype`. Float32 operands take several bfloat16 passes."""
        if not self.known:
            raise UsageError(f"the peak of {self.device_kind} is not known: use {one_of(CHIPS)}")
        if dtype == "float32":
            return self.tflops["bfloat16"] / FLOAT32_PASSES
        try:
            return self.tflops[dtype]
        except KeyError:
            raise UsageError(
                f"{self.name} has no native {dtype} matmul: use {one_of([*self.tflops, 'float32'])}"
            ) from None


# A float32 dot at JAX's default precision is one bfloat16 pass on a TPU; Mosaic's float32 dot inside a
# kernel keeps float32 and needs six.
FLOAT32_PASSES = 6

# Sources. Peak, HBM and VMEM sizes: jax's `tpu_info` table and the Cloud TPU system-architecture pages;
# 7x's are the chip's halves. Clock: the peak over the MXUs' multiply-accumulates a cycle (v6e and 7x start two passes a
# cycle). 7x has 2.2 GHz by that, but XLA's cross-entropy in 78 shapes, of 1.5 to 400 ms, takes what it would at 1.9.
# Scoped VMEM: what libtpu 0.0.42 and 0.0.52 print when they refuse a kernel. Links: the Cloud TPU pages and "How to
# Scale Your Model" (one direction of one link; v4's and v7x's way to the host is taken from their neighbours').
_CHIPS = (
    Chip(
        name="v4",
        device_kind="TPU v4",
        topology="v4:2x2x1",
        clock_ghz=1.05,
        cores=2,
        mxu=128,
        tflops={"bfloat16": 275.0},
        hbm_gbps=1228.0,
        hbm_bytes=32 * GIB,
        vmem_bytes=16 * MIB,
        scoped_vmem_bytes=16 * MIB,
        links=Links(dimensions=3, gbps=45.0, ring=4, host_gbps=16.0),
        chip_config="megacore",
    ),
    Chip(
        name="v5e",
        device_kind="TPU v5 lite",
        topology="v5e:2x2",
        clock_ghz=1.5,
        cores=1,
        mxu=128,
        tflops={"bfloat16": 197.0, "int8": 394.0},
        hbm_gbps=819.0,
        hbm_bytes=16 * GIB,
        vmem_bytes=128 * MIB,
        scoped_vmem_bytes=16 * MIB,
        links=Links(dimensions=2, gbps=45.0, ring=16, host_gbps=16.0),
    ),
    Chip(
        name="v5p",
        device_kind="TPU v5",
        topology="v5p:2x2x1",
        clock_ghz=1.75,
        cores=2,
        mxu=128,
        tflops={"bfloat16": 459.0, "int8": 918.0},
        hbm_gbps=2765.0,
        hbm_bytes=95 * GIB,
        vmem_bytes=64 * MIB,
        scoped_vmem_bytes=16 * MIB,
        links=Links(dimensions=3, gbps=90.0, ring=4, host_gbps=16.0),
    ),
    Chip(
        name="v6e",
        device_kind="TPU v6 lite",
        topology="v6e:2x2",
        clock_ghz=1.75,
        cores=1,
        mxu=256,
        tflops={"bfloat16": 918.0, "int8": 1836.0, "float8_e5m2": 918.0, "float8_e4m3fn": 918.0},
        hbm_gbps=1638.0,
        hbm_bytes=32 * GIB,
        vmem_bytes=128 * MIB,
        scoped_vmem_bytes=32 * MIB,
        links=Links(dimensions=2, gbps=90.0, ring=16, host_gbps=32.0),
    ),
    Chip(
        name="v7x",
        device_kind="TPU7x",
        topology="tpu7x:2x2x1",
        clock_ghz=1.9,
        cores=1,
        mxu=256,
        tflops={"bfloat16": 1153.5, "float8_e5m2": 2307.0, "float8_e4m3fn": 2307.0},
        hbm_gbps=3690.0,
        hbm_bytes=96 * GIB,
        vmem_bytes=64 * MIB,
        scoped_vmem_bytes=32 * MIB,
        links=Links(dimensions=3, gbps=90.0, ring=4, host_gbps=32.0, devices=2),
    ),
)

CHIPS: dict[str, Chip] = {chip.name: chip for chip in _CHIPS}
DEFAULT_TARGET = "v5e"


# How the device kinds of JAX's other platforms begin.
_OTHERS = {"cpu": "cpu", "NVIDIA": "gpu", "AMD": "gpu"}


def slug(device_kind: str) -> str:
    """``TPU v5 lite`` as a name for files and folders: ``tpu_v5_lite``."""
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_")


def other_chip(platform: str, device_kind: str) -> Chip:
    """A device that is no TPU of the table: it can be measured on."""
    return Chip(
        name=slug(device_kind),
        device_kind=device_kind,
        topology="",
        clock_ghz=0.0,
        cores=1,
        mxu=0,
        tflops={},
        hbm_gbps=0.0,
        hbm_bytes=0,
        vmem_bytes=0,
        scoped_vmem_bytes=0,
        platform=platform,
    )


def get_chip(target: str) -> Chip:
    """The chip named `target` (``v5e``, ``cpu``) or of that device kind (``TPU v5 lite``, ``NVIDIA H200``)."""
    chip = find_chip(target) if isinstance(target, str) else None
    if chip is None:
        raise UsageError(f"unknown target {target!r}: use {one_of(CHIPS)}")
    return chip


def find_chip(target: str) -> Chip | None:
    """`get_chip`, or None where there is no such chip."""
    if target in CHIPS:
        return CHIPS[target]
    for chip in _CHIPS:
        if chip.device_kind == target:
            return chip
    if platform := _OTHERS.get(target.partition(" ")[0]):
        return other_chip(platform, target)
    return None
