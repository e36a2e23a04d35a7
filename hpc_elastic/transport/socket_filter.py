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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from hpc_elastic.errors import ConfigError

VARIABLE = "HPC_ELASTIC_ALLOW_FROM"
"""Environment variable of agents and workers with the networks, separated by commas."""
KEY = "launcher.rendezvous.allow_from"
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_SO_ATTACH_FILTER = 26
_LD_WORD, _LD_BYTE, _AND, _SHIFT, _EQUAL, _JUMP, _RETURN = 0x20, 0x30, 0x54, 0x74, 0x15, 0x05, 0x06
_HEADER = 0xFFF00000  # offset of the network header (SKF_NET_OFF)
_PASS, _DROP = 0xFFFFFFFF, 0
_FARTHEST = 250  # instructions that a conditional jump skips at most are a few more
_WATCH_S = 0.5


def parse_networks(texts: Iterable[str]) -> list[Network]:
    """Return networks, given as ``10.1.0.0/16`` or addresses, as few as possible; or ValueError."""
    found = [ipaddress.ip_network(text.strip(), strict=False) for text in texts]
    version_4 = (n for n in found if isinstance(n, ipaddress.IPv4Network))
    version_6 = (n for n in found if isinstance(n, ipaddress.IPv6Network))
    return [*ipaddress.collapse_addresses(version_4), *ipaddress.collapse_addresses(version_6)]


def filter_program(networks: Sequence[Network]) -> list[tuple[int, int, int, int]]:
    """Return the instructions (code, jump if true, jump if false, operand) of a filter (pure)."""
    by_mask: dict[int, list[int]] = {}
    for network in (n for n in networks if n.version == 4):
        by_mask.setdefault(int(network.netmask), []).append(int(network.network_address))
    first = [i for mask, words in by_mask.items() for i in _rule_of_mask(mask, words)]
    second = [i for network in networks if network.version == 6 for i in _rule(network)]
    first, second = ([*rules, (_RETURN, 0, 0, _DROP)] for rules in (first, second))
    version_4 = [(_LD_BYTE, 0, 0, _HEADER), (_SHIFT, 0, 0, 4), (_EQUAL, 1, 0, 4)]
    return [*version_4, (_JUMP, 0, 0, len(first)), *first, *second]


def _rule_of_mask(mask: int, words: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield what passes a packet of version 4 whose source is in a network of this mask.

    One instruction a network: the memory of a filter may be limited to 20 KB.
    """
    yield from ((_LD_WORD, 0, 0, _HEADER + 12), (_AND, 0, 0, mask))
    for begin in range(0, len(words), _FARTHEST):
        block = words[begin : begin + _FARTHEST]
        for rest, word in zip(range(len(block) - 1, -1, -1), block, strict=True):
            yield _EQUAL, rest, 0 if rest else 1, word
        yield _RETURN, 0, 0, _PASS


def _rule(network: Network) -> list[tuple[int, int, int, int]]:
    """Return what passes a packet of version 6 whose source is in a network."""
    masks = struct.unpack(">4I", network.netmask.packed)
    words = struct.unpack(">4I", network.network_address.packed)
    tests = [
        (4 * i, mask, word) for i, (mask, word) in enumerate(zip(masks, words, strict=True)) if mask
    ]
    found = []
    for number, (at, mask, word) in enumerate(tests):
        rest = 3 * (len(tests) - number - 1) + 1
        found += [
            (_LD_WORD, 0, 0, _HEADER + 8 + at), (_AND, 0, 0, mask), (_EQUAL, 0, rest, word)
        ]  # fmt: skip
    return [*found, (_RETURN, 0, 0, _PASS)]


def check_own(address: str) -> None:
    """Raise ConfigError if the networks lack this node's address, or its kernel the filter."""
    given = os.environ.get(VARIABLE)
    if not given:
        return
    own = ipaddress.ip_address(address)
    if not any(own in network for network in parse_networks(given.split(","))):
        remedy = f"the network of this node, whose address is {address}, must be among them"
        raise ConfigError(KEY, given, remedy)
    with socket.socket() as tried:
        try:
            apply(tried)
        except OSError as e:
            remedy = f"the kernel of this node takes no filter of that size ({e.strerror}): give "
            remedy += "networks such as 10.1.0.0/16 in place of addresses"
            raise ConfigError(KEY, f"{given[:100]}...", remedy) from e


def apply(listening: socket.socket) -> None:
    """Let only the networks of `VARIABLE` reach a port; all if there is none.

    Raises ValueError if the variable names no networks, and OSError if the kernel refuses the
    filter.
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
                if name.startswith("socket:") and (name in known or _apply_to(int(link.name))):
                    present.add(name)
        known = present


def _apply_to(descriptor: int) -> bool:
    """Apply the filter to a socket that listens; return False if it may listen later."""
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return True
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            apply(sock)
            return True
        with suppress(OSError):
            return bool(sock.getpeername())
        return False
