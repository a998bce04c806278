"""Configs read from a CSV file whose columns may use short names, and those names."""

from __future__ import annotations

import csv
import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autotune.chips import Chip
from autotune.errors import ResultsError, UsageError, one_of
from autotune.kernel import Kernel
from autotune.problem import field_kinds, parse_pairs
from autotune.space import Space


@dataclasses.dataclass(frozen=True)
class Row:
    """One row: the problem it is about, its whole config, and the constraint it breaks, if any."""

    problem: Any
    config: dict[str, Any]
    invalid: str | None


def short_names(params: Iterable[str]) -> dict[str, str]:
    """What the field writes for short: ``bm`` for block_m, ``bkv`` for block_kv, ``bkvc`` for block_kv_compute.

    A short form of two parameters is none.
    """
    params = list(params)
    forms: dict[str, str] = {}
    uses: Counter[str] = Counter()
    for name in params:
        head, *rest = name.split("_")
        if not rest:
            continue
        initials = "".join(word[0] for word in rest)
        last = rest[0] + "".join(word[0] for word in rest[1:])
        for form in {head[0] + initials, head[0] + last, head[0] + "_".join(rest), head[0] + "".join(rest)}:
            forms[form] = name
            uses[form] += 1
    return {form: name for form, name in forms.items() if uses[form] == 1 and form not in params}


def read_rows(path: Path, kernel: Kernel, problem: Any, chip: Chip, columns: str | None) -> list[Row]:
    """The rows of `path`, in its order.

    Args:
        path: The CSV file; parameters and problem fields are taken by column name, other columns ignored.
        kernel: Whose configs they are.
        problem: What a row without problem columns is about.
        chip: Decides the space.
        columns: ``bm=block_m,…``, before the short names are tried.

    Raises:
        ResultsError: The file cannot be read.
        UsageError: A column is missing or a value malformed; names the line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            header = [name.strip() for name in reader.fieldnames or []]
            reader.fieldnames = header
            lines = [(reader.line_num, fields) for fields in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ResultsError(f"{path} cannot be read as CSV: {error}") from None
    if not lines:
        raise UsageError(f"{path} has no rows: give a header of parameter names and one config a row")
    if twice := [name for name, uses in Counter(filter(None, header)).items() if uses > 1]:
        raise UsageError(f"{path} has the column {twice[0]!r} twice: give each its own name")
    spaces: dict[Any, Space] = {problem: kernel.space(problem, chip)}
    meanings = _meanings(header, spaces[problem].params, columns)
    rows = []
    for line, fields in lines:
        if None in fields or None in fields.values():
            raise UsageError(f"{path}, line {line}: it must have {len(header)} columns, like the header")
        try:
            own = {name: fields[name] for name in field_kinds(kernel.problem_type) if fields.get(name, "") != ""}
            about = problem.replace(own) if own else problem
            if about not in spaces:
                spaces[about] = kernel.space(about, chip)
            rows.append(_row(about, spaces[about], fields, meanings))
        except UsageError as error:
            raise UsageError(f"{path}, line {line}: {error}") from None
    return rows


def _meanings(header: list[str], params: Mapping[str, Any], columns: str | None) -> dict[str, str]:
    """Column to parameter: what was said, then equal names, then short forms."""
    said = parse_pairs(columns, "--columns") if columns else {}
    for column, name in said.items():
        if column not in header:
            raise UsageError(f"--columns names {column!r}: the file has {', '.join(header)}")
        if name not in params:
            raise UsageError(f"--columns gives {column} the unknown parameter {name!r}: use {one_of(params)}")
    if several := [name for name, uses in Counter(said.values()).items() if uses > 1]:
        raise UsageError(f"--columns gives several columns the parameter {several[0]!r}: each has one column")
    meanings = dict(said)
    for names in ({name: name for name in params}, short_names(params)):
        for column, name in names.items():
            if column in header and column not in meanings and name not in meanings.values():
                meanings[column] = name
    return meanings


def _row(problem: Any, space: Space, fields: Mapping[str, str], meanings: Mapping[str, str]) -> Row:
    config = space.parse({name: fields[column] for column, name in meanings.items() if fields[column].strip()})
    return Row(problem, config, space.why_invalid(config))
