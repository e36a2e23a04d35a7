"""The server of a replica group, and its workers, for one test."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from ft_group import PATIENCE_S, Server, Worker, ask_of

from hpc_elastic.ft.manager_client import ManagerClient
from hpc_elastic.ft.messages import (
    CheckpointBeforeLeave,
    LeaveGranted,
    QuorumRequest,
    QuorumResult,
    ReplicaStatus,
)

Q = 7 << 20


class Place:
    """One test's server, its links and its workers."""

    def __init__(self, folder) -> None:
        self._folder = folder
        self._ends: list[Callable[[], None]] = []
        self.threads = ThreadPoolExecutor()
        self.broken: list[tuple[int, str]] = []

    def serve(self, size: int = 1) -> Server:
        """Start the server of a group with so many workers."""
        self.server = Server(self._folder, size)
        self._ends.append(self.server.stop)
        self.server.do(self.server.server.up)
        self.server.keeper.next(ReplicaStatus)
        return self.server

    def link(self, rank: int = 0, size: int = 1) -> ManagerClient:
        """Connect a worker of this process."""
        link = ManagerClient(self.server.path, rank, size, timeout_s=PATIENCE_S,
                    on_broken=lambda q, why: self.broken.append((q, why)))  # fmt: skip
        self._ends.append(link.close)
        return link

    def worker(self) -> Worker:
        """Start a worker in a process of its own."""
        worker = Worker(self.server.path)
        self._ends.append(worker.end)
        return worker

    def asks(
        self, link: ManagerClient, rank: int = 0
    ) -> Future[QuorumResult | LeaveGranted | CheckpointBeforeLeave]:
        """Begin a step that needs a quorum; the answer is to come."""
        assert link.needs_quorum(failed=False)
        return self.threads.submit(link.ask, ask_of(link, rank), PATIENCE_S)

    def in_quorum(self, *links: ManagerClient, quorum_id: int = Q) -> None:
        """Bring all workers into a quorum."""
        answers = [self.asks(link, rank) for rank, link in enumerate(links)]
        self.server.keeper.next(QuorumRequest)
        self.server.place(quorum_id, len(links))
        for answer in answers:
            assert answer.result(PATIENCE_S).quorum_id == quorum_id

    def end(self) -> None:
        """End all, the last one first."""
        for end in reversed(self._ends):
            end()
        self.threads.shutdown()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
