"""Which nodes are asked to be left by notices that a leader has claimed (pure).

A notice is kept until a node that it names has confirmed it. A message may be lost with its
connection, and a leader may be cut off from the node without knowing it yet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from hpc_elastic.rendezvous.record import Agent

PATIENCE = 30
"""A notice that names no agent that is there is removed after this many looks."""


@dataclass
class _Notice:
    told: set[Agent] = field(default_factory=set)
    confirmed: set[Agent] = field(default_factory=set)
    num_vain_looks: int = 0


class Asked:
    """The notices of one leader."""

    def __init__(self) -> None:
        self._notices: dict[str, _Notice] = {}

    def look(
        self, claimed: Mapping[str, float], heard: Collection[Agent]
    ) -> tuple[list[tuple[Agent, float]], list[str], list[str]]:
        """Say what the notices ask for.

        Args:
            claimed: Notices that the leader has, by task, host or ``all``; and the seconds left.
            heard: Agents that are connected.

        Returns:
            Who is to be told, and the seconds that are left; the notices to remove because they
            are confirmed; and those to remove because they name nobody.
        """
        self._notices = {name: self._notices.get(name, _Notice()) for name in claimed}
        tell: list[tuple[Agent, float]] = []
        confirmed: list[str] = []
        in_vain: list[str] = []
        for name, notice in self._notices.items():
            waiting = [a for a in heard if _names(name, a) and a not in notice.confirmed]
            notice.told.update(waiting)
            tell += [(agent, claimed[name]) for agent in waiting]
            if waiting:
                continue
            if notice.confirmed:
                confirmed.append(name)
                continue
            notice.num_vain_looks += 1
            if notice.num_vain_looks >= PATIENCE:
                in_vain.append(name)
        return tell, self._forget(confirmed), self._forget(in_vain)

    def confirmed(self, agent: Agent, heard: Collection[Agent]) -> list[str]:
        """An agent knows that its node is to be left; return the notices to remove."""
        over: list[str] = []
        for name, notice in self._notices.items():
            if agent in notice.told:
                notice.confirmed.add(agent)
                if not any(a in heard for a in notice.told - notice.confirmed):
                    over.append(name)
        return self._forget(over)

    def _forget(self, over: list[str]) -> list[str]:
        """Forget what is over: another notice of the same name is a new one."""
        for name in over:
            del self._notices[name]
        return over


def _names(name: str, agent: Agent) -> bool:
    return name in (agent.task, agent.host, "all")
