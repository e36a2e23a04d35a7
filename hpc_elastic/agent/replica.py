"""The replica group of a run's node: puts `hpc_elastic.ft` into the rendezvous.

The rendezvous and the fault tolerance do not know each other. Here the session of an agent gets a
server for its workers, and a leader gets a keeper of the quorum; what they say to each other
travels as JSON objects over the agents' connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hpc_elastic.agent.preemption import PreemptionNotice
from hpc_elastic.ft.lighthouse_state import LighthouseState, ReplicaMessage
from hpc_elastic.ft.manager_server import ManagerServer
from hpc_elastic.ft.messages import SOCKET_ENV, Message, pack, unpack
from hpc_elastic.rendezvous.leader import MakeKeeper, replica_name
from hpc_elastic.rendezvous.log_entry import Agent
from hpc_elastic.rendezvous.replica_state import results_of
from hpc_elastic.rendezvous.session import RoundInfo
from hpc_elastic.run import fencing
from hpc_elastic.worker.shared_page import RESULTS_VARIABLE, WorkerStatus

GROUP_VARIABLES = ("REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS")
"""Which of the run's replica groups a worker belongs to, for scripts; the names are torchft's."""

Json = dict[str, Any]


class Replica:
    """The workers of one node, as their session (`replica_group.ReplicaGroup`) and agent see them.

    Args:
        me: The node's agent.
        folder: Where the server's socket is to be; only the owner may enter it.
        max_nodes: The most replicas that the run may have.
    """

    def __init__(self, me: Agent, folder: Path, max_nodes: int) -> None:
        self.me = me
        self._path = folder / "ft.sock"
        self._max_nodes = max_nodes
        self._say: Callable[[Json], None] = lambda _: None
        self._server = ManagerServer(self._path, replica_name(me), self)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told: float | None = None
        """The end of the notice that the quorum has been told of."""

    # ---- the session's thread -----------------------------------------------------------

    async def start(self, say: Callable[[Json], None]) -> None:
        """See `ReplicaGroup`, as for what follows."""
        self._say = say
        self._loop = asyncio.get_running_loop()
        await self._server.start()

    async def stop(self) -> None:
        """The session ends."""
        self._loop = None
        await self._server.stop()

    def up(self) -> None:
        """A leader is there."""
        self._server.up()

    def down(self) -> None:
        """There is none."""
        self._server.down()

    def heard(self, message: Json) -> None:
        """The keeper says something."""
        self._server.heard(unpack(message))

    def send(self, message: Message) -> None:
        """Pass on what the server says to the keeper (`group_server.Upstream`)."""
        self._say(pack(message))

    # ---- the agent's thread -------------------------------------------------------------

    def expect_workers(self) -> None:
        """Forget the workers before: others are about to be started."""
        self._told = None
        self._in_loop(self._server.expect, self.me.nproc)

    def why_leave(
        self, notice: PreemptionNotice, _: Sequence[WorkerStatus], now: float
    ) -> str | None:
        """Ask once to be let go; tell why to wait for that no longer, None to wait.

        Args:
            notice: The node is to be left.
            now: Monotonic seconds.
        """
        if notice.by != self._told:
            self._told = notice.by
            self._in_loop(self._server.notice, max(0.0, notice.by - now))
        if self._server.has_left:
            return "its replica has left the quorum"
        if now >= notice.by:
            return "its time is up"
        return None if self._server.was_placed else "its workers are in no quorum yet"

    def environment(self, round_: RoundInfo) -> dict[str, str]:
        """Return what its workers find in their environment."""
        group_id, num_groups = GROUP_VARIABLES
        return {
            SOCKET_ENV: str(self._path),
            fencing.REPLICA_VARIABLE: fencing.replica(self.me.task, self.me.attempt, self.me.slot),
            RESULTS_VARIABLE: results_of(round_.number, self.me),
            group_id: str(self.me.slot),
            num_groups: str(self._max_nodes),
        }

    def _in_loop(self, work: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(work, *arguments)


def keepers(min_replicas: int) -> MakeKeeper:
    """Return what makes the keeper of an epoch, for a leader.

    Args:
        min_replicas: The fewest replicas that train, at least 1.
    """
    return partial(_KeeperOfRun, min_replicas)


class _KeeperOfRun:
    """`quorum_keeper.QuorumKeeper` over the keeper of `hpc_elastic.ft`."""

    def __init__(self, min_replicas: int, epoch: int, lost: Iterable[str]) -> None:
        self._keeper = LighthouseState(epoch, min_replicas=min_replicas, lost_members=lost)

    def arrived(self, replica: str, now: float) -> Iterator[tuple[str, Json]]:
        return _packed(self._keeper.arrived(replica, now))

    def said(self, replica: str, message: Json, now: float) -> Iterator[tuple[str, Json]]:
        return _packed(self._keeper.said(replica, unpack(message), now))

    def left(self, replica: str, why: str, now: float) -> Iterator[tuple[str, Json]]:
        return _packed(self._keeper.left(replica, why, now))

    def tick(self, now: float) -> Iterator[tuple[str, Json]]:
        return _packed(self._keeper.tick(now))


def _packed(sends: Iterable[ReplicaMessage]) -> Iterator[tuple[str, Json]]:
    return ((send.replica, pack(send.message)) for send in sends)
