"""Which agents a leader hears, and whose silence counts (pure).

An agent lives as long as it is heard: a broken connection is a loss at once, silence is one after
``lost_after_s``. Where a tick comes late it was the leader that slept or was busy, and nobody's
silence counts for that long. A member of the last round that does not find a new leader within
`Liveness.election_s` is lost too.

A leader that hears fewer than half of the last round's members, because the others have fallen
silent (and not because their connections closed), may itself be the one that is cut off.

Times are monotonic seconds of the leader's node.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpc_elastic.rendezvous.record import Agent

_BEATS_PER_S = 5000
_PUNCTUAL_S = 0.1


@dataclass(frozen=True)
class Liveness:
    """When silence means loss; seconds."""

    heartbeat_s: float
    lost_after_s: float
    stale_s: float = 0.0
    """How old a file may be that is read anew on the run's file system."""

    @property
    def lease_s(self) -> float:
        """Between two renewals of a lease: each is an operation of a shared file system."""
        return 2 * self.heartbeat_s

    @property
    def lapse_s(self) -> float:
        """A lease that was not renewed for so long has lapsed."""
        return 5 * self.heartbeat_s + self.stale_s

    @property
    def election_s(self) -> float:
        """So long it may take others to elect a leader, and to find it."""
        return 2 * self.lost_after_s + self.stale_s

    @classmethod
    def of(
        cls, heartbeat_s: float, lost_after_s: float, max_nodes: int, stale_s: float = 0.0
    ) -> Liveness:
        """Return a run's, from its settings: in a large one each agent beats more seldom.

        A leader is asked to take five thousand heartbeats a second, as long as three of each agent
        are due before its silence counts.
        """
        gentle_s = min(max_nodes / _BEATS_PER_S, lost_after_s / 3)
        return cls(max(heartbeat_s, gentle_s), lost_after_s, stale_s)


class Attendance:
    """Who is there."""

    def __init__(self, liveness: Liveness, expected: Iterable[Agent], now: float) -> None:
        self.liveness = liveness
        self.heard: dict[Agent, float] = {}
        """Agents that are connected, and when each was heard last."""
        self._expected = {a.task: (a, now + liveness.election_s) for a in expected}
        """Members of the last round that have not found this leader yet, and until when."""
        self._silent: set[str] = set()
        """Tasks of the last round's members that were lost by silence."""
        self._ticked = now

    def connected(self, agent: Agent, now: float) -> None:
        """An agent has proved who it is."""
        self.heard[agent] = now
        self._expected.pop(agent.task, None)
        self._silent.discard(agent.task)

    def closed_round(self) -> None:
        """A round has closed: who fell silent in the last one does not matter any more."""
        self._silent.clear()

    def have_no_node(self, tasks: Iterable[str]) -> None:
        """Slurm says that nothing runs of these tasks: their silence is no riddle."""
        self._silent.difference_update(tasks)

    def is_lost_in_silence(self, agent: Agent) -> None:
        """A member is taken for lost because it was not heard."""
        self._silent.add(agent.task)

    def forgive_if_slept(self, now: float) -> float:
        """Count no silence for the time that the leader itself was not running; return it."""
        late_s, self._ticked = now - self._ticked - self.liveness.heartbeat_s, now
        if late_s <= _PUNCTUAL_S:
            return 0.0
        self.heard = {a: min(now, heard + late_s) for a, heard in self.heard.items()}
        self._expected = {t: (a, until + late_s) for t, (a, until) in self._expected.items()}
        return late_s

    def silent(self, now: float) -> list[Agent]:
        """Return the agents that were not heard for too long."""
        limit = now - self.liveness.lost_after_s
        return [a for a, heard in self.heard.items() if heard < limit]

    def take_overdue(self, now: float) -> list[Agent]:
        """Return, once, the members of the last round that have not found this leader in time."""
        overdue = [a for a, until in self._expected.values() if now > until]
        for agent in overdue:
            del self._expected[agent.task]
        return overdue

    @property
    def misses_somebody(self) -> bool:
        """Whether members are unheard that may live, and try to lead."""
        return bool(self._silent or self._expected)

    def hears_half(self, num_members: int) -> bool:
        """Tell whether this leader is on the side of the last round's members that may go on."""
        return len(self._silent) + len(self._expected) <= num_members / 2
