"""``autotune list``: kernels, named problems, parameters. No rich, no jax: it answers at once."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from autotune.chips import DEFAULT_TARGET, get_chip
from autotune.cli.common import load_kernel, print_json, target_for
from autotune.errors import AutotuneError, UsageError
from autotune.kernel import Kernel, kernel_names
from autotune.render import WIDTH
from autotune.space import Param

COUNTABLE = 1_000_000  # points of a grid; to walk more takes longer than anyone waits for a list


def run(arguments: argparse.Namespace) -> int:
    target = arguments.target or DEFAULT_TARGET
    get_chip(target)  # an unknown one is refused, whatever the kernels name
    if arguments.problem and not arguments.kernel:
        raise UsageError("--problem is one kernel's: write `autotune list KERNEL --problem …`")
    kernels = [load_kernel(arguments.kernel)] if arguments.kernel else list(_all_kernels())
    if arguments.kernel:
        target_for(kernels[0], kernels[0].parse_problem(arguments.problem), arguments.target)
    documents = [_document(kernel, arguments.problem, target, count=arguments.kernel is not None) for kernel in kernels]
    if arguments.json:
        print_json(documents)
        return 0
    for kernel, document in zip(kernels, documents, strict=True):
        print("\n".join(_lines(kernel, document)))
    return 0


def _all_kernels() -> Iterator[Kernel]:
    """The kernels that load; one package's broken kernel must not hide the others."""
    for name in kernel_names():
        try:
            yield load_kernel(name)
        except AutotuneError as error:
            print(f"autotune: {error}", file=sys.stderr)


def _document(kernel: Kernel, problem_text: str | None, target: str, *, count: bool) -> dict[str, Any]:
    """Of the target that the problem names, or else of `target`."""
    problem = kernel.parse_problem(problem_text)
    chip = get_chip(kernel.target(problem) or target)
    space = kernel.space(problem, chip)
    document = {
        "name": kernel.name,
        "summary": kernel.summary,
        "problem_fields": list(problem.to_dict()),
        "problems": {name: named.to_dict() for name, named in kernel.problems.items()},
        "space_of": {"problem": problem.to_dict(), "target": chip.name},
        "parameters": [
            {"name": p.name, "candidates": list(p.candidates), "doc": p.doc} | _default(p)
            for p in space.params.values()
        ],
        "constraints": [constraint.text for constraint in space.constraints],
        "grid": space.cardinality,
    }
    if count:  # Walks the whole grid.
        document["configs"] = space.size if space.cardinality <= COUNTABLE else None
    return document


def _default(param: Param) -> dict[str, Any]:
    if callable(param.default):
        return {"default": "depends on the others"}
    return {} if param.default is None else {"default": param.default}


def _lines(kernel: Kernel, document: dict[str, Any]) -> list[str]:
    lines = [f"{document['name']}: {document['summary']}", "  problems (the first is the default):"]
    width = max(len(name) for name in kernel.problems)
    for name, problem in kernel.problems.items():
        lines += _wrapped(f"    {name:<{width}}  ", str(problem), breaks=",")
    if options := [name for name in document["problem_fields"] if name not in kernel.parse_problem(None).shown()]:
        lines += _wrapped("  options that are off in the default problem: ", ", ".join(options))
    where = str(kernel.problem_type.from_dict(document["space_of"]["problem"]))
    lines += _wrapped("  parameters for ", f"{where} on {document['space_of']['target']}:", breaks=",")
    width = max(len(param["name"]) for param in document["parameters"])
    for param in document["parameters"]:
        default = f" (default {param['default']})" if "default" in param else ""
        lines += _wrapped(f"    {param['name']:<{width}}  ", f"{param['doc']}{default}")
        lines += _wrapped(f"    {'':<{width}}  ", " ".join(str(value) for value in param["candidates"]))
    if "configs" in document:
        lines.append("  constraints:")
        for text in document["constraints"]:
            lines += _wrapped("    - ", text)
        valid = document["configs"]
        of = f"{document['grid']:,} in the grid"
        lines.append(
            f"  {valid:,} valid configs of {of}" if valid is not None else f"  {of}, too many to count the valid ones"
        )
    else:
        lines.append(f"  {document['grid']} points in the grid; `autotune list {document['name']}` says more")
    return [*lines, ""]


def _wrapped(head: str, text: str, breaks: str = " ") -> list[str]:
    """`text` after `head`, its further lines indented alike."""
    if breaks != " ":
        text = text.replace(breaks, breaks + "\0")
    lines = textwrap.wrap(
        text.replace("\0", " "), WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    )
    return [line.replace(breaks + " ", breaks) if breaks != " " else line for line in lines]
