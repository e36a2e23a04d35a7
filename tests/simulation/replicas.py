"""Schedules of a run whose nodes, or units of nodes, are replicas (``ft=true``).

The quorum of the replicas has a simulator of its own. Here a replica's workers depend on no others,
and no other node stops them. The invariants that differ:

Entries    A departure changes the members without a round; a round may have fewer than min nodes.
Rounds     Each unit of members is a group of its own.
The end    It is a success only if the functions of all members have returned.
Survival   A leader stops the workers of an agent only if workers of its replica have failed, or
           if an entry after their placement does not name all its nodes as members.
Progress   In the calm all live nodes that reach each other become and remain members, with their
           workers; or a node that is cut off for good leads, alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from hpc_elastic.rendezvous.effects import (
    Announce,
    Append,
    Effect,
    Note,
    Send,
    places,
)
from hpc_elastic.rendezvous.follower_state import FollowerState
from hpc_elastic.rendezvous.leader_state import LeaderState
from hpc_elastic.rendezvous.log_entry import Agent, LogEntry
from hpc_elastic.rendezvous.messages import (
    Join,
    MemberReport,
    Reattach,
    RoundInfo,
    RunMessage,
    Stop,
)
from hpc_elastic.rendezvous.replica_state import ReplicaState, departed_note
from hpc_elastic.rendezvous.round_state import RankAssignment, RunState, stop
from simulation.cluster import AgentProcess, Components, unit_with
from simulation.invariants import Monitor
from simulation.mutants import ContinuesDuties, exits_with_0
from simulation.scenario import Scenario, with_units
from simulation.simulator import Simulator
from simulation.world import World

_Standing = tuple[tuple[Agent, int], ...]
"""The agents at work, and the entries that placed them."""


def is_member(agent: Agent, entry: LogEntry) -> bool:
    """Return whether an entry names an agent as a member that is not lost."""
    return agent in entry.members and entry.lost.get(agent.task, -1) < agent.attempt


class ReplicaMonitor(Monitor):
    """Checks the invariants of replicas."""

    def __init__(self, scenario: Scenario, world: World) -> None:
        super().__init__(scenario, world)
        self._min_members = 1

    def appends(self, entry: LogEntry, run: RunState) -> None:
        """The workers of a replica outlive entries."""

    def agent_stopped(self, agent: Agent, *, broken: bool) -> None:
        """An agent receives a stop for its workers; ``broken``: they cannot train (any more)."""
        since = self._accepted[agent]
        unit = unit_with(agent, self._by_number[since].members, self._rules.unit_nodes)
        later = [entry for number, entry in self._by_number.items() if number > since]
        left = any(not is_member(a, entry) for a in unit for entry in later)
        self.check(broken or left, "a survivor is stopped", agent, since)

    def _has_returned(self, agent: Agent, entry: LogEntry) -> bool:
        """Return whether an agent has returned in the round of the entry that placed it.

        A member that is lost, or that starts again, need not have; it stays in the entry until
        the next round.
        """
        placed_by = self._at_work.get(agent)
        needed = placed_by is not None and is_member(agent, entry)
        return not needed or self._returned.get(agent) == placed_by

    def _check_members(self, before: LogEntry, entry: LogEntry) -> None:
        fewer = set(entry.members) <= set(before.members)
        self.check(fewer, "members without a round", before, entry)

    def _check_ranks(self, agent: Agent, place: RoundInfo, entry: LogEntry) -> None:
        unit = unit_with(agent, entry.members, self._rules.unit_nodes)
        before = unit[: unit.index(agent)]
        numbers = (place.group_size, place.first_rank, place.world_size)
        wanted = (len(unit), sum(a.nproc for a in before), sum(a.nproc for a in unit))
        self.check(numbers == wanted, "a replica is not alone", agent, place)


class ReplicaProcess(AgentProcess):
    """One attempt of a task, whose workers are a replica."""

    def notice(self, left_s: float) -> None:
        """Handle a notice: the quorum lets the node leave soon."""
        super().notice(left_s)
        soon = min(1.0, 0.3 * left_s) * self.env.world.rng.random()
        self.env.world.after(soon, self.process, self.leave_now)

    def _handle_message(self, message: RunMessage) -> None:
        if isinstance(message, Stop) and self.work is not None:
            monitor = self.env.monitor
            assert isinstance(monitor, ReplicaMonitor)
            broken = self._has_failed or self.work.over or not self.work.has_started
            monitor.agent_stopped(self.me, broken=broken)
        super()._handle_message(message)

    @property
    def at_work(self) -> bool:
        """Whether its workers train."""
        work = self.work
        return work is not None and self.rank is not None and self._is_at(work) and not work.over


class ReplicaSimulator(Simulator):
    """The world of one schedule of a run with ``ft=true``."""

    agent_type = ReplicaProcess
    monitor_type = ReplicaMonitor
    alone = True
    _standing_members: _Standing = ()

    def draw(self) -> Scenario:
        """Draw the parameters of a schedule, without requests to all workers together."""
        scenario = super().draw()
        training = replace(
            scenario.training, polls=False, request_every_s=None, announced_by="none"
        )
        rules = replace(scenario.rules, ft=True, scale_up="immediate")
        return replace(scenario, training=training, rules=rules)

    def _stands(self) -> bool:
        """Return whether all possible members have been at work for long enough."""
        isolated = self.env.network.isolated
        last = self.env.register.entries[-1] if self.env.register.entries else None
        alone = last is not None and last.leader.address == str(isolated)
        agents = [n.agent for n in self.env.nodes if n.lives and (n.slot == isolated) == alone]
        working = tuple(
            (a.me, a.work.entry.index)
            for a in agents
            if isinstance(a, ReplicaProcess) and a.at_work and a.work is not None
        )
        wanted = self.scenario.rules.usable_nodes(len(agents))
        members = {a for a in last.members if is_member(a, last)} if last is not None else set()
        complete = self.env.network.num_complete([a.me.slot for a in agents if a is not None])
        least = self.scenario.rules.usable_nodes(complete)  # here nothing shows a later cut to them
        whole = least <= len(working) <= wanted and {me for me, _ in working} == members
        if not (working and whole) or working != self._standing_members:
            self._standing_members = working if whole else ()
            self._stands_since = self.world.now
            return False
        assert self._stands_since is not None
        if self.world.now - self._stands_since < self.scenario.confirm_s:
            return False
        self._stood_after[int(self._stands_since - self.scenario.calm_after_s)] += 1
        return True


class ReplicaUnitSimulator(ReplicaSimulator):
    """The world of one schedule of a run whose replicas have several nodes."""

    def draw(self) -> Scenario:
        """Draw the parameters of a schedule."""
        return with_units(super().draw(), self.world.rng)


REPLICAS = Components(following=partial(FollowerState, stays=True))
"""The product."""


def _with_rules(rules: type[ReplicaState]) -> Components:
    """Return the components with a leader that follows these rules."""

    class Leader(LeaderState):
        replica_rules = rules

    return replace(REPLICAS, leader_state=Leader)


class _CountsByTheLastRound(ReplicaState):
    """Compares the reports of all members with the entry of the last round."""

    _last = 0

    def is_current(self, agent: Agent, report: MemberReport) -> bool:
        return report.index == self._last

    def _place(self, replicas: Mapping[int, Sequence[Agent]]) -> list[Effect]:
        effects = super()._place(replicas)
        self._last = self.run.entry.index
        return effects


class _StopsPresentMembers(ReplicaState):
    """Treats an agent that reattaches to the next leader as a new one that must restart."""

    def reattached(self, agent: Agent, place: Reattach, now: float) -> list[Effect]:
        self.run.ranks = RankAssignment()
        return super().reattached(agent, place, now)


class _DepartsWithoutEntry(ReplicaState):
    """Appends no entry when a member is lost."""

    def _dissolve_unit(self, agent: Agent, why: str, now: float) -> list[Effect]:
        entry = self.run.entry
        effects = super()._dissolve_unit(agent, why, now)
        self.run.entry = entry
        return [e for e in effects if not isinstance(e, (Append, Note))]


class _LeavesPartners(ReplicaState):
    """Lets the workers of a unit that has lost a node go on."""

    def _dissolve_unit(self, agent: Agent, why: str, now: float) -> list[Effect]:
        effects = super()._dissolve_unit(agent, why, now)
        return [e for e in effects if not (isinstance(e, Send) and isinstance(e.message, Stop))]


class _RestartsOneNode(ReplicaState):
    """Starts only the node again whose worker has failed."""

    def _stop_unit(self, agent: Agent, why: str) -> list[Effect]:
        return stop((agent,), why, "failed", self.run.entry.round)


class _KeepsInheritedPartners(ReplicaState):
    """Does not decide that the partner of a lost leader is no member."""

    def drop_losses(self) -> list[Effect]:
        return [departed_note(a, self.run.ranks.members) for a in self.inherited_losses]


class _OneNumberForAll(ReplicaState):
    """Gives a unit that was placed by an earlier leader the number 0."""

    def _numbered(self, units: Collection[tuple[Agent, ...]]) -> dict[int, tuple[Agent, ...]]:
        known = {unit: self.placed[unit[0]].replica for unit in units if unit[0] in self.placed}
        return {known.get(unit, 0): unit for unit in units}


def _all_in_one_group(announce: Announce) -> Iterator[tuple[Agent, RoundInfo]]:
    requests = {**dict.fromkeys(announce.entry.members, Join(0)), **announce.requests}
    together = places(replace(announce, requests=requests, replicas=None))
    return ((agent, place) for agent, place in together if agent in announce.requests)


REPLICA_MUTANTS = {
    "stops at the leader's death": (
        replace(REPLICAS, following=FollowerState), "a survivor is stopped",
    ),
    "counts by the last round": (
        _with_rules(_CountsByTheLastRound), "no round stands|not all agents receive",
    ),
    "stops the present members": (
        _with_rules(_StopsPresentMembers), "a survivor is stopped|no round",
    ),
    "departs without an entry": (
        _with_rules(_DepartsWithoutEntry),
        "a survivor is stopped|no round|before its function had returned|a notice was lost",
    ),
    "takes exit code 0 for success": (
        replace(REPLICAS, has_succeeded=exits_with_0),
        "before its function had returned|no round stands",
    ),
    "continues its duties": (
        replace(REPLICAS, term=ContinuesDuties), "acts though its term is over",
    ),
    "renames are not fenced": (
        replace(REPLICAS, fenced_files=False), "the status went back|a notice was lost",
    ),
    "places all in one group": (
        replace(REPLICAS, places=_all_in_one_group), "a replica is not alone",
    ),
}  # fmt: skip
"""Name -> the parts with the bug, and a pattern for the message of the simulator."""

UNIT_MUTANTS = {
    "leaves the partners of a lost node": (_with_rules(_LeavesPartners), "no round stands"),
    "restarts one node of a unit": (_with_rules(_RestartsOneNode), "no round stands"),
    "keeps inherited partners": (
        _with_rules(_KeepsInheritedPartners),
        "no round stands|before its function had returned",
    ),
    "one number for all": (_with_rules(_OneNumberForAll), "no round stands"),
}
"""The same, for replicas of several nodes."""
