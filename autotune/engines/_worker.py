"""The worker process: runs one job at a time, named by module and function, and answers in JSON lines.

It is started with the environment its engine needs, because libtpu reads its flags when it loads. It
may crash or be killed at any time: nothing but its current job depends on it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

_PARENT_CHECK_S = 1.0


def resolve(name: str) -> Any:
    """The object called ``module:attribute``."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _exit_with_parent(parent: int) -> None:
    """A worker must not outlive a tuner that was killed, not even within a long compile."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    _end()


def _end() -> None:
    """Ends this process, and what its jobs have started, as the tuner does when it kills a worker."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _answer(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"result": call()}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def _rss_bytes() -> int:
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0  # not Linux: the parent then never recycles this worker


def main(warm_up: str) -> None:
    """Answers requests on standard input until it closes; `warm_up` runs first, its result is sent first."""
    own = os.getpid()
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    # Libraries print to standard output; the answers must not mix with that.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps(_answer(resolve(warm_up))), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        answer = _answer(lambda request=request: resolve(request["job"])(**request["arguments"]))
        if os.getpid() != own:  # A job forked, and came back twice: the next job would get the second answer.
            os._exit(0)
        print(json.dumps({**answer, "rss_bytes": _rss_bytes()}), file=answers)
    _end()


if __name__ == "__main__":
    main(sys.argv[1])
