"""JSON objects over one connection, whose other end is known to be gone within `SILENCE_S`."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Mapping
from typing import Any

BEAT_S = 2.0
SILENCE_S = 20.0  # without even a beat: that host is down, or cannot be reached any more


class Lost(Exception):
    """The other end has ended, or is silent."""


class Channel:
    """One end.

    Args:
        connection: Connected; the channel's from now on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.settimeout(SILENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines = connection.makefile("rb")
        self._sending = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises `Lost` where it cannot be sent."""
        try:
            with self._sending:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Lost(f"nothing can be sent: {error}") from error

    def receive(self) -> dict[str, Any]:
        """The next message; raises `Lost` where there will be none."""
        while True:
            try:
                line = self._lines.readline()
            except TimeoutError as error:
                raise Lost(f"nothing was heard for {SILENCE_S:g} s") from error
            except (OSError, ValueError) as error:
                raise Lost(str(error)) from error
            if not line.endswith(b"\n"):
                raise Lost("the connection has ended")
            try:
                message = json.loads(line)
            except ValueError as error:
                raise Lost("what came is no message of ours") from error
            if message:
                return message

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            try:
                self.send({})
            except Lost:
                return  # Who receives finds out why.
