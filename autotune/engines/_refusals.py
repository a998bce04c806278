"""The typed status behind the text of an error."""

from __future__ import annotations

import re

from autotune.chips import MIB
from autotune.outcome import Outcome, Status

_VMEM_NEEDED = re.compile(r"Scoped allocation with size ([\d.]+)([KMGT])")
# After buffers were assigned; and before, where the program is so far off that the compiler does not begin.
_HBM_USED = re.compile(
    r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm|\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)"
)
_UNITS = {"K": 1024, "M": MIB, "G": 1024 * MIB, "T": 1024**2 * MIB}
_MESSAGE_LIMIT = 2000


def classify_compile_error(text: str) -> Outcome:
    """The typed refusal behind the compiler's text. VMEM and HBM both say RESOURCE_EXHAUSTED."""
    lowered = text.lower()
    if "scopedvmemoom" in lowered or "memory space vmem" in lowered or "scoped vmem limit" in lowered:
        needed = _VMEM_NEEDED.search(text)
        vmem = _bytes(*needed.group(1, 2)) if needed else None
        return Outcome(Status.VMEM_OOM, vmem_bytes=vmem, message=text)
    if "hbmoom" in lowered or "out of memory on hbm" in lowered or "memory space hbm" in lowered:
        used = [part for part in found.groups() if part] if (found := _HBM_USED.search(text)) else []
        needed = _bytes(*used[:2]) if used else None
        over = max(1, needed - _bytes(*used[2:])) if needed is not None else None  # figures are rounded
        return Outcome(Status.HBM_OOM, peak_bytes=needed, over_bytes=over, message=text)
    if "mosaic failed" in lowered or "e2001" in lowered or "e2002" in lowered or "e2003" in lowered:
        return Outcome(Status.LOWERING_ERROR, message=text)
    return Outcome(Status.COMPILE_ERROR, message=text)


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])


def classify_run_error(text: str) -> Outcome:
    """What a program that compiled came to when it ran: out of memory, or any other failure."""
    out_of_memory = "resource_exhausted" in text.lower() or "out of memory" in text.lower()
    return Outcome(Status.HBM_OOM if out_of_memory else Status.RUNTIME_ERROR, message=text)


def text_of(error: Exception) -> str:
    """Type and text, of bounded length."""
    return f"{type(error).__name__}: {error}"[:_MESSAGE_LIMIT]
