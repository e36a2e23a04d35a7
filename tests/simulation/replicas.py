"""Schedules of a run whose nodes are replicas (``ft=true``): each trains by itself.

The quorum of the replicas has a simulator of its own; here a node's workers depend on no others,
and no other node stops them. The invariants that differ:

Entries    Members change without a round where they depart; a round may have fewer than min nodes.
Rounds     Each member that is placed is a group of its own.
The end    It is a success only if the functions of all members have returned.
Survival   An agent is made to stop its workers only if they have failed, or if an entry has been
           made, since they were placed, that does not name it as a member.
Progress   In the calm all that live and reach each other become members, with their workers, and
           stay it; or one that is cut off for good leads, alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from hpc_elastic.rendezvous.effects import Announce, Append, Effect, Note, RoundInfo, places
from hpc_elastic.rendezvous.follower_state import FollowerState
from hpc_elastic.rendezvous.leader_state import LeaderState
from hpc_elastic.rendezvous.log_entry import Agent, LogEntry
from hpc_elastic.rendezvous.replica_state import Placement, ReplicaState
from hpc_elastic.rendezvous.round_state import RankAssignment
from simulation.cluster import AgentProcess, Components
from simulation.invariants import Monitor
from simulation.mutants import DutiesGoOn, exits_with_0
from simulation.scenario import Scenario
from simulation.simulator import Simulator

_Standing = tuple[tuple[Agent, int], ...]
"""Who is at work, and by which entry."""


def is_member(agent: Agent, entry: LogEntry) -> bool:
    """Return whether an entry names an agent as a member that is not lost."""
    return agent in entry.members and entry.lost.get(agent.task, -1) < agent.attempt


class ReplicaMonitor(Monitor):
    """Sees to what holds for replicas."""

    def told_to_stop_itself(self, agent: Agent, *, failed: bool) -> None:
        """An agent receives that it is to stop its workers, which have failed or not."""
        since = self._accepted[agent]
        left = any(
            not is_member(agent, entry)
            for number, entry in self._by_number.items()
            if number > since
        )
        self.check(failed or left, "a survivor is stopped", agent, since)

    def _has_returned(self, agent: Agent, entry: LogEntry) -> bool:
        """Each by the entry that has placed it; who is lost, or is to start again, need not have.

        A member that has gone stays in the entry until the next round.
        """
        placed_by = self._at_work.get(agent)
        needed = placed_by is not None and is_member(agent, entry)
        return not needed or self._returned.get(agent) == placed_by

    def _members(self, before: LogEntry, entry: LogEntry) -> None:
        fewer = set(entry.members) <= set(before.members)
        self.check(fewer, "members without a round", before, entry)

    def _round(self, entry: LogEntry) -> None:
        self.rounds += 1
        size, tasks = len(entry.members), {m.task for m in entry.members}
        self.check(len(tasks) == size, "a task twice in a round", entry)
        self.check(1 <= size <= self._rules.max_nodes, "a round's size", entry)

    def _ranks(self, agent: Agent, told: dict[str, Any], entry: LogEntry) -> None:
        self.check(agent in entry.members, "a place for an agent that is no member", agent)
        alone = (told["group_size"], told["first_rank"], told["world_size"])
        self.check(alone == (1, 0, agent.nproc), "a replica is not alone", agent, told)

    def _take_place(self, number: int, agent: Agent, rank: int) -> None:
        """Every replica has rank 0; that none is placed twice by an entry is seen already."""


class ReplicaProcess(AgentProcess):
    """One attempt of a task, whose workers are a replica."""

    def notice(self, left_s: float) -> None:
        """The node has to be left: the quorum lets it go soon."""
        super().notice(left_s)
        soon = min(1.0, 0.3 * left_s) * self.env.world.rng.random()
        self.env.world.after(soon, self.process, self.leave_now)

    def _handle_message(self, message: dict[str, Any]) -> None:
        if message["type"] == "stop" and self.work is not None:
            monitor = self.env.monitor
            assert isinstance(monitor, ReplicaMonitor)
            monitor.told_to_stop_itself(self.me, failed=self._has_failed)
        super()._handle_message(message)

    @property
    def at_work(self) -> bool:
        """Whether its workers train."""
        return self.work is not None and self.rank is not None and self._is_at(self.work)


class ReplicaSimulator(Simulator):
    """The world of one schedule of a run with ``ft=true``."""

    agent_type = ReplicaProcess
    alone = True
    _standing_members: _Standing = ()

    def draw(self) -> Scenario:
        """Draw the parameters of any schedule, without what is asked of the workers together."""
        scenario = super().draw()
        training = replace(scenario.training, asks=False, wants_every_s=None, announced_by="nobody")
        rules = replace(scenario.rules, ft=True, scale_up="immediate")
        return replace(scenario, training=training, rules=rules)

    def make_monitor(self) -> ReplicaMonitor:
        """Make what sees to the invariants."""
        return ReplicaMonitor(self.scenario, self.world)

    def _stands(self) -> bool:
        """Return whether all who can be members are at work, and have been for long enough."""
        isolated = self.env.network.isolated
        last = self.env.register.entries[-1] if self.env.register.entries else None
        alone = last is not None and last.leader.address == str(isolated)
        agents = [n.agent for n in self.env.nodes if n.lives and (n.slot == isolated) == alone]
        working = tuple(
            (a.me, a.work.entry.index)
            for a in agents
            if isinstance(a, ReplicaProcess) and a.at_work and a.work is not None
        )
        wanted = min(len(agents), self.scenario.rules.max_nodes)
        members = {a for a in last.members if is_member(a, last)} if last is not None else set()
        whole = len(working) == wanted and {me for me, _ in working} == members
        if not (working and whole) or working != self._standing_members:
            self._standing_members = working if whole else ()
            self._stands_since = self.world.now
            return False
        assert self._stands_since is not None
        if self.world.now - self._stands_since < self.scenario.confirm_s:
            return False
        self._stood_after[int(self._stands_since - self.scenario.calm_after_s)] += 1
        return True


REPLICAS = Components(following=partial(FollowerState, stays=True))
"""The product."""


def _with_rules(rules: type[ReplicaState]) -> Components:
    """Return the parts with a leader that goes by these rules."""

    class Leader(LeaderState):
        replica_rules = rules

    return replace(REPLICAS, leadership=Leader)


class _CountsByTheLastRound(ReplicaState):
    """Goes by the last round's entry for everybody's reports."""

    _last = 0

    def is_current(self, agent: Agent, message: dict[str, Any]) -> bool:
        return bool(message.get("index") == self._last)

    def _place(self, placed: tuple[Agent, ...]) -> list[Effect]:
        effects = super()._place(placed)
        self._last = self.run.entry.index
        return effects


class _StopsThoseWhoAreHere(ReplicaState):
    """Takes an agent that is here under the next leader for a newcomer that has to start anew."""

    def reattached(self, agent: Agent, placement: Placement, now: float) -> list[Effect]:
        self.run.ranks = RankAssignment()
        return super().reattached(agent, placement, now)


class _DepartsWithoutEntry(ReplicaState):
    """Appends no entry when a member is lost."""

    def _remove_member(self, agent: Agent, now: float) -> list[Effect]:
        entry = self.run.entry
        effects = super()._remove_member(agent, now)
        self.run.entry = entry
        return [e for e in effects if not isinstance(e, (Append, Note))]


def _all_in_one_group(announce: Announce) -> Iterator[tuple[Agent, RoundInfo]]:
    together = places(replace(announce, alone=False))
    return ((agent, place) for agent, place in together if agent in announce.requests)


REPLICA_MUTANTS = {
    "stops at the leader's death": (
        replace(REPLICAS, following=FollowerState), "a survivor is stopped",
    ),
    "counts by the last round": (
        _with_rules(_CountsByTheLastRound), "no round stands|not all agents receive",
    ),
    "stops those who are here": (
        _with_rules(_StopsThoseWhoAreHere), "a survivor is stopped|no round",
    ),
    "departs without an entry": (
        _with_rules(_DepartsWithoutEntry),
        "a survivor is stopped|no round|before its function had returned|a notice was lost",
    ),
    "takes exit code 0 for success": (
        replace(REPLICAS, has_succeeded=exits_with_0),
        "before its function had returned|no round stands",
    ),
    "duties go on": (replace(REPLICAS, term=DutiesGoOn), "acts though its term is over"),
    "renames are not fenced": (
        replace(REPLICAS, fenced_files=False), "the status went back|a notice was lost",
    ),
    "places all in one group": (
        replace(REPLICAS, places=_all_in_one_group), "a replica is not alone",
    ),
}  # fmt: skip
"""Name -> the parts with the bug, and a pattern for the message of the simulator."""
