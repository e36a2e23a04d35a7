"""The addresses by which other nodes may reach this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import psutil

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def own_addresses() -> Iterator[str]:
    """Give addresses by which other nodes may reach this one, the best first.

    That of the interface which the process groups are told to use; then that from which MASTER_ADDR
    is reached.
    """
    interfaces = psutil.net_if_addrs()
    for variable in _INTERFACES:
        name = os.environ.get(variable, "").lstrip("=").partition(",")[0]
        for family in (socket.AF_INET, socket.AF_INET6):
            for known in interfaces.get(name, ()):
                if known.family == family:
                    yield known.address.partition("%")[0]
    with suppress(OSError):
        yield address_towards(os.environ.get("MASTER_ADDR", "localhost"))
    yield "127.0.0.1"


def address_towards(host: str) -> str:
    """Return the address of this node from which it reaches a host.

    Raises:
        OSError: there is no way to it, or its name is not known.
    """
    family, _, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(there)  # sends nothing
        return str(sock.getsockname()[0]).partition("%")[0]
