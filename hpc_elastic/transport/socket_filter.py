"""Which addresses may reach a port: a filter in the kernel, which needs no privileges.

A site or a user names the networks of the nodes (``launcher.rendezvous.allow_from``). Packets from
elsewhere do not reach the port then: no connection comes up, so nothing has to be accepted, read or
closed. This is the one protection for the ports that torch opens (gloo's, TCPStore's), which do not
authenticate anybody. This node itself may always connect.

The filter is a program of classic BPF on the listening socket (socket(7), SO_ATTACH_FILTER; the
kernel's Documentation/networking/filter.rst). Accepted connections inherit it.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from hpc_elastic.errors import ConfigError

VARIABLE = "HPC_ELASTIC_ALLOW_FROM"
"""Environment variable of agents and workers with the networks, separated by commas."""
KEY = "launcher.rendezvous.allow_from"
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_SO_ATTACH_FILTER = 26
_LD_WORD, _LD_BYTE, _AND, _SHIFT, _EQUAL, _JUMP, _RETURN = 0x20, 0x30, 0x54, 0x74, 0x15, 0x05, 0x06
_HEADER = 0xFFF00000
"""Offset of the network header (SKF_NET_OFF)."""
_PASS, _DROP = 0xFFFFFFFF, 0
_WATCH_S = 0.5


def parse_networks(texts: Iterable[str]) -> list[Network]:
    """Return networks, given as ``10.1.0.0/16`` or an address; raises a ValueError."""
    return [ipaddress.ip_network(text.strip(), strict=False) for text in texts]


def filter_program(networks: Sequence[Network]) -> list[tuple[int, int, int, int]]:
    """Return the instructions (code, jump if true, jump if false, operand) of a filter (pure)."""
    rules = {
        version: [_rule(network) for network in networks if network.version == version]
        for version in (4, 6)
    }
    first = [i for rule in rules[4] for i in rule] + [(_RETURN, 0, 0, _DROP)]
    second = [i for rule in rules[6] for i in rule] + [(_RETURN, 0, 0, _DROP)]
    version_4 = [(_LD_BYTE, 0, 0, _HEADER), (_SHIFT, 0, 0, 4), (_EQUAL, 1, 0, 4)]
    return [*version_4, (_JUMP, 0, 0, len(first)), *first, *second]


def _rule(network: Network) -> list[tuple[int, int, int, int]]:
    """Return what passes a packet whose source is in a network, and else goes on after it."""
    size = network.max_prefixlen // 8
    masks = struct.unpack(f">{size // 4}I", network.netmask.packed)
    words = struct.unpack(f">{size // 4}I", network.network_address.packed)
    offset = 12 if network.version == 4 else 8
    tests = [
        (4 * i, mask, word) for i, (mask, word) in enumerate(zip(masks, words, strict=True)) if mask
    ]
    found = []
    for number, (at, mask, word) in enumerate(tests):
        rest = 3 * (len(tests) - number - 1) + 1
        found += [
            (_LD_WORD, 0, 0, _HEADER + offset + at), (_AND, 0, 0, mask), (_EQUAL, 0, rest, word)
        ]  # fmt: skip
    return [*found, (_RETURN, 0, 0, _PASS)]


def check_own(address: str) -> None:
    """Raise ConfigError if a node's own address is in none of the networks: others use it, too."""
    given = os.environ.get(VARIABLE)
    if given and not any(
        ipaddress.ip_address(address) in network for network in parse_networks(given.split(","))
    ):
        remedy = f"the network of this node, whose address is {address}, must be among them"
        raise ConfigError(KEY, given, remedy)


def apply(listening: socket.socket) -> None:
    """Let only the networks of `VARIABLE` reach a port; all if there is none.

    Raises:
        ValueError: The variable names no networks.
        OSError: The kernel refuses the filter.
    """
    given = os.environ.get(VARIABLE)
    if not given:
        return
    own = ["127.0.0.0/8", "::1/128"]
    with suppress(ValueError):  # a Unix socket has no address
        own.append(str(ipaddress.ip_address(listening.getsockname()[0].partition("%")[0])))
    program = filter_program(parse_networks([*given.split(","), *own]))
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("HP", len(program), ctypes.addressof(buffer))
    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)


def watch_ports() -> None:
    """Apply the filter to every port that this process opens, from now on (a worker's start).

    gloo opens its ports in the middle of a script, and hands no socket out. They are open to
    everybody for half a second at most.
    """
    if os.environ.get(VARIABLE):
        threading.Thread(target=_watch, name="hpc-elastic-ports", daemon=True).start()


def _watch() -> None:
    known: set[str] = set()
    pause = threading.Event()
    while not pause.wait(_WATCH_S):
        present = set()
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError, ValueError):
                name = str(link.readlink())
                if name.startswith("socket:"):
                    present.add(name)
                    if name not in known:
                        _apply_to(int(link.name))
        known = present


def _apply_to(descriptor: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        is_inet = sock.family in (socket.AF_INET, socket.AF_INET6)
        if is_inet and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            apply(sock)
