"""The command line: ``python -m autotune`` and the console script ``autotune``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from autotune.cli.parser import parse
from autotune.errors import AutotuneError, UsageError

DONE, NOTHING_VALID, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code.

    0: done. 1: nothing valid was found, or the machine lacks what is needed. 2: bad usage, said in one line
    on standard error, with nothing written. 130: interrupted before there was anything to finish.
    """
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        return arguments.run(arguments)
    except UsageError as error:
        return _fail(error, BAD_USAGE)
    except AutotuneError as error:
        return _fail(error, NOTHING_VALID)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # The reader of our output has gone: nothing is left to be said to it.
        return DONE


def _fail(reason: object, code: int) -> int:
    line = " ".join(str(reason).split())
    print(f"autotune: {line}", file=sys.stderr)
    return code
