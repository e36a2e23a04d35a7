"""A server under a flood: ``flooded.py KIND FOLDER``, in a process that may open few files.

It prints where it is reached, and for each line that it reads what it has open: descriptors,
threads and KiB of memory. `GENUINE` has what a peer does that knows the key.
"""

import asyncio
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "process"))

from group import SECRET, Group

from hpc_elastic.checkpoint.node_memory import COPY_CONTEXT, NodeMemory, Receiver
from hpc_elastic.ft import messages
from hpc_elastic.ft.checkpointing import HTTPTransport
from hpc_elastic.ft.coordination import LighthouseServer
from hpc_elastic.transport.auth import user_secret
from hpc_elastic.transport.connection import SignedSocket, connect

FILES = 1024
KEY = b"k" * 32
STEP = 3
PATIENCE_S = 30.0

Where = Any
"""As JSON has it: address and port, or what else a peer must know."""


def lead(folder: Path) -> tuple[object, Where]:
    """Lead a run of one node so far."""
    group = Group(folder, max_nodes=2)
    group.running = frozenset({"7_0"})
    session = group.agent(0)
    threading.Thread(target=session.join, args=(PATIENCE_S,), daemon=True).start()
    while (entry := group.register.last()[1]) is None or not entry.leader.port:
        pass
    return group, [entry.leader.address, entry.leader.port, entry.term]


def join_run(where: Where, number: int) -> None:
    """Connect as an agent does."""
    address, port, term = where
    hello = {"task": f"7_{number}", "attempt": 0, "slot": number, "host": f"n{number}", "nproc": 1}
    asyncio.run(_shake_hands(address, port, SECRET, term, hello))


def serve_quorum(folder: Path) -> tuple[object, Where]:
    """Be a lighthouse."""
    server = LighthouseServer(bind="127.0.0.1:0")
    return server, ["127.0.0.1", int(server.address().rpartition(":")[2])]


def join_quorum(where: Where, number: int) -> None:
    """Connect as a replica does."""
    secret, hello = user_secret(messages.LIGHTHOUSE_PURPOSE), {"replica": f"replica{number}"}
    asyncio.run(_shake_hands(*where, secret, messages.LIGHTHOUSE_SESSION, hello))


async def _shake_hands(*arguments: Any) -> None:
    """Connect; again, as agents and replicas do, if strangers have taken the place meanwhile."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            connection = await connect(*arguments)
        except OSError:
            if time.monotonic() > until:
                raise
        else:
            await connection.close()
            return


def offer_state(folder: Path) -> tuple[object, Where]:
    """Offer a state to those that heal."""
    import torch

    server = HTTPTransport(timedelta(seconds=60), key=KEY)
    server.offer_parts(STEP, {"weight": torch.ones(1000)}, timedelta(seconds=600))
    return server, server.metadata()


def heal(where: Where, number: int) -> None:
    """Fetch the state."""
    transport: HTTPTransport[Any] = HTTPTransport(timedelta(seconds=60), key=KEY)
    try:
        found = transport.recv_checkpoint(0, where, STEP, timedelta(seconds=PATIENCE_S))
        assert found["weight"].sum() == 1000
    finally:
        transport.shutdown()


def receive_copies(folder: Path) -> tuple[object, Where]:
    """Take copies of checkpoints."""
    server = Receiver(NodeMemory(folder), KEY, ["127.0.0.1"])
    return server, list(server.address)


def begin_copy(where: Where, number: int) -> None:
    """Connect as a neighbour does."""
    address = where[0], where[1]
    with closing(SignedSocket.connect(address, KEY, COPY_CONTEXT, timeout_s=PATIENCE_S)):
        pass


KINDS: dict[str, Callable[[Path], tuple[object, Where]]] = {
    "leader": lead, "lighthouse": serve_quorum, "healing": offer_state, "copies": receive_copies,
}  # fmt: skip
GENUINE: dict[str, Callable[[Where, int], None]] = {
    "leader": join_run, "lighthouse": join_quorum, "healing": heal, "copies": begin_copy,
}  # fmt: skip


def port_of(where: Where) -> tuple[str, int]:
    """Return the address and the port that a stranger floods."""
    if isinstance(where, str):  # a URL
        host, _, port = where.split("/")[2].rpartition(":")
        return host, int(port)
    return where[0], where[1]


FLOOD = """
import resource, select, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held, number, most = [], 0, int(sys.argv[3])
while not select.select([sys.stdin], [], [], 0)[0]:
    guest = socket.socket()
    guest.settimeout(5)
    try:
        guest.connect((sys.argv[1], int(sys.argv[2])))
    except OSError:
        pass
    held.append(guest)
    number += 1
    if number == most // 2:
        print("half", flush=True)
    if number == most:
        print("all", flush=True)
    if len(held) > most:
        held.pop(0).close()
"""
"""Opens silent connections without an end, and holds the last of them: ADDRESS PORT NUMBER."""


def what_is_open() -> dict[str, int]:
    """Return what this process has open; it opens a file to find out."""
    text = Path("/proc/self/status").read_text()
    return {
        "files": len([*Path("/proc/self/fd").iterdir()]),
        "threads": int(text.partition("Threads:")[2].split()[0]),
        "kib": int(text.partition("VmRSS:")[2].split()[0]),
    }


def main(kind: str, folder: str) -> None:
    """Serve until the end of the input."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))
    server, where = KINDS[kind](Path(folder))
    print(json.dumps(where), flush=True)
    for _ in sys.stdin:
        print(json.dumps(what_is_open()), flush=True)
    del server
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
