"""The arguments of every command."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from autotune import __version__
from autotune.chips import CHIPS, DEFAULT_TARGET
from autotune.errors import UsageError, one_of

ENGINES = ("auto", "compiler", "device")
FORMATS = ("md", "csv", "html")
TUNE = "tune"
LONGEST_S = 7 * 24 * 3600  # What waits longer than a week is a mistake, and what waits much longer overflows.
MOST_JOBS = 1024
SEEDS = 2**32  # numpy's generators take no more.
PRESETS_ACTIONS = {
    "list": "one line each",
    "show": "all that is kept of each",
    "check": "whether a lookup takes them, they still compile, and still pay",
    "confirm": "measure the predicted ones of the attached device",
    "export": "write them in another tuner's format",
}


class _Parser(argparse.ArgumentParser):
    """Reports errors as `UsageError`, so that they are one line like all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads a command line; `run` of the result is the function that carries it out.

    Raises:
        UsageError: It cannot be read.
    """
    parser, commands = _build()
    arguments = list(argv)
    if arguments and arguments[0] not in (*commands, "-h", "--help", "--version"):
        arguments.insert(0, TUNE)  # `autotune KERNEL …`: the main job needs no word of its own.
    parsed, unknown = parser.parse_known_args(arguments or ["--help"])
    if unknown:  # argparse would send the user to the help of all commands.
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)} (see autotune {arguments[0]} --help)")
    return parsed


def _build() -> tuple[argparse.ArgumentParser, list[str]]:
    parser = _Parser(
        prog="autotune",
        usage="autotune KERNEL [options]\n       autotune COMMAND …",
        description="Tunes JAX kernels for TPUs, with or without the TPU.",
        epilog="`autotune KERNEL` tunes a kernel; `autotune tune --help` lists its options.",
    )
    parser.add_argument("--version", action="version", version=f"autotune {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, prog="autotune")
    _add_tune(commands)
    _add_list(commands)
    _add_predict(commands)
    _add_report(commands)
    _add_presets(commands)
    _add_accuracy(commands)
    _add_doctor(commands)
    return parser, list(commands.choices)


def _add_tune(commands: Any) -> None:
    parser = commands.add_parser(TUNE, help="tune a kernel (the word may be left out)")
    parser.add_argument("kernel", metavar="KERNEL", help="what to tune: see `autotune list`")
    parser.add_argument("--trials", type=_positive_int, default=100, metavar="N", help="configs to try (100)")
    _add_task(parser)
    _add_engine(parser, ENGINES)
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="of the search (0)")
    parser.add_argument(
        "--budget", type=_positive, metavar="S", help="seconds after which no more is tried; the best is validated then"
    )
    parser.add_argument(
        "--storage", metavar="URL", help="a path, journal:PATH, sqlite:///PATH or postgresql://… (a file in --results)"
    )
    parser.add_argument("--study", metavar="NAME", help="go on with this study (one derived from the other options)")
    parser.add_argument(
        "--start-from",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="another tuner's table, whose blocks are tried first: tokamax' caches, tpu-inference's tables",
    )
    _add_pod(parser)
    _add_results(parser)
    _add_json(parser)
    parser.set_defaults(run=_run("tune"))


def _add_list(commands: Any) -> None:
    parser = commands.add_parser("list", help="kernels, named problems, parameters")
    parser.add_argument("kernel", metavar="KERNEL", nargs="?", help="one kernel, with its space in full")
    _add_task(parser)
    _add_json(parser)
    parser.set_defaults(run=_run("listing"))


def _add_predict(commands: Any) -> None:
    parser = commands.add_parser("predict", help="the time of given configs")
    parser.add_argument("kernel", metavar="KERNEL")
    _add_task(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--config", metavar="k=v,…", help="one config; bm=… for block_m=… will do")
    which.add_argument("--configs", type=Path, metavar="FILE.csv", help="one config a row, a parameter a column")
    parser.add_argument("--columns", metavar="c=name,…", help="what other column names mean: bm=block_m,…")
    _add_engine(parser, ("auto", "compiler", "device"))
    _add_json(parser)
    parser.set_defaults(run=_run("predict"))


def _add_report(commands: Any) -> None:
    parser = commands.add_parser("report", help="tuned beside baseline, for people and for pandas")
    parser.add_argument("kernels", metavar="KERNEL", nargs="*", help="all that have presets")
    parser.add_argument("--format", choices=FORMATS, help="only this one (md and csv)")
    _add_results(parser)
    _add_json(parser)
    parser.set_defaults(run=_run("report"))


def _add_presets(commands: Any) -> None:
    parser = commands.add_parser("presets", help="list, show, check or measure the presets that a lookup would find")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    for name, text in PRESETS_ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("kernel", metavar="KERNEL", nargs="?", help="only this kernel's (all)")
        if name != "confirm":
            action.add_argument("--target", metavar="T", help=f"only those of {one_of(CHIPS)} (all)")
        _add_results(action, default=None, text="this results folder instead of the search path")
        if name == "check":
            action.add_argument("--quick", action="store_true", help="compile nothing")
            _add_jobs(action)
        if name in ("check", "confirm"):
            _add_timeout(action)
        if name == "export":
            action.add_argument("--to", choices=("tokamax", "t4"), help="tokamax' caches or kernel_tuner's format")
            action.add_argument("--out", type=Path, default=Path("exported"), metavar="DIR", help="where to (exported)")
        _add_json(action)
    parser.set_defaults(run=_run("presets"))


def _add_accuracy(commands: Any) -> None:
    parser = commands.add_parser("accuracy", help="predictions beside times measured on real TPUs")
    parser.add_argument("tables", metavar="TABLE", nargs="*", help="these tables (all that take seconds)")
    parser.add_argument("--all", action="store_true", help="the tables that take minutes too")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw predicted against measured")
    _add_jobs(parser)
    parser.add_argument("--timeout", type=_positive, default=300.0, metavar="S", help="seconds a row (300)")
    _add_json(parser)
    parser.set_defaults(run=_run("accuracy"))


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="what this machine can do, and what is missing")
    _add_json(parser)
    parser.set_defaults(run=_run("doctor"))


def _add_task(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", metavar="T", help=f"{one_of(CHIPS)} (the attached TPU; {DEFAULT_TARGET} where there is none)"
    )
    parser.add_argument("--problem", metavar="NAME|k=v,…", help="a named problem, sizes over the default one, or both")


def _add_engine(parser: argparse.ArgumentParser, engines: Sequence[str]) -> None:
    parser.add_argument("--engine", choices=engines, default="auto", help="what gives the times (auto)")
    _add_jobs(parser, "workers (one a core; one a chip that measures)")
    _add_timeout(parser)


def _add_pod(parser: argparse.ArgumentParser) -> None:
    pod = parser.add_argument_group(
        "several processes (a pod's hosts)",
        "the same command on each, with --engine device; what is left out is taken from JAX_COORDINATOR_ADDRESS, "
        "JAX_NUM_PROCESSES and JAX_PROCESS_ID",
    )
    pod.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of process 0, which leads; auto: the first host of this TPU slice"
    )
    pod.add_argument("--num-processes", type=_positive_int, metavar="N", help="how many there are")
    pod.add_argument("--process-id", type=_seed, metavar="I", help="which one this is, from 0")


def _add_jobs(parser: argparse.ArgumentParser, text: str = "workers (one a core)") -> None:
    parser.add_argument("--jobs", type=_jobs, default=usable_cores(), metavar="N", help=text)


def _add_timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout",
        type=_positive,
        metavar="S",
        help="seconds a trial (the kernel's own: 120 for most)",
    )


def _add_results(parser: argparse.ArgumentParser, default: Path | None = Path("results"), text: str = "") -> None:
    parser.add_argument("--results", type=Path, default=default, metavar="DIR", help=text or "results folder (results)")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")


def _run(module: str) -> Callable[[argparse.Namespace], int]:
    """The `run` of a command's module, imported only when it is called: `list` must not wait for optuna."""

    def run(arguments: argparse.Namespace) -> int:
        import importlib

        return importlib.import_module(f"autotune.cli.{module}").run(arguments)

    return run


def usable_cores() -> int:
    """Cores this process may use, where the system tells."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _positive_int(text: str) -> int:
    return _number(text, int, 1, 2**31, "a positive integer")


def _jobs(text: str) -> int:
    return _number(text, int, 1, MOST_JOBS, f"a positive integer of at most {MOST_JOBS}")


def _seed(text: str) -> int:
    return _number(text, int, 0, SEEDS - 1, f"an integer of 0 or more, below {SEEDS}")


def _positive(text: str) -> float:
    return _number(text, float, 1e-3, LONGEST_S, f"a positive number of seconds, at most {LONGEST_S} (a week)")


def _number(text: str, kind: type, least: float, most: float, right: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text} must be {right}")
    return value
