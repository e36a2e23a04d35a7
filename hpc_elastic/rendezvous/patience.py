"""How long nodes wait in vain before they go back to the queue, and for how long they stay (pure).

Nodes that are too few, or that are not wanted, wait for ``min_wait_s`` times 1 to 2, by chance;
then they are away for a time that is random. The range of the wait grows with every time that the
run has given all its nodes back. Of two runs that hold half of the nodes each, one gives way: the
other's tasks stand in the queue meanwhile, and get its nodes. For that a short time away is enough.
It doubles all the same, up to ten minutes, so that the tasks of a run that finds no nodes for days
start and end only now and then.

In a sweep, nodes that wait in vain go back within `SURE_S` or so. They are away for longer, because
the runs that hold what they lack let them start again as soon as there are nodes (``turns``).

Without ``min_wait_s`` there is no queue, and nodes are kept. So are all that a run has if one of
their tasks may not be requeued any more (``max_requeues``): it would end, and the run perhaps.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hpc_elastic.rendezvous.actions import GiveBack
from hpc_elastic.rendezvous.record import Agent
from hpc_elastic.rendezvous.rules import Rules

SURE_S = 5.0
"""For so long a run is seen to wait in vain before it gives its nodes back: for some seconds Slurm
calls tasks running whose run has ended."""
AWAY_S = 15.0
"""How long nodes that were given back stay away, about, for the first time."""
_AWAY_IN_VAIN_S = 60.0
_LONGEST_AWAY_S = 600.0
_SHORTEST_AWAY_S = 10.0
"""A bad node's task is away for this long at least."""


@dataclass
class Patience:
    """What is known of nodes that were given back; monotonic seconds of the leader."""

    rules: Rules
    rng: random.Random = field(default_factory=random.Random)
    given_back: int = 0
    """How often the run has given all its nodes back since its last round."""
    away: dict[str, int] = field(default_factory=dict)
    """Task -> attempt that was given back."""
    _times: float = field(init=False)
    _in_vain_since: float | None = None

    def __post_init__(self) -> None:
        self._times = self.rng.uniform(1.0, 2.0 + self.given_back)

    def would_return(self, agents: Iterable[Agent]) -> bool:
        """Tell whether the tasks of all of these may go back to the queue."""
        most = self.rules.max_requeues
        return most is None or all(agent.attempt < most for agent in agents)

    def is_over(self, waited_s: float) -> bool:
        """Tell whether nodes have waited long enough."""
        wait = self.rules.min_wait_s
        return wait is not None and waited_s >= wait * self._times

    def late(self, joined: Mapping[Agent, float], now: float) -> tuple[Agent, ...]:
        """Return who has waited for too long; ``joined`` says since when each waits."""
        if self.rules.min_wait_s is None:
            return ()
        late = (a for a, since in joined.items() if self.is_over(now - since))
        return tuple(agent for agent in late if self.would_return([agent]))

    def is_in_vain(self, why: str | None, now: float) -> bool:
        """Tell whether nodes have been seen to wait in vain for long enough; None: they do not."""
        if why is None:
            self._in_vain_since = None
        elif self._in_vain_since is None:
            self._in_vain_since = now
        return self._in_vain_since is not None and now - self._in_vain_since >= SURE_S

    def time_away(self, base_s: float = AWAY_S) -> float:
        """Return how long nodes are to stay away that go back now."""
        longest = min(_LONGEST_AWAY_S, base_s * 2.0**self.given_back)
        return longest * self.rng.uniform(0.5, 1.5)

    def send_away(self, agents: tuple[Agent, ...]) -> GiveBack:
        """Give back nodes that are not wanted."""
        return self._away(agents, self.time_away(), everybody=False)

    def send_after(self, agent: Agent, delay_s: float) -> GiveBack:
        """Give back a node that has come when all were sent away, for so long."""
        return self._away((agent,), delay_s, everybody=False)

    def send_bad(self, agents: tuple[Agent, ...]) -> GiveBack:
        """Give back nodes that are to blame for failures: their tasks start elsewhere."""
        return self._away(agents, max(_SHORTEST_AWAY_S, self.time_away()), everybody=False)

    def send_all(self, agents: tuple[Agent, ...], why: str = "") -> GiveBack:
        """Give back all nodes, and let none of the run's start for a while.

        Args:
            agents: Those that have nodes.
            why: Why they wait in vain; empty: they have waited for too long.
        """
        delay_s = self.time_away(_AWAY_IN_VAIN_S if why else AWAY_S)
        self.given_back += 1
        return self._away(agents, delay_s, everybody=True, why=why)

    def _away(
        self, agents: tuple[Agent, ...], delay_s: float, *, everybody: bool, why: str = ""
    ) -> GiveBack:
        self.away |= {a.task: a.attempt for a in agents}
        return GiveBack(agents, delay_s, all=everybody, why=why)
