"""A server's end of one worker: its socket, whether its process lives, whether it is stopped.

The kernel says whose process has connected (SO_PEERCRED), when it dies (a pidfd: forked children
may keep its socket open), and in which state it is (/proc): a worker that holds the interpreter
lock for minutes is well, one that was stopped by a signal is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import Protocol

from hpc_elastic.ft.lines import MAX_LINE_BYTES, Lines, to_line
from hpc_elastic.ft.protocol import Message
from hpc_elastic.readable import readable

_log = logging.getLogger(__name__)

_READ_BYTES = 1 << 16
_PAUSE_S = 0.1
_CREDENTIALS = struct.Struct("3i")


class Host(Protocol):
    """The server, as a `Worker` reports to it."""

    def said(self, worker: Worker, message: Message) -> None:
        """A message has come. A `ValueError` ends the connection."""

    def left(self, worker: Worker, why: str) -> None:
        """The connection has ended, or the process; called once."""


class Worker:
    """One connection to the server.

    Attributes:
        pid: The process's, as this one's process namespace knows it.
    """

    def __init__(self, connection: socket.socket, host: Host) -> None:
        """Take over a connection, in the running event loop.

        Raises:
            PermissionError: it is another user's.
            OSError: the process has ended already.
        """
        self.pid, uid, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if uid != os.getuid():
            raise PermissionError(f"process {self.pid} is user {uid}'s")
        self._host = host
        self._lines = Lines()
        self._unsent = b""
        self._open = True
        self._stopped_since: float | None = None
        self._pidfd = os.pidfd_open(self.pid)
        try:
            self._stat = os.open(f"/proc/{self.pid}/stat", os.O_RDONLY)
        except OSError:
            os.close(self._pidfd)
            raise
        connection.setblocking(False)
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._died)
        self._loop.add_reader(connection, self._read)

    def send(self, message: Message) -> None:
        """Queue a message; one that does not read for a MiB is dropped."""
        if not self._open:
            return
        waits = bool(self._unsent)
        self._unsent += to_line(message)
        if len(self._unsent) > MAX_LINE_BYTES:
            self._end("it does not read")
        elif not waits:
            self._write()

    def close(self) -> None:
        """Drop the connection, without a report. May be repeated."""
        if not self._open:
            return
        self._open = False
        for file in (self._pidfd, self._socket.fileno()):
            self._loop.remove_reader(file)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        os.close(self._pidfd)
        os.close(self._stat)

    def stopped_for(self, now: float) -> float:
        """Return for how long the process has been stopped by a signal, as far as was looked."""
        if not self._is_stopped():
            self._stopped_since = None
            return 0.0
        if self._stopped_since is None:
            self._stopped_since = now
        return now - self._stopped_since

    def _is_stopped(self) -> bool:
        try:
            line = os.pread(self._stat, 4096, 0)
        except OSError:
            return False  # it is dead: the pidfd says so
        return line[line.rfind(b")") + 2 :][:1] in (b"T", b"t")

    # ---- what the event loop calls ------------------------------------------------------

    def _write(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError as e:
            self._loop.call_soon(self._end, str(e))  # not inside of the sender's own work
            return
        self._unsent = self._unsent[sent:]
        if self._unsent:
            self._loop.add_writer(self._socket, self._write)
        else:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as e:
            self._end(str(e))
            return
        if not data:
            dead = readable(self._pidfd, timeout_s=0)
            self._end(f"process {self.pid} ended" if dead else "it closed its connection")
            return
        self._take(data)

    def _take(self, data: bytes) -> None:
        try:
            for message in self._lines.feed(data):
                if self._open:
                    self._host.said(self, message)
        except (ValueError, TypeError) as e:
            self._end(f"it talks nonsense: {e}")

    def _died(self) -> None:
        """Hear its last words first, for it may have said that it leaves in peace."""
        with contextlib.suppress(OSError):
            while self._open and (data := self._socket.recv(_READ_BYTES)):
                self._take(data)
        self._end(f"process {self.pid} ended")

    def _end(self, why: str) -> None:
        if self._open:
            self.close()
            self._host.left(self, why)


def listen(path: str) -> socket.socket:
    """Open a Unix socket for workers, to which only this user can connect.

    Raises:
        OSError: the path is taken, or longer than the 107 bytes that the system allows.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            listener.bind(path)
        except OSError as e:
            raise OSError(
                e.errno, f"no socket at {path!r} ({e}); set TMPDIR to a short path"
            ) from e
        os.chmod(path, 0o600)  # noqa: PTH101
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


Take = Callable[[socket.socket], None]


def accept_all(listener: socket.socket, take: Take) -> None:
    """Hand what has connected to ``take`` (in the event loop, whenever it is readable)."""
    while True:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as e:  # most likely too many open files: it would stay readable
            _log.warning("no worker can be taken for now: %s", e)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            loop.call_later(_PAUSE_S, _go_on, listener, take)
            return
        take(connection)


def _go_on(listener: socket.socket, take: Take) -> None:
    if listener.fileno() >= 0:
        asyncio.get_running_loop().add_reader(listener, accept_all, listener, take)
