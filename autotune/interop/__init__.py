"""Other tuners' results: read, to begin a search with; and this one's, written in their formats."""

from autotune.interop.export import FORMATS, export
from autotune.interop.rows import Row, read
from autotune.interop.start import Start, starting_configs

__all__ = ["FORMATS", "Row", "Start", "export", "read", "starting_configs"]
