"""The address at which the other nodes reach this one.

Host names are not trusted to resolve elsewhere, nor a name service to answer quickly: agents
exchange numeric addresses only. Slurm's NodeAddr is trusted to name the network that the nodes
share, for its own daemons use it; it counts once it has led to one of this node's own addresses.
Debian, say, writes the host's own name into the hosts file as 127.0.1.1.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
_RESOLVER_TIMEOUT_S = 2.0
_SLURM_TIMEOUT_S = 5.0
_LINK_TIMEOUT_S = 5.0
_LINK_POLL_S = 0.05


def find(node_name: str, wanted: str | None, node_address: Callable[[], str | None]) -> Interface:
    """Find the interface that the other nodes reach this one by (every node, once, at its start).

    Where a link that would do is still coming up, it is waited for, 5 s at most.

    Args:
        node_name: What Slurm calls this node.
        wanted: ``launcher.interface``; None to find one.
        node_address: Asks Slurm for NodeAddr, a host name or an address. It is called only where
            the node has several addresses to choose from, and ignored where it fails or hangs.

    Raises:
        ConfigError: as for `choose`.
    """
    return choose(node_name, wanted, _settled(wanted), _told(node_name, node_address))


def choose(
    node_name: str, wanted: str | None, available: Sequence[Interface], known: Iterable[str]
) -> Interface:
    """Choose the interface that the other nodes reach this one by. Pure.

    Args:
        node_name: What Slurm calls this node.
        wanted: ``launcher.interface``; None to find one.
        available: This node's interfaces.
        known: The numeric addresses by which the site knows this node, best first. Taken one by
            one, and only while the choice is open: to look one up may be slow.

    Raises:
        ConfigError: the wanted interface is not there, or none can be reached from outside.
    """
    usable = sorted((i for i in available if _reachable(i.address)), key=_preference)
    if wanted is not None:
        return _by_name(wanted, usable, available)
    if not usable:
        remedy = f"{node_name} has no address that other nodes could reach, only loopback or none"
        raise ConfigError("launcher.interface", wanted, remedy)
    if _is_plain(usable):
        return usable[0]
    by_address = {ipaddress.ip_address(i.address): i for i in usable}
    own = (by_address.get(ipaddress.ip_address(_without_scope(address))) for address in known)
    return next((interface for interface in own if interface is not None), usable[0])


def interfaces() -> list[Interface]:
    """Return every address of this node on an interface that is up, IPv4 first."""
    return _look()[0]


def _settled(wanted: str | None) -> list[Interface]:
    """Return the interfaces that are up, once one of them will do or none is to come up.

    Linux tells of a link up to a second late (linkwatch), as in a container whose network has just
    been made; a card may negotiate for longer.
    """
    until = time.monotonic() + _LINK_TIMEOUT_S
    while True:
        up, coming = _look()
        if _will_do(up, wanted) or not _will_do(coming, wanted) or time.monotonic() >= until:
            return up
        time.sleep(_LINK_POLL_S)


def _will_do(found: Iterable[Interface], wanted: str | None) -> bool:
    return any(_reachable(i.address) and wanted in (None, i.name) for i in found)


def _look() -> tuple[list[Interface], list[Interface]]:
    """Return the addresses on interfaces that are up, and those on ones without a link so far."""
    stats = psutil.net_if_stats()
    up, coming = [], []
    for name, addresses in psutil.net_if_addrs().items():
        ours = [
            Interface(name, _without_scope(a.address))
            for a in addresses
            if a.family in (socket.AF_INET, socket.AF_INET6)
        ]
        if name in stats and stats[name].isup:
            up += ours
        elif name in stats and "up" in stats[name].flags.split(","):
            coming += ours
    return sorted(up, key=lambda i: _is_v6(i.address)), coming


def resolve(host: str) -> list[str]:
    """Return the numeric addresses of a host name, IPv4 first; an address stands for itself.

    Returns:
        Nothing where the name does not resolve, or the name service does not answer soon: one
        that is down lets a lookup stall for many seconds.
    """
    if _is_address(host):
        return [_without_scope(host)]
    found = _within(_RESOLVER_TIMEOUT_S, lambda: _look_up(host)) or []
    return sorted(dict.fromkeys(found), key=_is_v6)


def _told(node_name: str, node_address: Callable[[], str | None]) -> Iterator[str]:
    """Yield the addresses that Slurm has of this node, then those of its name, as looked up."""
    configured = _within(_SLURM_TIMEOUT_S, node_address)
    if configured is not None:
        yield from resolve(configured)
    if configured != node_name:
        yield from resolve(node_name)


def _look_up(host: str) -> list[str]:
    answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [_without_scope(str(sockaddr[0])) for *_, sockaddr in answers]


def _within(timeout_s: float, ask: Callable[[], _T]) -> _T | None:
    """Return an answer, None if there is none in time: what hangs is left to a daemon thread."""
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


def _by_name(wanted: str, usable: Sequence[Interface], available: Sequence[Interface]) -> Interface:
    for interface in usable:
        if interface.name == wanted:
            return interface
    names = ", ".join(sorted({i.name for i in usable})) or "none"
    why = "no such interface is up"
    if any(i.name == wanted for i in available):
        why = "its addresses, loopback or link-local, can not be reached from other nodes"
    raise ConfigError("launcher.interface", wanted, f"{why}; those that can are {names}")


def _is_plain(usable: Sequence[Interface]) -> bool:
    """Tell whether the first one can not be wrong: one interface, one address of a family."""
    first = usable[0]
    same_family = [i for i in usable if _is_v6(i.address) == _is_v6(first.address)]
    return len(same_family) == 1 and all(i.name == first.name for i in usable)


def _preference(interface: Interface) -> tuple[bool, bool]:
    return interface.name.startswith(_VIRTUAL), _is_v6(interface.address)


def _reachable(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return not (ip.is_loopback or ip.is_link_local or ip.is_unspecified)


def _is_v6(address: str) -> bool:
    return ":" in address


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _without_scope(address: str) -> str:
    """Cut ``%eth0``: only link-local addresses need it, and other nodes call theirs otherwise."""
    return address.partition("%")[0]
