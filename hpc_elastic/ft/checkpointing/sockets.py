"""Blocking sockets that move many bytes: with time-outs, without the interpreter in the way."""

from __future__ import annotations

import socket
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from hpc_elastic.ft.checkpointing.messages import END, MAX_HEAD_BYTES, StrangerError

R = TypeVar("R")

_BUFFER_BYTES = 1 << 20
_MAX_VIEWS = 512
"""In one call; the system takes 1024."""


Part = tuple[int, int, Callable[[int, int], memoryview]]
"""Place in a stream of bytes, length, and how to get a range of it."""


class Pieces:
    """Buffers as one stream of bytes."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """Join parts that follow each other."""
        self._parts = parts
        self._begins = [begin for begin, _, _ in parts]

    def cut(self, begin: int, end: int) -> Iterator[memoryview]:
        """Give the buffers of a range, in order."""
        at = bisect_right(self._begins, begin) - 1
        while begin < end:
            start, length, of = self._parts[at]
            stop = min(end, start + length)
            yield of(begin - start, stop - start)
            begin, at = stop, at + 1


def prepare(sock: socket.socket, timeout_s: float) -> None:
    """Make a connection block, in the kernel, for so long at most without any progress."""
    sock.settimeout(None)
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6) or 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def close(sock: socket.socket) -> None:
    """End a connection for both sides, even if a forked process has it too; any thread."""
    cut(sock)
    sock.close()


def cut(sock: socket.socket) -> None:
    """End a connection, and wake the thread that waits in it; that one closes it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def is_gone(sock: socket.socket) -> bool:
    """Tell whether the other side, which is waiting for us, has ended the connection."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def receive_head(sock: socket.socket) -> bytes:
    """Return all up to an empty line, at which the other side waits or a body begins.

    Raises:
        ConnectionError: the connection has ended.
        TimeoutError: nothing came.
        StrangerError: it is too long.
    """
    head = b""
    while not head.endswith(END):
        seen = _patiently(lambda: sock.recv(MAX_HEAD_BYTES, socket.MSG_PEEK))
        if not seen or len(head) + len(seen) > MAX_HEAD_BYTES:
            raise ConnectionResetError("ended") if not seen else StrangerError("a head too long")
        at = (head[-3:] + seen).find(END)
        take = len(seen) if at < 0 else at + len(END) - len(head[-3:])
        head += sock.recv(take)
    return head


def receive(sock: socket.socket, num_bytes: int) -> bytes:
    """Return exactly so many bytes; raises as `receive_into`."""
    raw = bytearray(num_bytes)
    receive_into(sock, [memoryview(raw)])
    return bytes(raw)


def receive_into(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Fill buffers.

    Raises:
        ConnectionError: the connection has ended.
        TimeoutError: nothing came for the connection's time.
    """
    left = [view for view in views if len(view)]
    while left:
        some = left[:_MAX_VIEWS]
        count = _patiently(lambda: sock.recvmsg_into(some, 0, socket.MSG_WAITALL)[0])  # noqa: B023
        if not count:
            raise ConnectionResetError("the connection has ended")
        left = _after(left, count)


def send(sock: socket.socket, views: Sequence[memoryview | bytes]) -> None:
    """Send buffers; raises as `receive_into`."""
    left = [memoryview(view) for view in views if len(view)]
    while left:
        some = left[:_MAX_VIEWS]
        left = _after(left, _patiently(lambda: sock.sendmsg(some)))  # noqa: B023


def _patiently(call: Callable[[], R]) -> R:
    try:
        return call()
    except BlockingIOError as e:  # SO_RCVTIMEO, SO_SNDTIMEO
        raise TimeoutError("no progress") from e


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of buffers after so many bytes."""
    done = 0
    while done < len(views) and count >= len(views[done]):
        count -= len(views[done])
        done += 1
    left = views[done:]
    if count:
        left[0] = left[0][count:]
    return left
