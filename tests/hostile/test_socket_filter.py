"""A port that only the nodes' networks reach, in a network namespace with several addresses."""

import ipaddress
import os
import random
import socket
import subprocess
import sys

import pytest

from hpc_elastic.errors import ConfigError
from hpc_elastic.transport import socket_filter
from hpc_elastic.transport.socket_filter import filter_program, parse_networks

TRY = """
import os, socket, sys
os.environ["HPC_ELASTIC_ALLOW_FROM"] = "10.77.0.0/16,fd77::/16"
from hpc_elastic.transport import socket_filter
listening = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
socket_filter.apply(listening)
for text in sys.argv[1:]:
    to, source = text.split("<")
    guest = socket.socket(socket.AF_INET6 if ":" in to else socket.AF_INET)
    guest.settimeout(0.5)
    guest.bind((source, 0))
    try:
        guest.connect((to, listening.getsockname()[1]))
        print(source)
    except TimeoutError:
        print("-")
"""
WAYS = {
    "10.77.0.1<10.77.0.9": True, "10.77.0.1<10.78.0.1": False, "127.0.0.1<127.0.0.1": True,
    "fd77::1<fd77::9": True, "fd77::1<fd78::1": False, "::1<::1": True,
}  # fmt: skip
"""The address that is called, that of the caller, and whether he may."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network namespace")
def test_packets_from_other_networks_do_not_arrive():
    """IPv4 and IPv6 on one port; the node itself always may."""
    addresses = sorted({end for way in WAYS for end in way.split("<")} - {"127.0.0.1", "::1"})
    lines = ["ip link set lo up"]
    lines += [f"ip addr add {a} dev lo {'nodad' if ':' in a else ''}" for a in addresses]
    script = "; ".join([*lines, 'exec "$@"'])
    done = subprocess.run(
        ["unshare", "-n", "bash", "-ec", script, "-", sys.executable, "-c", TRY, *WAYS],
        text=True, capture_output=True, timeout=60,
    )  # fmt: skip
    expected = [way.split("<")[1] if may else "-" for way, may in WAYS.items()]
    assert done.stdout.split() == expected, done.stderr


def verdict(program, source: str) -> bool:
    """Whether a filter passes a packet from an address: the kernel's machine, in short."""
    address = ipaddress.ip_address(source)
    header = bytes([address.version << 4]) + bytes(11 if address.version == 4 else 7)
    packet, at, value = header + address.packed, 0, 0
    while True:
        code, jump_true, jump_false, operand = program[at]
        at += 1
        match code:
            case 0x20:
                value = int.from_bytes(packet[operand - 0xFFF00000 :][:4], "big")
            case 0x30:
                value = packet[operand - 0xFFF00000]
            case 0x54:
                value &= operand
            case 0x74:
                value >>= operand
            case 0x15:
                at += jump_true if value == operand else jump_false
            case 0x05:
                at += operand
            case 0x06:
                return operand != 0


def test_a_program_passes_the_networks_and_no_other_address():
    """Of random lists, for addresses at the edges of each network."""
    rng = random.Random(5)
    for size in (1, 400):
        # with neighbours on both sides
        drawn = [(rng.randint(1 << 28, 1 << 31), rng.choice((12, 32, 32, 32))) for _ in range(size)]
        drawn += [(rng.randint(1 << 124, 1 << 127), rng.randint(8, 128)) for _ in range(3)]
        texts = [f"{ipaddress.ip_address(number)}/{bits}" for number, bits in drawn]
        networks = [ipaddress.ip_network(text, strict=False) for text in texts]
        program = filter_program(parse_networks(texts))
        assert all(max(jt, jf) < 256 for _, jt, jf, _ in program)
        for network in networks:
            for edge in (network[0], network[-1], network[0] - 1, network[-1] + 1):
                may = any(edge in n for n in networks if n.version == edge.version)
                assert verdict(program, str(edge)) == may


def test_a_program_stays_within_what_the_kernel_takes():
    """Jumps are a byte wide: a rule is left by one of ten instructions at most."""
    many = [f"10.{i // 256}.{i % 256}.0/24" for i in range(200)] + ["fd00::1/128", "0.0.0.0/0"]
    program = filter_program(parse_networks(many))
    assert len(program) < 4096 and all(max(jt, jf) < 256 for _, jt, jf, _ in program)


def test_a_node_whose_kernel_takes_no_such_filter_names_the_setting(monkeypatch):
    """The agent's start fails with the remedy, and no port later."""
    many = ",".join(f"fd00::{i:x}:1" for i in range(1000))
    monkeypatch.setenv(socket_filter.VARIABLE, f"10.0.0.1,{many}")
    with pytest.raises(ConfigError, match=r"10\.1\.0\.0/16 in place of addresses"):
        socket_filter.check_own("10.0.0.1")
    monkeypatch.setenv(socket_filter.VARIABLE, "10.0.0.1")
    socket_filter.check_own("10.0.0.1")


def test_a_port_that_listens_late_has_the_filter_too(monkeypatch):
    """Between bind and listen it may be seen; a connected socket is examined once."""
    applied, examined = [], []
    monkeypatch.setattr(socket_filter, "apply", lambda s: applied.append(s.getsockname()))
    with socket.socket() as late, socket.create_server(("127.0.0.1", 0)) as server:
        late.bind(("127.0.0.1", 0))
        assert not socket_filter._apply_to(late.fileno()) and not applied
        late.listen()
        assert socket_filter._apply_to(late.fileno()) and applied == [late.getsockname()]
        with socket.create_connection(server.getsockname()) as connected:
            examined.append(socket_filter._apply_to(connected.fileno()))
    assert examined == [True]
