"""The addresses at which the other nodes reach this one.

Host names are not trusted to resolve elsewhere, nor a name service to answer quickly: agents
exchange numeric addresses only. Slurm's NodeAddr names the network that the nodes share, since
Slurm's own daemons use it; it counts once it has led to one of this node's own addresses. Debian,
for example, writes the host's own name into the hosts file as 127.0.1.1.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from hpc_elastic.errors import ConfigError, SlurmError

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Interface:
    """A network interface and one numeric address of it."""

    name: str
    address: str


LOOPBACK = Interface("lo", "127.0.0.1")
_VIRTUAL = ("docker", "podman", "virbr", "veth", "br-", "cni", "cali", "flannel", "tun", "tap")
_ADAPTERS = Path("/sys/class/infiniband")
_NCCL_CONF = Path("/etc/nccl.conf")
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_RESOLVER_TIMEOUT_S = 2.0
_SLURM_TIMEOUT_S = 5.0
_LINK_TIMEOUT_S = 5.0
_LINK_POLL_S = 0.05


def find(node_name: str, wanted: str | None, node_address: Callable[[], str | None]) -> Interface:
    """Find the interface by which the other nodes reach this one (every node, once, at its start).

    Where the link of a suitable interface is still coming up, it is waited for, 5 s at most. Linux
    reports a link up to a second late (linkwatch), as in a container whose network has just been
    made; a card may negotiate for longer.

    ``node_address`` asks Slurm for NodeAddr, a host name or an address. It is called only where the
    node has several addresses to choose from, and ignored where it fails or hangs. Raises what
    `choose` does.
    """

    def is_suitable(found: Iterable[Interface]) -> bool:
        return any(_is_reachable(i.address) and wanted in (None, i.name) for i in found)

    def known_addresses() -> Iterator[str]:
        configured = _within(_SLURM_TIMEOUT_S, node_address)
        if configured is not None:
            yield from resolve(configured)
        if configured != node_name:
            yield from resolve(node_name)

    until = time.monotonic() + _LINK_TIMEOUT_S
    while True:
        up, without_link = _interfaces_by_link()
        if is_suitable(up) or not is_suitable(without_link) or time.monotonic() >= until:
            return choose(node_name, wanted, up, known_addresses())
        time.sleep(_LINK_POLL_S)


def choose(
    node_name: str, wanted: str | None, available: Sequence[Interface], known: Iterable[str]
) -> Interface:
    """Choose the interface by which the other nodes reach this one (pure).

    ``wanted`` is ``launcher.interface``, or None. ``known`` are the numeric addresses by which the
    site knows this node, best first. They are taken one by one, and only while the choice is open,
    since a lookup may be slow. Raises ConfigError if the wanted interface is missing, or none can
    be reached from outside.
    """
    usable = sorted(
        (i for i in available if _is_reachable(i.address)),
        key=lambda i: (i.name.startswith(_VIRTUAL), _is_v6(i.address)),
    )
    if wanted is not None:
        found = next((i for i in usable if i.name == wanted), None)
        if found is not None:
            return found
        names = ", ".join(sorted({i.name for i in usable})) or "none"
        why = "no such interface is up"
        if any(i.name == wanted for i in available):
            why = "its addresses, loopback or link-local, cannot be reached from other nodes"
        raise ConfigError("launcher.interface", wanted, f"{why}; those that can are {names}")
    if not usable:
        remedy = f"{node_name} has no address that other nodes could reach, only loopback or none"
        raise ConfigError("launcher.interface", wanted, remedy)
    first = usable[0]
    same_family = [i for i in usable if _is_v6(i.address) == _is_v6(first.address)]
    if len(same_family) == 1 and all(i.name == first.name for i in usable):
        return first  # one interface with one address of a family
    by_address = {ipaddress.ip_address(i.address): i for i in usable}
    own = (by_address.get(ipaddress.ip_address(_without_scope(address))) for address in known)
    return next((interface for interface in own if interface is not None), first)


def interfaces() -> list[Interface]:
    """Return every address of this node on an interface that is up, IPv4 first."""
    return _interfaces_by_link()[0]


def _interfaces_by_link() -> tuple[list[Interface], list[Interface]]:
    """Return the addresses on interfaces that are up, and those on ones without a link so far."""
    stats = psutil.net_if_stats()
    up, without_link = [], []
    for name, addresses in psutil.net_if_addrs().items():
        own = [
            Interface(name, _without_scope(a.address)) for a in addresses if a.family in _FAMILIES
        ]
        if name in stats and stats[name].isup:
            up += own
        elif name in stats and "up" in stats[name].flags.split(","):
            without_link += own
    return sorted(up, key=lambda i: _is_v6(i.address)), without_link


def resolve(host: str) -> list[str]:
    """Return the numeric addresses of a host name, IPv4 first; an address stands for itself.

    None at all where the name does not resolve, or not soon: a name service that is down stalls a
    lookup for many seconds.
    """
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return [_without_scope(host)]
    answers = _within(
        _RESOLVER_TIMEOUT_S, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    )
    found = [_without_scope(str(sockaddr[0])) for *_, sockaddr in answers or ()]
    return sorted(dict.fromkeys(found), key=_is_v6)


def group_variables(name: str, *, is_given: bool) -> dict[str, str]:
    """Return the variables by which gloo and NCCL use an interface, unless the environment has any.

    NCCL is left its own choice where the site has made one in an nccl.conf, and where there are
    InfiniBand or RoCE adapters; not so for an interface that the user has given.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    """
    found = {"GLOO_SOCKET_IFNAME": name}
    if is_given or not (any(_ADAPTERS.glob("*")) or _site_names_interface()):
        found["NCCL_SOCKET_IFNAME"] = f"={name}"  # without "=" a prefix
    return {variable: value for variable, value in found.items() if variable not in os.environ}


def _site_names_interface() -> bool:
    own = os.environ.get("NCCL_CONF_FILE", "~/.nccl.conf")
    for file in (_NCCL_CONF, Path(own).expanduser()):
        with suppress(OSError, UnicodeError):
            if re.search(r"^\s*NCCL_SOCKET_IFNAME\s*=", file.read_text(), re.MULTILINE):
                return True
    return False


def group_addresses() -> Iterator[list[str]]:
    """Yield the addresses that gloo, and then NCCL, use by the variable with their interface."""
    available = psutil.net_if_addrs()
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        name = os.environ.get(variable, "").lstrip("=").partition(",")[0]
        known = [a for a in available.get(name, ()) if a.family in _FAMILIES]
        yield [_without_scope(a.address) for a in sorted(known, key=lambda a: a.family)]


def own_addresses() -> Iterator[str]:
    """Yield addresses for other nodes: `group_addresses`, then the one that reaches MASTER_ADDR."""
    for addresses in group_addresses():
        yield from addresses
    with suppress(OSError):
        yield address_towards(os.environ.get("MASTER_ADDR", "localhost"))
    yield "127.0.0.1"


def address_towards(host: str) -> str:
    """Return the address of this node from which it reaches a host; raise OSError if it cannot."""
    family, _, _, _, peer = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(peer)  # sends nothing
        return _without_scope(str(sock.getsockname()[0]))


def own_address(store_host: str) -> str:
    """Return this node's address for its peers, which reach a store as well."""
    address = address_towards(store_host)
    if address.startswith("127.") and store_host not in ("localhost", address):
        # a hosts file may name this host 127.0.1.1
        for known in (a for interface in psutil.net_if_addrs().values() for a in interface):
            if known.family == socket.AF_INET and not known.address.startswith("127."):
                return known.address
    return address


def _within(timeout_s: float, ask: Callable[[], _T]) -> _T | None:
    """Return an answer; None if it does not come in time: a daemon thread keeps what hangs."""
    answers: list[_T] = []

    def run() -> None:
        try:
            answers.append(ask())
        except (OSError, UnicodeError, SlurmError) as e:  # UnicodeError: no name for the resolver
            _log.debug("an address is not known: %s", e)

    thread = threading.Thread(target=run, name="hpc-elastic-address", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else None


def _is_reachable(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return not (ip.is_loopback or ip.is_link_local or ip.is_unspecified)


def _is_v6(address: str) -> bool:
    return ":" in address


def _without_scope(address: str) -> str:
    """Cut ``%eth0``: only link-local addresses need it, and other nodes call theirs otherwise."""
    return address.partition("%")[0]
