"""The command line: ``python -m autotune`` and the console script ``autotune``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from autotune.cli.parser import parse
from autotune.cli.streams import flush_stdout, prepare, reserved_stdout
from autotune.errors import AutotuneError, UsageError

DONE, NOTHING_VALID, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code.

    0: done. 1: nothing valid was found, or the machine lacks what is needed. 2: bad usage, said in one line
    on standard error, with nothing written. 130: interrupted before there was anything to finish.
    """
    code = DONE
    try:
        prepare()
        arguments = parse(sys.argv[1:] if argv is None else argv)
        # From here on: whatever a kernel's package prints when it is imported is no part of the document either.
        with reserved_stdout(arguments.json):
            code = arguments.run(arguments)
    except SystemExit as done:  # --help and --version.
        code = DONE if done.code is None else int(done.code)
    except UsageError as error:
        code = _fail(error, BAD_USAGE)
    except AutotuneError as error:
        code = _fail(error, NOTHING_VALID)
    except KeyboardInterrupt:
        code = _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        pass  # The reader of our output has gone: nothing is left to be said to it.
    except OSError as error:  # A full disk, a folder that went away: no fault of ours, and no traceback.
        code = _fail(_text(error), NOTHING_VALID)
    try:
        flush_stdout()
    except OSError as error:
        code = _fail(f"standard output: {error.strerror}", NOTHING_VALID)
    return code


def _text(error: OSError) -> str:
    if error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror


def _fail(reason: object, code: int) -> int:
    line = " ".join(str(reason).split())
    with contextlib.suppress(OSError):
        print(f"autotune: {line}", file=sys.stderr)
    return code
