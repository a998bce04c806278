"""The measured tables that ship with the project: a declaration here, the figures in ``data/NAME.csv``.

A data file's first line is a comment that names its source. Its columns are what the table's workload needs to
rebuild a row, and ``measured_ms``: the time of one call in milliseconds.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib.resources
import importlib.util
from typing import Any

from autotune.errors import UsageError, one_of

MEASURED = "measured_ms"


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement: what was timed, and how long one call took, in milliseconds."""

    fields: dict[str, Any]
    measured_ms: float

    @property
    def label(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.fields.items())


@dataclasses.dataclass(frozen=True)
class Table:
    """Measurements of one kind on one chip.

    Attributes:
        name: As on the command line; the data file is called so.
        target: The chip they were taken on.
        workload: ``module:function`` under `autotune.accuracy.workloads` that rebuilds a row.
        fitted: Whether constants of the timing model were fitted on these rows; else they are held out.
        wall_clock: Whether the times contain the host's dispatch, some 0.1 ms, which no prediction has.
        sweep: Whether all rows are configs of one problem, so that picking the best of them means something.
        pairs: The column whose equal values mark rows before and after one change (see the column ``which``).
        slow: Takes minutes: predicted with ``--all`` or when it is named.
        needs: The package that holds the kernel that was timed, where that is none of the project's dependencies.
        note: What a reader must know of how it was measured.
    """

    name: str
    target: str
    workload: str
    fitted: bool = False
    wall_clock: bool = False
    sweep: bool = False
    pairs: str | None = None
    slow: bool = False
    needs: str | None = None
    note: str = ""

    @property
    def source(self) -> str:
        """Repository and file, as the data file names them."""
        return self._lines()[0].removeprefix("#").strip()

    @property
    def installed(self) -> bool:
        """Whether what it `needs` is there."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    def rows(self) -> list[Row]:
        """Every measurement, in the file's order."""
        rows = []
        for record in csv.DictReader(self._lines()[1:]):
            fields = {name: _value(text) for name, text in record.items() if text}
            rows.append(Row(fields, float(fields.pop(MEASURED))))
        return rows

    def _lines(self) -> list[str]:
        folder = importlib.resources.files("autotune.accuracy")
        return folder.joinpath("data", f"{self.name}.csv").read_text(encoding="utf-8").splitlines()


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


HALF_CHIP = "Times are of one TensorCore, half a chip."
MEAN = "Rows whose losses are averaged; those that sum them run the same program but for one division."
TOKAMAX = "tokamax' own kernel with the transposes around it (pip install tokamax); rows in bfloat16 without residuals."
PLAIN = "Rows in bfloat16 with a causal mask, as many heads of keys as of queries, and nothing else asked for."

_TABLES = (
    Table("amleng_matmul_v5e", "v5e", "matmul:registered", fitted=True, sweep=True),
    Table("amleng_scale_v5e", "v5e", "elementwise:scale", fitted=True, sweep=True),
    Table("jax_docs_matmul_v5e", "v5e", "matmul:tutorial", wall_clock=True),
    Table("jaxbench_pallas_v6e", "v6e", "jaxbench:pallas", pairs="workload"),
    Table(
        "jaxbench_xla_v6e",
        "v6e",
        "jaxbench:xla",
        note="The workloads made of products with elementwise or row-wise epilogues, and two of attention.",
    ),
    Table("tokamax_lce_pallas_v7x", "v7x", "loss:fused", slow=True, note=f"{HALF_CHIP} {MEAN}"),
    Table("tokamax_lce_xla_v7x", "v7x", "loss:xla", fitted=True, slow=True, note=f"{HALF_CHIP} {MEAN}"),
    Table("tokamax_lce_xla_v6e", "v6e", "loss:xla", slow=True, note=MEAN),
    Table("tokamax_attention_xla_v5p", "v5p", "attention:xla", slow=True, note=PLAIN),
    Table("tokamax_attention_xla_v6e", "v6e", "attention:xla", slow=True, note=PLAIN),
    Table("tokamax_attention_xla_v7x", "v7x", "attention:xla", fitted=True, slow=True, note=f"{HALF_CHIP} {PLAIN}"),
    Table("tokamax_attention_pallas_v5p", "v5p", "attention:tokamax", slow=True, needs="tokamax", note=TOKAMAX),
    Table("tokamax_attention_pallas_v6e", "v6e", "attention:tokamax", slow=True, needs="tokamax", note=TOKAMAX),
    Table(
        "tokamax_attention_pallas_v7x",
        "v7x",
        "attention:tokamax",
        fitted=True,
        slow=True,
        needs="tokamax",
        note=f"{HALF_CHIP} {TOKAMAX}",
    ),
)

TABLES: dict[str, Table] = {table.name: table for table in _TABLES}


def select(names: list[str], *, everything: bool = False) -> list[Table]:
    """The tables called `names`; without names those that are quick, or all whose kernels are installed.

    Raises:
        UsageError: For a name that is not there, or whose kernel is not installed.
    """
    for name in names:
        if name not in TABLES:
            raise UsageError(f"unknown table {name!r}: use {one_of(TABLES)}")
        if not TABLES[name].installed:
            raise UsageError(f"table {name!r} predicts a kernel of another package: pip install {TABLES[name].needs}")
    if names:
        return [TABLES[name] for name in dict.fromkeys(names)]
    return [table for table in _TABLES if table.installed and (everything or not table.slow)]
