"""``autotune report``: tuned beside baseline."""

from __future__ import annotations

import argparse

from autotune import report
from autotune.cli.common import check_writable, load_kernel, print_json
from autotune.kernel import kernel_names

DEFAULT_FORMATS = ("md", "csv")


def run(arguments: argparse.Namespace) -> int:
    known = kernel_names()
    for name in arguments.kernels:
        if name not in known:
            load_kernel(name)  # Says which there are.
    check_writable(arguments.results)
    check_writable(arguments.results / "reports")
    formats = (arguments.format,) if arguments.format else DEFAULT_FORMATS
    written = report.write_reports(arguments.results, arguments.kernels, formats)
    if arguments.json:
        print_json([{"kernel": name, "files": [str(path) for path in paths]} for name, paths in written.items()])
    else:
        for paths in written.values():
            for path in paths:
                print(path)
    return 0
