"""The replica group of a run's node, as its agent sees it.

The session of the agent serves the workers (`hpc_elastic.ft.manager_server`) and connects them to
the lighthouse, which lives with the run's leader.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpc_elastic.agent.preemption import PreemptionNotice
from hpc_elastic.ft.messages import SOCKET_ENV
from hpc_elastic.rendezvous.effects import RoundInfo
from hpc_elastic.rendezvous.log_entry import Agent
from hpc_elastic.rendezvous.replica_state import results_of
from hpc_elastic.rendezvous.session import Session
from hpc_elastic.run import fencing
from hpc_elastic.worker.shared_page import RESULTS_VARIABLE, WorkerStatus

GROUP_VARIABLES = ("REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS")
"""Which of the run's replica groups a worker belongs to, for scripts; the names are torchft's."""


class Replica:
    """The workers of one node, which are a replica of the model.

    Args:
        me: The node's agent.
        session: Its session, which serves the workers.
        socket: Where it does.
        max_nodes: The most replicas that the run may have.
    """

    def __init__(self, me: Agent, session: Session, socket: Path, max_nodes: int) -> None:
        assert session.replica is not None
        self.me = me
        self._session = session
        self._server = session.replica
        self._socket = socket
        self._max_nodes = max_nodes
        self._told: float | None = None
        """The end of the notice that was sent to the quorum."""

    def expect_workers(self) -> None:
        """Forget the workers before: others are about to be started."""
        self._told = None
        self._session.run_in_loop(self._server.expect_workers, self.me.nproc)

    def why_leave(
        self, notice: PreemptionNotice, _: Sequence[WorkerStatus], now: float
    ) -> str | None:
        """Request release once; return why to wait for that no longer, None to wait.

        Args:
            notice: The node is to be left.
            now: Monotonic seconds.
        """
        if notice.by != self._told:
            self._told = notice.by
            self._session.run_in_loop(self._server.announce_leave, max(0.0, notice.by - now))
        if self._server.has_left:
            return "its replica has left the quorum"
        if now >= notice.by:
            return "its time is up"
        return None if self._server.was_in_quorum else "its workers are in no quorum yet"

    def environment(self, round_: RoundInfo) -> dict[str, str]:
        """Return what its workers find in their environment."""
        group_id, num_groups = GROUP_VARIABLES
        return {
            SOCKET_ENV: str(self._socket),
            fencing.REPLICA_VARIABLE: fencing.replica(self.me.task, self.me.attempt, self.me.slot),
            RESULTS_VARIABLE: results_of(round_.number, self.me),
            group_id: str(self.me.slot),
            num_groups: str(self._max_nodes),
        }
