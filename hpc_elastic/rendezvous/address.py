"""The address at which the other nodes reach this one.

Host names are not trusted to resolve elsewhere, nor a name service to answer quickly: agents
exchange numeric addresses only.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from hpc_elastic.errors import ConfigError


@dataclass(frozen=True)
class Interface:
    """A network interface and one numeric address of it."""

    name: str
    address: str


LOOPBACK = Interface("lo", "127.0.0.1")
_VIRTUAL = ("docker", "virbr", "veth", "br-", "cni", "flannel", "tun", "tap")


def interfaces() -> list[Interface]:
    """Return every address of this node on an interface that is up, IPv4 first."""
    stats = psutil.net_if_stats()
    found = [
        Interface(name, a.address.split("%")[0])
        for name, addresses in psutil.net_if_addrs().items()
        if name in stats and stats[name].isup
        for a in addresses
        if a.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return sorted(found, key=lambda i: ":" in i.address)


def choose(
    node_name: str, wanted: str | None, available: Sequence[Interface], hosts: Mapping[str, str]
) -> Interface:
    """Choose the interface that the other nodes reach this one by.

    Args:
        node_name: What Slurm calls this node.
        wanted: ``launcher.rendezvous.interface``; None to find one.
        available: This node's interfaces.
        hosts: Node name -> numeric address, as far as this node can resolve it.

    Raises:
        ConfigError: the wanted interface is not there, or none can be reached from outside.
    """
    if wanted is not None:
        return _by_name(wanted, available)
    usable = [i for i in available if _reachable(i.address)]
    named = [i for i in usable if i.address == hosts.get(node_name)]
    physical = [i for i in usable if not i.name.startswith(_VIRTUAL)]
    for candidate in (*named, *physical, *usable):
        return candidate
    raise ConfigError(
        "launcher.rendezvous.interface", wanted, f"{node_name} has no address but loopback"
    )


def resolve(node_name: str) -> dict[str, str]:
    """Return the node's own address by name, or nothing where the name does not resolve."""
    try:
        return {node_name: socket.gethostbyname(node_name)}
    except OSError:
        return {}


def _by_name(wanted: str, available: Sequence[Interface]) -> Interface:
    for interface in available:
        if interface.name == wanted:
            return interface
    names = ", ".join(sorted({i.name for i in available}))
    raise ConfigError("launcher.rendezvous.interface", wanted, f"no such interface; up are {names}")


def _reachable(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return not (ip.is_loopback or ip.is_link_local)
