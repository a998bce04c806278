"""The time of a program that runs on many devices: its scheduled HLO, op by op, with what runs beside them."""

from autotune.engines.compiler.timeline.hlo import Array, Instruction, Module, parse
from autotune.engines.compiler.timeline.interconnect import Interconnect
from autotune.engines.compiler.timeline.ops import PALLAS, OpTime, OpTimes
from autotune.engines.compiler.timeline.traffic import awaited_bytes
from autotune.engines.compiler.timeline.walk import Timeline, walk

__all__ = [
    "PALLAS",
    "Array",
    "Instruction",
    "Interconnect",
    "Module",
    "OpTime",
    "OpTimes",
    "Timeline",
    "awaited_bytes",
    "parse",
    "walk",
]
