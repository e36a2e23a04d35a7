"""The sandbox's network: the choice of addresses and ports, and the commands that build it."""

from __future__ import annotations

import ipaddress
import json
import socket
import zlib
from collections.abc import Iterable, Sequence

from .config import Layout, SandboxConfig
from .processes import SandboxError, run_command

Network = ipaddress.IPv4Network
_FIRST_OCTET = 64
_NUM_OCTETS = 128
_FIRST_PORT = 20000  # below the ephemeral ports; ten for each octet
_NUM_PORTS = 3  # slurmctld, slurmdbd, database


def choose_octet(name: str, taken: Iterable[Network]) -> int:
    """Return the octet X of the sandbox's ``10.X.0.0/24``; pure.

    The name decides the first candidate; the next one follows while a network is taken. A second
    pass ignores wide routes (a VPN's 10/8), which would rule out all candidates.

    Raises:
        SandboxError: All are taken.
    """
    networks = list(taken)
    start = zlib.crc32(name.encode())
    candidates = [_FIRST_OCTET + (start + step) % _NUM_OCTETS for step in range(_NUM_OCTETS)]
    for min_prefix in (0, 24):
        rivals = [network for network in networks if network.prefixlen >= min_prefix]
        for octet in candidates:
            if not any(network.overlaps(Network(f"10.{octet}.0.0/24")) for network in rivals):
                return octet
    raise SandboxError("no free 10.x.0.0/24 network is left on this machine")


def networks_in_use() -> list[Network]:
    """Return the networks of all addresses and routes of the machine but the default route."""
    addresses = json.loads(run_command(["ip", "-j", "-4", "addr", "show"]).stdout or "[]")
    routes = json.loads(
        run_command(["ip", "-j", "-4", "route", "show", "table", "all"]).stdout or "[]"
    )
    texts = [f"{info['local']}/{info['prefixlen']}" for a in addresses for info in a["addr_info"]]
    texts += [route["dst"] for route in routes if route["dst"] != "default"]
    return [Network(text, strict=False) for text in texts]


def choose_port(octet: int) -> int:
    """Return the first of three consecutive free TCP ports.

    Raises:
        SandboxError: None of the ports tried is free.
    """
    first = _FIRST_PORT + 10 * (octet - _FIRST_OCTET)
    for port in range(first, first + 10 * _NUM_OCTETS):
        if all(_is_free(port + offset) for offset in range(_NUM_PORTS)):
            return port
    raise SandboxError(f"no free TCP ports at or after {first}")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def build_commands(config: SandboxConfig, layout: Layout) -> list[list[str]]:
    """Return the commands that build the network; pure."""
    switch, leg = layout.switch, layout.host_leg
    commands = [
        f"ip netns add {switch}",
        f"ip -n {switch} link set lo up",
        f"ip -n {switch} link add br0 type bridge stp_state 0 forward_delay 0",
        f"ip -n {switch} link set br0 up",
        f"ip link add {leg} type veth peer name host netns {switch}",
        f"ip -n {switch} link set host master br0 up",
        f"ip addr add {layout.controller_address}/24 dev {leg}",
        f"ip link set {leg} up",
    ]
    for node in config.node_names:
        commands += _node_commands(node, layout)
    return [command.split() for command in commands]


def _node_commands(node: str, layout: Layout) -> list[str]:
    switch, namespace = layout.switch, layout.namespace(node)
    return [
        f"ip netns add {namespace}",
        f"ip -n {namespace} link set lo up",
        f"ip -n {switch} link add {node} type veth peer name eth0 netns {namespace}",
        f"ip -n {switch} link set {node} master br0 up",
        f"ip -n {namespace} addr add {layout.address(node)}/24 dev eth0",
        f"ip -n {namespace} link set eth0 up",
    ]


def build_network(config: SandboxConfig, layout: Layout) -> None:
    """Build the sandbox's namespaces, switch and links."""
    for command in build_commands(config, layout):
        run_command(command)


def remove_network(layout: Layout) -> None:
    """Remove the namespaces and links of the sandbox that exist."""
    run_command(["ip", "link", "del", layout.host_leg], check=False)
    for namespace in namespaces(layout):
        run_command(["ip", "netns", "del", namespace])


def namespaces(layout: Layout) -> list[str]:
    """Return the sandbox's network namespaces that exist."""
    names = [
        line.split()[0] for line in run_command(["ip", "netns", "list"]).stdout.splitlines() if line
    ]
    return [name for name in names if name.startswith(layout.namespace_prefix)]


def set_link(layout: Layout, node: str, *, up: bool) -> None:
    """Connect or disconnect a node at the switch."""
    state = "up" if up else "down"
    run_command(["ip", "-n", layout.switch, "link", "set", node, state])


def impair(layout: Layout, node: str, *, cut: Iterable[str] = (), loss: float = 0.0) -> None:
    """Drop packets that a node sends; this replaces what was dropped before.

    Args:
        layout: The sandbox's places.
        node: The node.
        cut: Nodes that none of its packets reach.
        loss: Share of all packets that are lost, at random.
    """
    inside = ["ip", "netns", "exec", layout.namespace(node), "tc"]
    run_command([*inside, "qdisc", "del", "dev", "eth0", "clsact"], check=False)
    program = drop_program([layout.address(other) for other in cut], loss)
    if len(program) > 1:
        text = f"{len(program)}," + ",".join(" ".join(map(str, line)) for line in program)
        run_command([*inside, "qdisc", "add", "dev", "eth0", "clsact"])
        command = ["filter", "add", "dev", "eth0", "egress", "bpf", "da", "bytecode", text]
        run_command([*inside, *command])


_LD_WORD, _LD_HALF, _EQUAL, _ABOVE, _RETURN = 0x20, 0x28, 0x15, 0x35, 0x06
_PROTOCOL, _RANDOM, _DESTINATION = 0xFFFFF000, 0xFFFFF038, 0xFFF00010
"""SKF_AD_OFF of the protocol and of a random number; the destination in the header of IPv4."""
_IPV4, _PASS, _DROP = 0x0800, 0xFFFFFFFF, 2


def drop_program(cut: Sequence[str], loss: float) -> list[tuple[int, int, int, int]]:
    """Return a filter in classic BPF that drops packets to addresses, and a share of all; pure.

    It needs no kernel module, unlike netem and the packet filters.
    """
    lost = [
        (_LD_WORD, 0, 0, _RANDOM),
        (_ABOVE, 1, 0, int(loss * 0xFFFFFFFF)),
        (_RETURN, 0, 0, _DROP),
    ]
    towards = [(_LD_WORD, 0, 0, _DESTINATION)] if cut else []
    for address in cut:
        towards += [(_EQUAL, 0, 1, int(ipaddress.IPv4Address(address))), (_RETURN, 0, 0, _DROP)]
    is_ipv4 = [(_LD_HALF, 0, 0, _PROTOCOL), (_EQUAL, 0, len(towards), _IPV4)] if cut else []
    return [*(lost if loss else []), *is_ipv4, *towards, (_RETURN, 0, 0, _PASS)]


def link_state(layout: Layout, node: str) -> str:
    """Return ``up`` or ``down`` for a node's link, ``unknown`` without root."""
    shown = run_command(["ip", "-j", "-n", layout.switch, "link", "show", node], check=False).stdout
    if not shown:
        return "unknown"
    return "up" if "UP" in json.loads(shown)[0]["flags"] else "down"
