"""What a row of any tuner's table says, in one vocabulary; and the reader that knows all of their files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import ResultsError, UsageError


@dataclasses.dataclass(frozen=True)
class Row:
    """The blocks that were found best for one instance of an operation.

    Attributes:
        op: ``attention``, ``attention_bwd``, ``matmul``, ``gmm``, ``cross_entropy``, ``ragged_paged_attention``: what
            a kernel's `relatives` name.
        sizes: The instance, in the words of this project's problems, as far as the table says.
        blocks: Block sizes, and what else its config has, in the table's own words.
        time_ms: What it took there, where the table says.
    """

    op: str
    sizes: Mapping[str, int]
    blocks: Mapping[str, Any]
    time_ms: float | None = None


def read(path: Path) -> list[Row]:
    """The rows of a file: tokamax' autotuning caches and results (JSON), tpu-inference's tables (Python or JSON).

    A Python table is parsed and not run. What is not understood in a file is left out.

    Raises:
        UsageError: There is no such file, or nothing in it is understood.
        ResultsError: It cannot be read.
    """
    from autotune.interop import tokamax, tpu_inference

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        wrong = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"{path}: {wrong}") from None
    if path.suffix == ".py":
        rows = tpu_inference.rows_of_source(text, path)
    else:
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ResultsError(f"{path} is no JSON ({error}), and no Python table (.py)") from None
        rows = [*tokamax.rows_of(document, path), *tpu_inference.rows_of(document)]
    if not rows:
        raise UsageError(
            f"{path}: no row of it is understood: give a tokamax autotuning cache or result of a TPU kernel (JSON), or "
            "a table of tpu-inference (tuned_block_sizes.py, or its JSON)"
        )
    return rows
