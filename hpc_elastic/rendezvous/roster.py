"""The members of the last round, by rank and by task (pure).

Ranks are stable: members of the last round keep their order; newcomers follow in the order of their
slots.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpc_elastic.rendezvous.record import Agent


class Roster:
    """Who has which rank; looked up in constant time."""

    def __init__(self, members: tuple[Agent, ...] = ()) -> None:
        self.members = members
        """In rank order."""
        self._ranks = {agent: rank for rank, agent in enumerate(members)}
        self._by_task = {agent.task: agent for agent in members}

    def __contains__(self, agent: Agent) -> bool:
        return agent in self._ranks

    def attempt_of(self, task: str) -> Agent | None:
        """Return the member that is an attempt of a task; None if there is none."""
        return self._by_task.get(task)

    def next(self, candidates: Iterable[Agent], max_nodes: int) -> Roster:
        """Return the next round's."""
        newest = len(self._ranks)
        ranked = sorted(candidates, key=lambda a: (self._ranks.get(a, newest), a.slot, a.task))
        return Roster(tuple(ranked[:max_nodes]))
