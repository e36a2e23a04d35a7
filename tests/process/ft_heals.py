"""States that are healed, and what is between a source and a destination."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable
from datetime import timedelta

import torch

LONG = timedelta(seconds=60)
STEP = 5
NUM_MB = 24


def make_state(value: float = 1.0, **values: object) -> dict[str, object]:
    """Return a state of some large tensors and a small one."""
    big = {f"w{i}": torch.full((NUM_MB * 1000 * 250 // 3,), value + i) for i in range(3)}
    return {"model": {**big, "small": torch.full((5,), value)}, "lineage": "abc", **values}


def is_equal(a: dict, b: dict) -> bool:
    """Tell whether two states have the same tensors."""
    return all(a["model"][k].equal(b["model"][k]) for k in {*a["model"], *b["model"]})


class InThread(threading.Thread):
    """Calls a function in a thread; `result` waits for it."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._call, self._value, self._error = call, None, None
        self.start()

    def run(self) -> None:
        """Call it."""
        try:
            self._value = self._call()
        except Exception as e:
            self._error = e

    def result(self) -> object:
        """Return or raise what the function did; it must come to an end."""
        self.join(20)
        assert not self.is_alive()
        if self._error:
            raise self._error
        return self._value


def cut_after(num_bytes: int) -> Callable[[bytes, int], bytes | None]:
    """End all connections once so many bytes have passed."""
    return lambda data, before: data if before < num_bytes else None


class StallAfter:
    """Nothing more comes once so many bytes have passed."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.reached = threading.Event()
        self.end = threading.Event()

    def __call__(self, data: bytes, before: int) -> bytes | None:
        """Pass the bytes on, or wait."""
        if before < self._num_bytes:
            return data
        self.reached.set()
        self.end.wait(60)
        return None


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
