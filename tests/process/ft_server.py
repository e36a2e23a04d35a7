"""The manager server of a replica group on a thread, its lighthouse's side, and its workers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from hpc_elastic.ft.manager_client import ManagerClient, QuorumAnswer
from hpc_elastic.ft.manager_server import ManagerServer
from hpc_elastic.ft.messages import (
    Message,
    QuorumRequest,
    QuorumResult,
    QuorumResults,
    ReplicaStatus,
)

T = TypeVar("T")
PATIENCE_S = 10.0
Q = 7 << 20


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Received:
    """The messages that a server has sent to its lighthouse, in order."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.last_request = 0
        self._changed = threading.Condition()

    def send(self, message: Message) -> None:
        """Record a message of the server."""
        with self._changed:
            self.messages.append(message)
            if isinstance(message, QuorumRequest):
                self.last_request = message.number
            self._changed.notify_all()

    def next(self, type_: type[T]) -> T:
        """Wait for the next message of a type; forget it, and all before it."""

        def found() -> int | None:
            return next((i + 1 for i, m in enumerate(self.messages) if isinstance(m, type_)), None)

        with self._changed:
            assert self._changed.wait_for(found, PATIENCE_S), f"no {type_}: {self.messages}"
            message = self.messages[found() - 1]
            del self.messages[: found()]
            return message


class Server:
    """A manager server in an event loop of its own."""

    def __init__(self, folder: Path, size: int = 1) -> None:
        self.path = folder / "socket"
        self.received = Received()
        self.is_empty = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = ManagerServer(
            self.path, "group-a", self.received.send, on_empty=self.is_empty.set
        )
        self._run(self.server.start())
        self.do(self.server.expect_workers, size)

    def do(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call a function in its event loop; return what it returns."""

        async def doing() -> T:
            return work(*arguments)

        return self._run(doing())

    def send(self, message: Message) -> None:
        """Send a message of the lighthouse."""
        self.do(self.server.on_message, message)

    def place(self, quorum_id: int, size: int = 1, number: int | None = None) -> None:
        """Place the group in a quorum of two, in answer to its last request."""
        result = QuorumResult(quorum_id, 0, 2, "h:1", 5, "version", 0, 2)
        self.send(QuorumResults((result,) * size, number or self.received.last_request))

    def end_server(self) -> None:
        """End the server alone."""
        self._run(self.server.stop())

    def stop(self) -> None:
        """End the server and its thread."""
        self.end_server()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)


def request_of(client: ManagerClient, rank: int = 0, *, failures: int = 0) -> QuorumRequest:
    """Return the request of a worker at its quorum step."""
    return QuorumRequest(
        client.steps.quorum_step,
        5,
        "version",
        client.steps.quorum_id,
        failures,
        1,
        False,
        "h:1",
        (f"m{rank}",),
    )


class Bench:
    """One test's server, its clients and its workers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ends: list[Callable[[], None]] = []
        self.threads = ThreadPoolExecutor()
        self.aborts: list[tuple[int, str]] = []

    def serve(self, size: int = 1) -> Server:
        """Start the server of a group with this number of workers, connected to a lighthouse."""
        self.server = Server(self._folder, size)
        self._ends.append(self.server.stop)
        self.server.do(self.server.server.on_connect)
        self.server.received.next(ReplicaStatus)
        return self.server

    def client(self, rank: int = 0, size: int = 1) -> ManagerClient:
        """Connect a worker of this process."""
        client = ManagerClient(
            self.server.path, rank, size, timeout_s=PATIENCE_S,
            on_abort=lambda quorum_id, reason: self.aborts.append((quorum_id, reason)),
        )  # fmt: skip
        self._ends.append(client.close)
        return client

    def add_end(self, end: Callable[[], None]) -> None:
        """Call this at the end, before the server is stopped."""
        self._ends.append(end)

    def worker(self) -> Worker:
        """Start a worker in a process of its own."""
        worker = Worker(self.server.path)
        self._ends.append(worker.end)
        return worker

    def request(self, client: ManagerClient, rank: int = 0, **given: int) -> Future[QuorumAnswer]:
        """Start a step that needs a quorum; the answer is to come."""
        assert client.start_step(last_failed=bool(given))
        request = request_of(client, rank, **given)
        return self.threads.submit(client.request_quorum, request, PATIENCE_S)

    def enter(self, *clients: ManagerClient, quorum_id: int = Q) -> None:
        """Bring all workers into a quorum."""
        answers = [self.request(client, rank) for rank, client in enumerate(clients)]
        self.server.received.next(QuorumRequest)
        self.server.place(quorum_id, len(clients))
        for answer in answers:
            assert answer.result(PATIENCE_S).quorum_id == quorum_id

    def enter_group(self, size: int = 1) -> tuple[Any, ...]:
        """Bring a new group into a quorum; return its server and its workers' clients."""
        server = self.serve(size)
        clients = [self.client(rank, size) for rank in range(size)]
        self.enter(*clients)
        return server, *clients

    def end(self) -> None:
        """End all, the last one first."""
        for end in reversed(self._ends):
            end()
        self.threads.shutdown()


_WORKER = """
import ctypes, os, sys, time
from pathlib import Path
from hpc_elastic.ft.manager_client import ManagerClient
from hpc_elastic.ft.messages import LeaveGranted, QuorumRequest
from hpc_elastic.ft import quorum

def report(*what):
    print(*what, flush=True)

where, server = sys.argv[1], None
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if size > 1:  # on a host of this name
    import socket
    socket.gethostname = lambda: sys.argv[2]
    from hpc_elastic.ft.manager_client import find_server, resolve_place
    place = resolve_place(None, None, None, None)
    server = find_server(place, lighthouse_addr=where, replica_id="group", connect_timeout_s=20)
    where = server.path
elif where.startswith("http"):
    from hpc_elastic.ft.manager_server import start_server_process
    server = start_server_process(where, sys.argv[2], 1)
    where = server.path
on_abort = lambda q, reason: report("aborted", q, reason)
client = ManagerClient(Path(where), rank, size, on_abort=on_abort, timeout_s=10)
report("linked", server.process.pid if server and server.process else 0, where)
for line in sys.stdin:
    what, _, number = line.strip().partition(" ")
    if what == "step":
        if not client.start_step(last_failed=False):
            report("on", client.steps.quorum_step)
            continue
        known = quorum.CommittedProgress.loaded(0, 0).state_version
        request = QuorumRequest(
            client.steps.quorum_step, 0, known, client.steps.quorum_id, 0, 1, False, "h:1",
            (f"m{rank}",)
        )
        try:
            answer = client.request_quorum(request, float(number or 30))
        except TimeoutError as e:
            report("late", e)
            continue
        if isinstance(answer, LeaveGranted):
            report("left")
        else:
            report("placed", answer.quorum_id, answer.replica_rank, answer.replica_world_size)
    elif what == "vote":
        try:
            report("voted", client.vote(number == "yes", 30.0))
        except ConnectionError as e:
            report("lost", e)
    elif what == "hold":  # the interpreter lock
        ctypes.PyDLL(None).sleep(int(number))
        report("held")
    elif what == "fork":
        kept = os.dup(client._socket.fileno())  # as a child would that was not forked by Python
        pid = os.fork()
        if not pid:
            time.sleep(float(number))
            os._exit(0)
        os.close(kept)
        report("forked", pid)
    elif what == "close":
        client.close()
        if server:
            server.wait(is_last=size == 1)
        report("closed")
"""


class Worker:
    """A worker in a process of its own, which takes orders by lines.

    Attributes:
        server_pid: The process id of its server process, if it has started one.
        path: The socket of its server.
        place: Its quorum, its rank and the number of members, as it has reported last; None: none.
    """

    place: list[str] | None = None

    def __init__(
        self, where: Path | str, replica_id: str = "", *, waits: bool = True, **environment: str
    ) -> None:
        """Start it.

        Args:
            where: The server's socket; or the URL of a lighthouse: it starts a server process.
            replica_id: The group's name, then; or the name of its host, if WORLD_SIZE is above 1.
            waits: Return when it is linked to its server.
            environment: Differences to this process's.
        """
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(where), replica_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            text=True,
        )
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if waits:
            self.wait_until_linked()

    def wait_until_linked(self) -> None:
        """Wait until it is connected to its server."""
        _, server_pid, path = self.wait_for("linked", 120.0)  # all ranks import torch at once
        self.server_pid, self.path = int(server_pid), Path(path)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def order(self, line: str) -> None:
        """Give it an order."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def wait_for(self, what: str | tuple[str, ...], timeout_s: float = 30.0) -> list[str]:
        """Wait for a line that starts with a word; return its words, forget those before it."""
        with self._changed:
            self._changed.wait_for(lambda: self._find(what), timeout_s)
            words = self.reported(what)
            assert words is not None, f"no {what!r} in {self._lines}"
            return words

    def reported(self, what: str | tuple[str, ...]) -> list[str] | None:
        """Return the same if there is one, else None."""
        with self._changed:
            found = self._find(what)
            if not found:
                return None
            words = self._lines[found - 1].split()
            del self._lines[:found]
            if words[0] in ("placed", "aborted"):
                self.place = words[1:] if words[0] == "placed" else None
            return words

    def _find(self, what: str | tuple[str, ...]) -> int:
        """Return how many lines there are up to it; 0 if it is not there."""
        return next((i + 1 for i, line in enumerate(self._lines) if line.startswith(what)), 0)

    def step(self) -> list[str]:
        """Start a step, and wait until it goes on, or has a place in a new quorum."""
        self.order("step")
        return self.wait_for(("on", "placed"))

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.stdin.close()
        self.process.wait()
        self._reader.join(PATIENCE_S)
        self.process.stdout.close()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._changed:
                self._lines.append(line.strip())
                self._changed.notify_all()
