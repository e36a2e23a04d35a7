"""A stretch of network between a replica and its source, which can fail."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable


class Relay:
    """Passes connections on to a port; what the source sends goes through ``on_bytes``.

    It gets the bytes and how many have passed before, and returns what to send instead; None ends
    the connection. It may block.
    """

    def __init__(self, url: str, on_bytes: Callable[[bytes, int], bytes | None]) -> None:
        self._port = int(re.search(r":(\d+)/", url)[1])
        self._on_bytes = on_bytes
        self.requests = b""
        self._passed = 0
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = re.sub(
            r"[^/]*:\d+/", f"127.0.0.1:{self._listener.getsockname()[1]}/", url, count=1
        )
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """End all connections, also one that has just been accepted."""
        _end(self._listener)
        self._acceptor.join()
        for s in self._sockets:
            _end(s)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(client)
            try:
                server = socket.create_connection(("127.0.0.1", self._port))
            except OSError:  # the source is gone: so is whoever asks for it
                _end(client)
                continue
            self._sockets.append(server)
            for way in ((client, server, self._note), (server, client, self._pass)):
                threading.Thread(target=self._run, args=way, daemon=True).start()

    def _run(self, source: socket.socket, to: socket.socket, through: Callable) -> None:
        try:
            while data := source.recv(1 << 16):
                if (data := through(data)) is None:
                    break
                to.sendall(data)
        except OSError:
            pass
        finally:
            _end(source)
            _end(to)

    def _note(self, data: bytes) -> bytes:
        with self._lock:
            self.requests += data
        return data

    def _pass(self, data: bytes) -> bytes | None:
        with self._lock:
            before, self._passed = self._passed, self._passed + len(data)
        return self._on_bytes(data, before)


def _end(s: socket.socket) -> None:
    with contextlib.suppress(OSError):
        s.shutdown(socket.SHUT_RDWR)
    s.close()
