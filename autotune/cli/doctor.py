"""``autotune doctor``: what this machine can do, and what is missing."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from typing import Any

from autotune import render, versions
from autotune.cli.common import load_kernel, print_json, reserved_stdout
from autotune.cli.parser import usable_cores
from autotune.engines.compiler.engine import why_unusable
from autotune.errors import AutotuneError
from autotune.kernel import foreign_kernels_package, kernel_names

NEEDED = ("jax", "jaxlib", "optuna", "numpy", "pandas", "rich", "filelock")


def run(arguments: argparse.Namespace) -> int:
    with reserved_stdout(arguments.json):
        findings = [*_facts(), _compiler()]
    healthy = all(ok for _, ok, _ in findings)
    if arguments.json:
        document: list[dict[str, Any]] = [{"name": name, "ok": ok, "detail": text} for name, ok, text in findings]
        print_json({"ok": healthy, "findings": document})
    else:
        out = render.console()
        for name, ok, detail in findings:
            out.print(f"{'ok     ' if ok else 'MISSING'}  {name:<14} {detail}", soft_wrap=True)
    return 0 if healthy else 1


def _facts() -> Iterator[tuple[str, bool, str]]:
    """What needs no engine to be known: name, whether it is as it should be, a line."""
    right = sys.version_info >= (3, 11)
    yield "python", right, f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "cores", True, f"{usable_cores()} usable: --jobs is that by default"
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        yield "memory", gib >= 3.5, f"{gib:.1f} GiB; a run with two workers takes up to 4"
    for package in NEEDED:
        try:
            yield package, True, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, False, f"not installed: pip install {package}"
    yield _kernels_package()
    for name in kernel_names():
        try:
            load_kernel(name)
            yield f"kernel {name}", True, "loads"
        except AutotuneError as error:
            yield f"kernel {name}", False, str(error)


def _compiler() -> tuple[str, bool, str]:
    """Whether the TPU compiler works here: a worker compiles a trifle with it."""
    if reason := why_unusable():
        return "TPU compiler", False, f"{reason}; configs are ranked by arithmetic alone"
    return "TPU compiler", True, f"libtpu {versions.installed().get('libtpu', 'at TPU_LIBRARY_PATH')} compiles"


def _kernels_package() -> tuple[str, bool, str]:
    """Another distribution, Hugging Face's, installs a package of the same name."""
    wrong = foreign_kernels_package()
    return "kernels", wrong is None, wrong or "this project's own"
