"""Which ranks are persistently slower than the others (pure).

In synchronous training all ranks make as many steps a second, since they wait for the slowest. So
each node measures how much of a step each of its ranks takes itself (`agent.observer` says how, and
what that does not see), over windows of some seconds, and tells the leader with its heartbeats.

A rank is slow in a window if its load is above 1.3 times the median (of two ranks, the other's),
and by more than a twentieth of a step, so that it matters. It is a *straggler* after `IN_A_ROW`
such windows, until it has as many without.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_elastic.rendezvous.actions import Action, Note
from hpc_elastic.rendezvous.record import Agent

RATIO = 1.3
IN_A_ROW = 3
_SHARE = 0.05
_LONGEST = 10_000
"""More ranks than that are not compared: a median is taken for each."""


@dataclass
class _Rank:
    load_s: float
    slow: int = 0
    """Windows in a row that were slow, or (negative) that were not."""
    ratio: float = 1.0
    is_straggler: bool = False


@dataclass
class Stragglers:
    """What a leader knows of the ranks' loads in one round."""

    _round: int = 0
    _seen: dict[Agent, int] = field(default_factory=dict)
    """The last window of each agent."""
    _ranks: dict[tuple[Agent, int], _Rank] = field(default_factory=dict)
    """By agent too: those of a replica begin at 0 (``ft=true``)."""

    def heard(self, agent: Agent, loads: Sequence[Any], round_: int) -> list[Action]:
        """An agent tells the loads of its ranks.

        Args:
            agent: The agent, a member of the present round.
            loads: The number of its window, and (rank, load, step) of each rank, in seconds.
            round_: The number of that round.
        """
        if round_ != self._round:
            self._round, self._seen, self._ranks = round_, {}, {}
        number, ranks = int(loads[0]), loads[1]
        if self._seen.get(agent) == number or len(self._ranks) > _LONGEST:
            return []
        self._seen[agent] = number
        for rank, load_s, _ in ranks:
            self._ranks.setdefault((agent, int(rank)), _Rank(load_s)).load_s = float(load_s)
        judged = (self._judge((agent, int(rank)), float(step_s)) for rank, _, step_s in ranks)
        return [note for notes in judged for note in notes]

    @property
    def current(self) -> list[dict[str, Any]]:
        """Return those that are stragglers now, as status.json shows them."""
        return [
            {"rank": number, "host": agent.host, "ratio": round(rank.ratio, 2)}
            for (agent, number), rank in sorted(self._ranks.items(), key=_in_order)
            if rank.is_straggler
        ]

    def _judge(self, key: tuple[Agent, int], step_s: float) -> list[Action]:
        (agent, number), rank = key, self._ranks[key]
        median_s = self._median_s(key)
        if median_s <= 0.0:
            return []
        rank.ratio = rank.load_s / median_s
        slow = rank.ratio > RATIO and rank.load_s - median_s > _SHARE * step_s
        rank.slow = max(rank.slow, 0) + 1 if slow else min(rank.slow, 0) - 1
        if rank.is_straggler == slow or abs(rank.slow) < IN_A_ROW:
            return []
        rank.is_straggler = slow
        fields = {"rank": number, "host": agent.host, "task": agent.task}
        return [Note("straggler", {**fields, "ratio": round(rank.ratio, 2), "slow": slow})]

    def _median_s(self, key: tuple[Agent, int]) -> float:
        """Return the median load; of two ranks the other's; 0 where there is one."""
        loads = [r.load_s for k, r in self._ranks.items() if k != key or len(self._ranks) > 2]
        return statistics.median(loads) if loads else 0.0


def _in_order(item: tuple[tuple[Agent, int], _Rank]) -> tuple[int, int]:
    (agent, number), _ = item
    return number, agent.slot
