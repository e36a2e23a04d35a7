"""Reachability: which agents reach which others, and the nodes that a round leaves out (pure).

Theory of operation
-------------------
All agents are connected to the leader, but a group trains only if each node reaches each other one.
A switch port, a rail or a firewall may separate two followers, in one direction or in both. gloo
and NCCL wait for such a connection for minutes, and name no node.

Probes      An agent that asks for a place names a port at each address that gloo or NCCL may use.
            Before a round closes, the leader has the agents connect to each other's ports, all at
            once, in both directions, for `PROBE_S` at most; each connection exchanges messages.
            Only pairs without a result are probed, so a round with the same members sends no
            probe, and a healthy group waits for a few milliseconds. A result holds until a round
            breaks by a failure, or a group makes no step (`suspect`).

            Up to `_ALL_PAIRS` agents, all pairs are probed; in a larger group each agent probes
            those at the distances 1, 2, 4, 8 and so on, to which rings and trees connect.

Left out    The agents that do not reach each other are the edges of a graph. The smallest set of
            agents that touches each edge (a minimum vertex cover) is left out: the others all reach
            each other. Among several such sets, one is taken with agents that were left out before,
            do not lead, and are newcomers. While a group trains with at least min nodes, only nodes
            that reach all its members are added. The search is exact unless it takes more than
            `_STEPS`; then the agent with the most missing connections is left out again and again,
            which is at most a factor of ln n from the smallest set.

Retry       A pair that failed is probed again after `RETRY_S`, then after twice that time, and so
            on up to `_LONGEST_RETRY_S`.

Unanswered  An agent that is connected to the leader and does not answer within `ANSWER_S` has no
            result, which is neither reached nor cut: the last result of a pair stands, and a pair
            without one counts as reached. What no probe sees is limited by the time limit of the
            first step (`agent.hang_watch`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from hpc_elastic.rendezvous.effects import Effect, Note, Send, hosts_of
from hpc_elastic.rendezvous.log_entry import Agent
from hpc_elastic.rendezvous.messages import Address, Probe, Probed

PROBE_S = 5.0
"""Time limit of an agent for all its probes: with 20 % of packets lost, one gets through."""
ANSWER_S = PROBE_S + 3.0
RETRY_S, _LONGEST_RETRY_S = 60.0, 960.0
_SUSPECT_EVERY_S = 30.0
_ALL_PAIRS = 128
_STEPS = 20_000
_MAX_NAMED = 8

Endpoints = Sequence[Address]
Graph = Mapping[Agent, Collection[Agent]]


class Reachability:
    """What is known about the connections between the agents of a run."""

    def __init__(self) -> None:
        self.pending: set[Agent] = set()  # agents whose connections are being probed, or will be
        self._endpoints: dict[Agent, Endpoints] = {}
        self._tried: defaultdict[Agent, set[Agent]] = defaultdict(set)
        """Agents that each agent has probed, or has been sent to probe."""
        self._cut: defaultdict[Agent, set[Agent]] = defaultdict(set)
        """Agents that each agent has not reached."""
        self._number = 0
        self._awaited: dict[Agent, Sequence[Agent]] = {}
        """Agents that have not answered the last query, each with those that it probes."""
        self._sent_at = 0.0
        self._probed: set[Agent] = set()  # agents of the last query
        self.has_changed = False
        """Whether the agents that are left out are to be chosen again, from the same results."""
        self._retry_at: float | None = None
        self._retry_s = RETRY_S
        self._suspected_at: float | None = None

    # ---- events -------------------------------------------------------------------------

    def add(self, agent: Agent, endpoints: Endpoints) -> None:
        """Take in the ports at which an agent accepts probes; none: it is not probed."""
        if endpoints and self._endpoints.get(agent) != endpoints:
            self._endpoints[agent] = endpoints
            self.pending.add(agent)

    def remove(self, agent: Agent) -> None:
        """Forget an agent that was lost."""
        if self._endpoints.pop(agent, None) is None:
            return
        self.pending.discard(agent)
        self._awaited.pop(agent, None)
        for known in (self._tried, self._cut):
            known.pop(agent, None)
            for others in known.values():
                others.discard(agent)
        self.has_changed = True

    def suspect(self, now: float) -> None:
        """Have all pairs probed again: the group makes no step, or a round has failed."""
        at = self._suspected_at
        if at is None or now - at >= _SUSPECT_EVERY_S:
            self._suspected_at = now
            self._tried.clear()
            self._probed = set()  # the end of a query under way settles nothing
            self.pending.update(self._endpoints)

    def answered(self, agent: Agent, answer: Probed) -> None:
        """Take in the agents that an agent has not reached."""
        if answer.number != self._number or agent not in self._awaited:
            return
        failed = set(map(str, answer.failed))
        for peer in self._awaited.pop(agent):
            change = self._cut[agent].add if peer.task in failed else self._cut[agent].discard
            change(peer)

    # ---- probes -------------------------------------------------------------------------

    def is_settled(self, now: float) -> bool:
        """Return whether nothing has changed, and no probe is due or under way."""
        due = self._retry_at is not None and now >= self._retry_at
        return not (self.pending or self.has_changed or due)

    def probe(self, group: Sequence[Agent], now: float) -> list[Effect]:
        """Probe pairs of the waiting and training agents; then none is `pending`."""
        if self._awaited and now - self._sent_at < ANSWER_S:
            return []
        self.pending -= self._probed
        self._probed, self._awaited, self.has_changed = set(), {}, False
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            for agent, others in self._cut.items():
                self._tried[agent] -= others
                self.pending |= {agent, *others} if others else set()
        plan = self._plan(group) if self.pending.intersection(group) else {}
        if plan:
            self._number += 1
            self._sent_at, self._awaited, self._probed = now, plan, set(group)
            ports = {a: {b.task: self._endpoints[b] for b in peers} for a, peers in plan.items()}
            return [Send((agent,), Probe(self._number, of)) for agent, of in ports.items()]
        self.pending.difference_update(group)
        if not any(self._cut.values()):
            self._retry_at, self._retry_s = None, RETRY_S
        elif self._retry_at is None:
            self._retry_at = now + self._retry_s
            self._retry_s = min(_LONGEST_RETRY_S, 2 * self._retry_s)
        return []

    def _plan(self, group: Sequence[Agent]) -> dict[Agent, Sequence[Agent]]:
        """Return the agents that each agent is to probe; mark them as probed."""
        known = sorted(
            (a for a in group if a in self._endpoints), key=lambda a: (a.slot, a.task, a.attempt)
        )
        plan: dict[Agent, Sequence[Agent]] = {}
        for index, agent in enumerate(known):
            others = known[:index] + known[index + 1 :]
            if len(known) > _ALL_PAIRS:
                steps = (2**k for k in range(len(known).bit_length()))
                near = (known[(index + s * d) % len(known)] for s in steps for d in (1, -1))
                others = [other for other in dict.fromkeys(near) if other != agent]
            tried = self._tried[agent]
            if peers := [other for other in others if other not in tried]:
                plan[agent] = peers
                tried.update(peers)
        return plan

    # ---- results ------------------------------------------------------------------------

    def cuts(self, group: Collection[Agent]) -> dict[Agent, set[Agent]]:
        """Return the agents of a group that do not reach all others, each with those."""
        graph: dict[Agent, set[Agent]] = {}
        inside = set(group)
        for agent, others in self._cut.items():
            for other in others & inside if agent in inside else ():
                graph.setdefault(agent, set()).add(other)
                graph.setdefault(other, set()).add(agent)
        return graph

    def left_out(
        self, group: Collection[Agent], prefer: Callable[[Agent], Any]
    ) -> tuple[Agent, ...]:
        """Return the smallest set without which all agents of a group reach each other.

        ``prefer`` sorts agents: the first ones are rather left out.
        """
        graph = self.cuts(group)
        return tuple(sorted(smallest_cover(graph, sorted(graph, key=prefer)), key=prefer))


def left_out_note(left: Sequence[Agent], graph: Graph) -> Note:
    """Return the event of a change of the agents that are left out; none: all take part again."""
    pairs = [
        f"{agent.host} - {other.host}"
        for agent in left
        for other in sorted(graph.get(agent, ()), key=lambda a: a.slot)
    ]
    fields = {"tasks": [a.task for a in left[:20]], "hosts": hosts_of(left)}
    return Note("left_out", {**fields, "cut": pairs[:_MAX_NAMED], "pairs": len(pairs)})


class _OutOfStepsError(Exception):
    """The exact search takes too long."""


def smallest_cover(graph: Graph, order: Sequence[Agent]) -> set[Agent]:
    """Return a smallest set of agents that contains one of each pair.

    The graph is symmetric: agents, each with those that it is not connected to. Of several sets,
    one with agents early in ``order``, which has all of them, is preferred.
    """
    ranks = {agent: rank for rank, agent in enumerate(order)}
    budget = [_STEPS]
    try:
        for size in range(len(graph) + 1):
            found = _cover({a: set(graph[a]) for a in order}, size, ranks, budget)
            if found is not None:
                return found
    except _OutOfStepsError:
        pass
    return _greedy_cover({a: set(graph[a]) for a in order}, ranks)


def _most_cut(graph: Mapping[Agent, set[Agent]], ranks: Mapping[Agent, int]) -> Agent:
    return min(graph, key=lambda a: (-len(graph[a]), ranks[a]))


def _without(graph: Mapping[Agent, set[Agent]], gone: Collection[Agent]) -> dict[Agent, set[Agent]]:
    left = {a: others.difference(gone) for a, others in graph.items() if a not in gone}
    return {agent: others for agent, others in left.items() if others}


def _cover(
    graph: dict[Agent, set[Agent]], size: int, ranks: Mapping[Agent, int], budget: list[int]
) -> set[Agent] | None:
    """Return a cover of at most this size; None if there is none (a bounded search tree)."""
    if not graph:
        return set()
    budget[0] -= 1
    if budget[0] < 0:
        raise _OutOfStepsError
    worst = _most_cut(graph, ranks)
    if sum(map(len, graph.values())) > 2 * size * len(graph[worst]):
        return None  # each agent touches too few of the pairs
    others = graph[worst]
    for chosen in ({worst}, others):  # one of them is in each cover
        if len(chosen) <= size:
            found = _cover(_without(graph, chosen), size - len(chosen), ranks, budget)
            if found is not None:
                return found | chosen
    return None


def _greedy_cover(graph: dict[Agent, set[Agent]], ranks: Mapping[Agent, int]) -> set[Agent]:
    cover: set[Agent] = set()
    while graph:
        worst = _most_cut(graph, ranks)
        cover.add(worst)
        graph = _without(graph, (worst,))
    return cover
