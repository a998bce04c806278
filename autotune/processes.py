"""Other processes on this machine."""

from __future__ import annotations

import os


def is_running(pid: int) -> bool:
    """Whether a process of that id exists, whoever's it is."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
