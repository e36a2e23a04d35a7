"""Real sockets over IPv6: on this machine's ::1, and between two nodes that have nothing else."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from group import Group
from torch.distributed import TCPStore

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
SECRET = b"secret of this run"

NODE = """
import os, sys
from datetime import timedelta
from hpc_elastic.transport import interface as interface_module

rank = int(sys.argv[1])
interface = interface_module.find(f"n{rank}", None, lambda: None)
os.environ["GLOO_SOCKET_IFNAME"] = interface.name

import torch
import torch.distributed as dist

host, port = (interface.address, 0) if rank == 0 else (sys.argv[2], int(sys.argv[3]))
patience = timedelta(seconds=60)
store = dist.TCPStore(host, port, is_master=rank == 0, wait_for_workers=False, timeout=patience)
print(interface.name, interface.address, store.port, flush=True)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=patience)
total = torch.full((1,), rank + 1.0)
dist.all_reduce(total)
dist.barrier()
print(int(total), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def loopback6():
    """Skip where the machine has no IPv6 at all."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return "::1"
    except OSError as e:
        pytest.skip(f"no IPv6 on this machine: {e}")


class Node:
    """A network of its own, for as long as this object's process lives."""

    def __init__(self) -> None:
        self.holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo ready; exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        if self.holder.stdout.readline() != "ready\n":
            pytest.skip(f"no network namespaces here: {self.holder.communicate()[1].strip()}")

    def argv(self, *command: str) -> list[str]:
        """A command line that runs on this node."""
        return ["nsenter", f"--net=/proc/{self.holder.pid}/ns/net", *command]

    def ip(self, *command: str) -> None:
        """Set up a part of its network."""
        done = subprocess.run(self.argv("ip", *command), capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no IPv6 network between namespaces here: {done.stderr.strip()}")


@pytest.fixture
def nodes():
    """Yield two nodes, one cable between them, with IPv6 addresses only: fd00:5::1 and ::2."""
    missing = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root, and the commands unshare, nsenter and ip; missing: {missing}")
    with contextlib.ExitStack() as stack:
        pair = []
        for _ in range(2):
            pair.append(Node())
            stack.callback(pair[-1].holder.communicate)  # closes its stdin, so that it ends
        peer = ["peer", "name", "eth0", "netns", str(pair[1].holder.pid)]
        pair[0].ip("link", "add", "eth0", "type", "veth", *peer)
        for i, node in enumerate(pair, 1):
            node.ip("link", "set", "lo", "up")
            node.ip("addr", "add", f"fd00:5::{i}/64", "dev", "eth0", "nodad")
            node.ip("link", "set", "eth0", "up")
        yield pair


def test_two_nodes_with_nothing_but_ipv6_form_a_group(nodes, tmp_path):
    """Each finds its address; the store and gloo's connections go over it."""
    script = tmp_path / "node.py"
    script.write_text(NODE)
    with contextlib.ExitStack() as stack:

        def start(rank, *arguments):
            argv = nodes[rank].argv(sys.executable, str(script), str(rank), *arguments)
            process = stack.enter_context(
                subprocess.Popen(
                    argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )
            )  # fmt: skip
            stack.callback(process.kill)
            return process

        first = start(0)
        name, address, port = first.stdout.readline().split() or pytest.fail(first.stderr.read())
        assert (name, address) == ("eth0", "fd00:5::1")
        output, errors = start(1, address, port).communicate(timeout=PATIENCE_S)
        assert output.split() == ["eth0", "fd00:5::2", port, "3"], errors
        output, errors = first.communicate(timeout=PATIENCE_S)
        assert output == "3\n", errors


def test_a_store_on_an_ipv6_address(loopback6):
    """Torch takes the bare address, and tells the port that it got."""
    patience = timedelta(seconds=PATIENCE_S)
    master = TCPStore(loopback6, 0, is_master=True, wait_for_workers=False, timeout=patience)
    client = TCPStore(loopback6, master.port, is_master=False, timeout=patience)
    client.set("key", "value")
    assert master.get("key") == b"value"


def test_agents_form_a_group_over_ipv6(loopback6, tmp_path):
    """The endpoint in the record, the leader's port and the connections to it."""
    g = Group(tmp_path, max_nodes=2)
    g.address = loopback6
    agents = [g.agent(slot) for slot in range(2)]
    assert sorted(r.group_rank for r in g.join(*agents)) == [0, 1]
    assert g.register.last()[1].leader.address == loopback6
    for session in agents:
        session.leave("the test is over")
    g.threads.shutdown()
