"""What the rendezvous knows of the replicas' quorum: somebody else's rules, behind an interface.

The rules are those of `hpc_elastic.ft`, a sibling of this package, which the agent puts in
(`hpc_elastic.agent.quorum`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from hpc_elastic.rendezvous.record import Agent

Message = dict[str, Any]
Answers = Iterable[tuple[str, Message]]
"""Messages to replicas, by name, in the order in which they are to be sent."""


class QuorumKeeper(Protocol):
    """Keeps the quorum in one epoch (leader). Times are its monotonic seconds."""

    def arrived(self, replica: str, now: float) -> Answers:
        """A replica's agent has connected."""

    def said(self, replica: str, message: Message, now: float) -> Answers:
        """A replica's agent passes on what its workers say.

        Raises:
            ValueError: it is no message of theirs.
        """

    def left(self, replica: str, why: str, now: float) -> Answers:
        """The connection is gone, or nothing was heard for too long."""

    def tick(self, now: float) -> Answers:
        """Time has passed; to be called every few hundredths of a second."""


MakeKeeper = Callable[[int, Iterable[str]], QuorumKeeper]
"""Makes the keeper of an epoch; the replicas named are known to be dead."""


def replica_name(agent: Agent) -> str:
    """Return the name of the replica that an agent's workers are: another attempt is another."""
    return f"{agent.task}:{agent.attempt}"
