"""What a compiled program takes of each device's memory, by its compiler's account."""

from __future__ import annotations

from typing import Any


def program_bytes(compiled: Any, platform: str) -> int | None:
    """Bytes of arguments, results and temporaries at their peak, where the compiler accounts for them.

    Args:
        compiled: What was compiled.
        platform: What for, as JAX names it. Of a TPU the peak is taken as its compiler gives it: it holds that against
            the memory there is, and the temporaries' size has room in it that is never used at once. Elsewhere the
            peak that is given lacks the temporaries, and all sizes are added up.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    if platform == "tpu" and (peak := stats.peak_memory_in_bytes):
        return int(peak)
    parts = (stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.temp_size_in_bytes)
    return sum(parts) - stats.alias_size_in_bytes
