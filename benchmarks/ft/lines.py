"""JSON lines over a socket between the driver of a benchmark and its workers."""

import contextlib
import json
import socket
from typing import Any


class Lines:
    """One end; `receive` blocks, `arrived` does not."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._pending = b""

    def send(self, message: Any) -> None:
        """Send one message; a driver or worker that is gone hears nothing."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Any | None:
        """Return the next message; None: the other end is gone."""
        while b"\n" not in self._pending:
            if not self._read():
                return None
        return self._next()

    def arrived(self) -> tuple[list[Any], bool]:
        """Return what has come, after one read, and whether the other end lives."""
        lives = self._read()
        messages = []
        while b"\n" in self._pending:
            messages.append(self._next())
        return messages, lives

    def close(self) -> None:
        self.connection.close()

    def _read(self) -> bool:
        try:
            data = self.connection.recv(1 << 20)
        except OSError:
            return False
        self._pending += data
        return bool(data)

    def _next(self) -> Any:
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)
