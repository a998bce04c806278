"""What a compiled program takes of each device's memory, by its compiler's account."""

from __future__ import annotations

from typing import Any


def program_bytes(compiled: Any) -> int | None:
    """Bytes of arguments, results and temporaries, where the compiler accounts for them."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    parts = (stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.temp_size_in_bytes)
    return sum(parts) - stats.alias_size_in_bytes
