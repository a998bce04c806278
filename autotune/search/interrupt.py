"""Ctrl-C that ends a run cleanly."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Self


class Interrupt:
    """While entered, the first SIGINT or SIGTERM only sets `requested`; the second raises KeyboardInterrupt.

    `since` is when that was, by `time.monotonic()`. Does nothing outside the main thread, where Python delivers no
    signals.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self._previous: dict[signal.Signals, object] = {}

    @property
    def requested(self) -> bool:
        return self.since is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.since = time.monotonic()
