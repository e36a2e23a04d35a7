"""The TCP connections of one gloo group, found among all of this process, to cut them.

Gloo can not be interrupted: its `abort` leaves a collective waiting for a peer that is silent. But
it fails at once when a connection breaks, and so we break our own. They are found exactly: gloo
publishes the address on which it listens (a ``sockaddr``, somewhere in what it writes to the
store); a connection of the group has either our listener as its own end, or a peer's as the other.
Kept are duplicates, so that the number of a descriptor that gloo has closed, and somebody else
opened, is never touched. The listener itself is left alone: gloo ends the process if it is shut.

Where several ranks of a group live in one process, their connections can not be told apart: whoever
aborts one of them aborts all.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

_FDS = Path("/proc/self/fd")
_DRAIN_BYTES = 1 << 20
_NOTICE_S = 0.02


def raw_address(family: int, address: tuple[object, ...]) -> bytes:
    """Return the bytes with which a ``sockaddr`` of this address begins; empty if it is no IP."""
    if family not in (socket.AF_INET, socket.AF_INET6):
        return b""
    start = struct.pack("=H", family) + struct.pack("!H", address[1])
    ip = socket.inet_pton(family, str(address[0]).partition("%")[0])
    return start + ip if family == socket.AF_INET else start + b"\0\0\0\0" + ip


def connections(own: bytes, peers: Collection[bytes]) -> list[socket.socket]:
    """Return a duplicate of each connection of a group.

    Args:
        own: What gloo published for this rank; it holds its listener's address.
        peers: What it published for the others.
    """
    found: dict[int, socket.socket] = {}
    for sock in _duplicates(own, peers):
        inode = os.fstat(sock.fileno()).st_ino
        if inode in found:  # a duplicate of ours, or of somebody who does the same
            sock.close()
        else:
            found[inode] = sock
    return list(found.values())


def cut(kept: Collection[socket.socket]) -> None:
    """Break connections, and forget them.

    What was sent still arrives. Gloo itself reads what has come already, up to the end, and closes
    its descriptors; nothing is written into a tensor after that. We do not read as long as gloo
    may: it would take the rest of a message for the beginning of one, and end the process.

    Reading ends first, and writing once gloo has seen that: a send that fails in gloo's own loop is
    lost, and who waits for it would wait for its time-out.
    """
    for sock in kept:
        with suppress(OSError):  # the peer was faster
            sock.shutdown(socket.SHUT_RD)
    is_ours_alone = _await_owner(kept)
    for sock in kept:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        if is_ours_alone:
            _drain(sock)  # a connection that is closed with bytes unread loses what was sent
        sock.close()


def _drain(sock: socket.socket) -> None:
    with suppress(OSError):
        while sock.recv(_DRAIN_BYTES, socket.MSG_DONTWAIT):
            pass


def _await_owner(kept: Collection[socket.socket]) -> bool:
    """Wait a moment for gloo to close its own descriptors of these connections; tell if it has."""
    names = {f"socket:[{os.fstat(sock.fileno()).st_ino}]" for sock in kept}
    until = time.monotonic() + _NOTICE_S
    while (num_open := _num_open(names)) > len(kept) and time.monotonic() < until:
        time.sleep(_NOTICE_S / 50)
    return num_open <= len(kept)


def _num_open(names: Collection[str]) -> int:
    count = 0
    for entry in list(_FDS.iterdir()):
        with suppress(OSError):  # closed meanwhile
            count += str(entry.readlink()) in names
    return count


def _duplicates(own: bytes, peers: Collection[bytes]) -> Iterator[socket.socket]:
    for entry in list(_FDS.iterdir()):
        with suppress(OSError):  # closed meanwhile
            # Only sockets: to close a duplicate of a file would drop the process's locks on it.
            is_socket = str(entry.readlink()).startswith("socket:")
            if not is_socket or not _ours(int(entry.name), own, peers):
                continue
            sock = socket.socket(fileno=os.dup(int(entry.name)))
            if _ours(sock.fileno(), own, peers):
                yield sock
            else:
                sock.close()


def _ours(fd: int, own: bytes, peers: Collection[bytes]) -> bool:
    sock = socket.socket(fileno=fd)
    try:
        there = raw_address(sock.family, sock.getpeername())
        here = raw_address(sock.family, sock.getsockname())
    except (OSError, ValueError, TypeError, IndexError):  # not connected, or no IP
        return False
    finally:
        sock.detach()
    return bool(here) and (here in own or any(there in peer for peer in peers))
