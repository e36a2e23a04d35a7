"""A port that only the nodes' networks reach, in a network namespace with several addresses."""

import os
import subprocess
import sys

import pytest

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


def test_a_program_stays_within_what_the_kernel_takes():
    """Jumps are a byte wide: a rule is left by one of ten instructions at most."""
    many = [f"10.{i // 256}.{i % 256}.0/24" for i in range(200)] + ["fd00::1/128", "0.0.0.0/0"]
    program = filter_program(parse_networks(many))
    assert len(program) < 4096 and all(max(jt, jf) < 256 for _, jt, jf, _ in program)
