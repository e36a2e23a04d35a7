"""Rules of the rendezvous: events in, effects out. No clock, no socket, no file.

Theory of operation
-------------------
A run has one *leader*, and every agent (one a node) keeps one connection to it. `log_entry`
defines which agent leads and when a decision counts; `leader_state` decides which agents are
alive. This module has the leader's decisions about the group.

The run is in one of four phases:

FORMING    agents join; the next round has not closed yet
RUNNING    a round has closed: its members have ranks and their workers run
DISBANDED  there were fewer than min nodes for too long: all nodes are requeued
ENDED      the run has succeeded, failed or been closed

FORMING -> RUNNING  A round *closes* once

  1. at least ``min_nodes`` agents have joined,
  2. every member of the last round has joined again, or is lost, and
  3. max nodes have joined; or every task that Slurm calls RUNNING has joined; or, if Slurm does
     not answer, no agent has joined for ``last_call_s``.

A RUNNING task whose agent does not join, and a member that was stopped and does not join again,
delay the others for ``straggler_timeout_s`` at most (`Participants`). A task that Slurm calls ended
or queued is lost at once, if its agent's last message came before the query of Slurm.

FORMING -> DISBANDED  With fewer than ``min_nodes`` for too long, the run requeues all its nodes
(`task_recovery`); at once if other runs of the user hold the nodes that it waits for.

FORMING -> ENDED    More tasks have failed for good than the run can lose with ``min_nodes``.

RUNNING -> FORMING  The round *breaks* when a member is lost or leaves, when a worker fails, when a
member joins anew, or when the group changes: newcomers are admitted, or members have a preemption
notice (`group_change`). All other members stop their workers and join again. The leader *releases*
members with a notice: it does not wait for them. That is a decision in the log, so that it holds
under the next leader too, which may be needed at once: the leader's own node may be one of those
that leave. `failure_policy` decides what a broken round costs.

The leader requeues nodes that it has no use for, and a node that is to blame for failures. It
queries Slurm about a lost task until that is back: it restarts a task that was requeued with two
minutes of delay, or not at all (`task_recovery`).

RUNNING -> ENDED    All members are done, no restarts are left, or a member closes the run.

`RunState` has the state of a run in any phase, and the rules of FORMING; `RoundState` has those of
RUNNING. With ``ft=true``, `replica_state` has them, over the same `RunState`.

Each event costs constant time, except for those that occur once a round: a group of ten thousand
forms in ten thousand small steps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import chain, islice, takewhile
from typing import Any, Literal

from hpc_elastic.rendezvous import messages, task_recovery
from hpc_elastic.rendezvous.effects import (
    Announce,
    Append,
    ClearHolds,
    Effect,
    Exclude,
    Note,
    PublishResult,
    Send,
    hosts_of,
)
from hpc_elastic.rendezvous.failure_policy import FailurePolicy
from hpc_elastic.rendezvous.group_change import (
    HELD_S,
    GroupChange,
    GrowthLimit,
    JoinCandidates,
    ProgressEstimator,
)
from hpc_elastic.rendezvous.log_entry import Agent, Failure, LogEntry, RoundRules, RunEnding
from hpc_elastic.rendezvous.reachability import Reachability, left_out_note
from hpc_elastic.rendezvous.task_recovery import LostTaskRecovery, RequeueBackoff, last_here
from hpc_elastic.run.events import LossReason
from hpc_elastic.slurm.job_state import Phase, TaskState
from hpc_elastic.step_agreement import StepVote
from hpc_elastic.transport.messages import Json


class RoundPhase(Enum):
    """The phase of a run; see the module."""

    FORMING = "forming"
    RUNNING = "running"
    DISBANDED = "disbanded"
    ENDED = "ended"


@dataclass
class Participants:
    """The run's agents and tasks, except the members of the running round.

    A member of a broken round is *pending* until it has joined again or is lost. A task that Slurm
    calls RUNNING and that has not joined is *expected*, unless it is the attempt that was lost:
    Slurm detects a dead node late. An attempt that has joined replaces the earlier ones of its
    task.

    Times are monotonic seconds of the leader.
    """

    joined: dict[Agent, float] = field(default_factory=dict)
    """Agents that wait for a round, in the order in which they joined."""
    requests: dict[Agent, messages.Join] = field(default_factory=dict)
    """The last request for a place of the last agent of each task."""
    pending_rejoin: set[Agent] = field(default_factory=set)
    """Members of the broken round that have not joined again and are not lost."""
    lost: dict[str, int] = field(default_factory=dict)  # task -> attempt that was lost, or released
    task_states: Mapping[str, TaskState] | None = None
    """Slurm's last answer in this forming; None: there is none."""
    expected_tasks: set[str] = field(default_factory=set)
    """Tasks that Slurm calls RUNNING, that have not joined and were not lost."""
    _last_join: dict[Agent, float] = field(default_factory=dict)  # of the last agent of each task
    _by_task: dict[str, Agent] = field(default_factory=dict)

    def add(self, agent: Agent, ranks: RankAssignment, now: float) -> None:
        """Add an agent that has joined: a member, perhaps, or another attempt of its task."""
        for other in (self._by_task.get(agent.task), ranks.attempt_of(agent.task)):
            if other is not None and other != agent:
                self.pending_rejoin.discard(other)
                for by_agent in (self.joined, self.requests, self._last_join):
                    by_agent.pop(other, None)
        self._by_task[agent.task] = agent
        self.joined.pop(agent, None)  # to come last in order
        self.joined[agent] = self._last_join[agent] = now
        self.lost.pop(agent.task, None)
        self.expected_tasks.discard(agent.task)
        self.pending_rejoin.discard(agent)

    def remove(self, agents: Iterable[Agent]) -> None:
        """Remove agents that have got a place, or go back to the queue."""
        for agent in agents:
            self.joined.pop(agent, None)

    def mark_lost(self, agent: Agent) -> None:
        """Note that an agent is lost or released."""
        self.joined.pop(agent, None)
        self.lost[agent.task] = max(agent.attempt, self.lost.get(agent.task, agent.attempt))
        self.expected_tasks.discard(agent.task)

    def is_lost(self, agent: Agent) -> bool:
        """Return whether an agent was lost, and has not come again."""
        return self.lost.get(agent.task, -1) >= agent.attempt

    def expect(self, members: Iterable[Agent]) -> None:
        """Expect the members of a broken round to join again, unless they were lost."""
        self.pending_rejoin = {a for a in members if not self.is_lost(a)}
        self.task_states = None
        self.expected_tasks.clear()

    def update_task_states(self, states: Mapping[str, TaskState] | None) -> None:
        """Take in Slurm's answer; None: there was none."""
        self.task_states = states
        self.expected_tasks = {
            task
            for task, state in (states or {}).items()
            if state.phase is Phase.RUNNING
            and not task_recovery.is_lost(state, self.lost.get(task))
            and self._by_task.get(task) not in self.joined
        }

    def ended_agents(self, members: Iterable[Agent], asked_at: float) -> Iterator[Agent]:
        """Yield joined agents and members whose tasks had ended when Slurm was queried.

        An agent that has joined after the query may be a later attempt than the one in the answer.
        """
        for agent in dict.fromkeys((*self.joined, *sorted(members, key=lambda a: a.slot))):
            state = (self.task_states or {}).get(agent.task)
            earlier = self._last_join.get(agent, 0.0) < asked_at
            if earlier and state is not None and task_recovery.has_ended(agent, state):
                yield agent

    def missing(self, min_nodes: int) -> list[str]:
        """Return the tasks that a round waits for; below min nodes, all that are queued."""
        missing = {a.task for a in self.pending_rejoin} | self.expected_tasks
        if len(self.joined) < min_nodes:
            here = {a.task for a in self.joined}
            states = (self.task_states or {}).items()
            missing |= {t for t, s in states if t not in here and s.phase is not Phase.ENDED}
        return sorted(missing)


class RankAssignment:
    """Ranks of the members of a round; looked up in constant time.

    A group has whole *units* of ``unit_nodes`` nodes, with consecutive ranks. Ranks are stable: the
    members of a unit that goes on keep their order. A unit that has lost nodes is completed, by
    nodes below the same switch if there are any. New units follow, each of nodes that are near each
    other. The nodes that remain are *spares*: they wait for a place.
    """

    def __init__(self, members: tuple[Agent, ...] = ()) -> None:
        self.members = members  # in rank order
        self._ranks = {agent: rank for rank, agent in enumerate(members)}
        self._by_task = {agent.task: agent for agent in members}

    def __contains__(self, agent: Agent) -> bool:
        return agent in self._ranks

    def unit_of(self, agent: Agent, size: int) -> tuple[Agent, ...]:
        """Return the members of a member's unit, in rank order."""
        first = self._ranks[agent] // size * size
        return self.members[first : first + size]

    def attempt_of(self, task: str) -> Agent | None:
        """Return the member that is an attempt of a task; None if there is none."""
        return self._by_task.get(task)

    def next(self, candidates: Collection[Agent], rules: RoundRules) -> RankAssignment:
        """Return the next round's."""
        size = rules.unit_nodes
        num_units = rules.usable_nodes(len(candidates)) // size
        here = set(candidates)
        units = [[a for a in unit if a in here] for unit in units_of(self.members, size)]
        fullest = sorted(range(len(units)), key=lambda i: -len(units[i]))[:num_units]
        here.difference_update(*(units[i] for i in fullest))
        free = sorted(here, key=lambda a: (a.slot, a.task))
        for i in fullest:
            while 0 < len(units[i]) < size:
                nearest = max(free, key=partial(num_switches_shared, units[i][0]))
                free.remove(nearest)
                units[i].append(nearest)
        kept = [units[i] for i in sorted(fullest)]
        members = chain(*kept, *nearest_units(free, size))
        return RankAssignment(tuple(islice(members, num_units * size)))


def units_of(members: tuple[Agent, ...], size: int) -> list[tuple[Agent, ...]]:
    """Return the members in rank order, unit by unit."""
    return [members[i : i + size] for i in range(0, len(members), size)]


def nearest_units(agents: Iterable[Agent], size: int) -> list[tuple[Agent, ...]]:
    """Return as many whole units of agents as possible, each below as few switches as possible."""
    levels = {agent: agent.switches.split(".") for agent in agents}
    units: list[tuple[Agent, ...]] = []
    for level in range(max(map(len, levels.values()), default=0), -1, -1):
        below: dict[tuple[str, ...], list[Agent]] = {}
        for agent, switches in levels.items():
            below.setdefault(tuple(switches[:level]), []).append(agent)
        for near in below.values():
            whole = units_of(tuple(near[: len(near) - len(near) % size]), size)
            units += whole
            for agent in chain(*whole):
                del levels[agent]
    return units


def num_switches_shared(agent: Agent, other: Agent) -> int:
    """Return below how many of the same switches two nodes are."""
    pairs = zip(agent.switches.split("."), other.switches.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class RunState:
    """The state of a run, and the rules that replicas and other nodes have in common.

    It continues from a log entry. Times are monotonic seconds of one clock.
    """

    def __init__(self, entry: LogEntry, rules: RoundRules, now: float, rng: random.Random) -> None:
        self.rules = rules
        self.entry = entry  # that of the last decision, which may not be appended yet
        self.phase = RoundPhase.FORMING if entry.ending is None else RoundPhase.ENDED
        self.ranks = RankAssignment(entry.members)
        self.participants = Participants(lost=dict(entry.lost))
        self.participants.expect(entry.members)
        self.policy = FailurePolicy.resume(entry, rules)
        self.backoff = RequeueBackoff(rules, rng, entry.times_requeued, dict(entry.requeued))
        self.recovery = LostTaskRecovery(
            dict(entry.possibly_alive), rules.max_requeues, has_trained=entry.round > 0
        )
        self.estimator = ProgressEstimator(entry.step_times)
        self.growth = GrowthLimit(rules)
        self.reach = Reachability()
        self.left_out: tuple[Agent, ...] = ()  # they do not reach all others (`reachability`)
        self.done: set[Agent] = set()  # members whose workers have all returned
        self._oldest = math.inf  # since when one of the agents waits; not after any of those here
        self.not_before = 0.0  # no round may close before this time (`leader_state`)
        self.short_since: float | None = None  # since when fewer than min nodes train, if they do
        self._booting_at = 0.0
        """When nodes enough for min nodes were last booting; Slurm ends that by ResumeTimeout."""
        self.forming_since = now  # when the round was broken that is formed anew
        self._unix_offset = entry.claimed - now

    # ---- decisions ----------------------------------------------------------------------

    def decide(self, *, needs_store: bool = False, **changes: Any) -> Append:
        """Return the append of the next entry: this state, and these changes."""
        self.entry = replace(
            self.entry, index=self.entry.index + 1, lost=dict(self.participants.lost),
            possibly_alive=dict(self.recovery.possibly_alive), requeued=dict(self.backoff.requeued),
            counters=self.policy.counters(), step_times=dict(self.estimator.step_times), **changes,
        )  # fmt: skip
        return Append(self.entry, needs_store)

    def announce(
        self, placed: Iterable[Agent], replicas: Mapping[int, Sequence[Agent]] | None = None
    ) -> list[Effect]:
        """Decide on a round with the present ranks; send the members ``placed`` their places in it.

        ``replicas`` are those that they form, by number; None if all are one group.
        """
        members = self.ranks.members
        append = self.decide(
            needs_store=replicas is None, round=self.entry.round + 1, members=members,
            restarts=self.policy.restarts, times_requeued=self.backoff.times_requeued,
        )  # fmt: skip
        requests = {agent: self.participants.requests[agent] for agent in placed}
        fields: dict[str, object] = {
            "number": self.entry.round, "index": self.entry.index, "term": self.entry.term,
            "nodes": len(members), "world_size": sum(m.nproc for m in members),
            "members": [vars(m) for m in members], "restarts": self.entry.restarts,
        }  # fmt: skip
        if replicas is not None:
            fields["placed"] = [agent.task for agent in requests]
        return [append, Announce(self.entry, requests, replicas), Note("round", fields)]

    def end_run(self, ending: RunEnding) -> list[Effect]:
        """Decide that the run is over; send all agents how it ended."""
        self.phase = RoundPhase.ENDED
        return [
            self.decide(ending=ending),
            PublishResult(self.entry),
            Send(None, messages.End.of(ending)),
        ]

    def close(self) -> list[Effect]:
        """End the run (torch's ``set_closed`` and ``shutdown``)."""
        return [] if self.phase is RoundPhase.ENDED else self.end_run(RunEnding("closed"))

    # ---- agents -------------------------------------------------------------------------

    def refuse(self, agent: Agent) -> list[Effect] | None:
        """Refuse an agent that requests a place; None: it may have one."""
        if self.phase is RoundPhase.ENDED:
            return []  # the message about the end goes to all agents
        if self.phase is RoundPhase.DISBANDED:
            return self.backoff.requeue((agent,), self.backoff.last_delay_s)
        if agent.host in self.policy.excluded:
            until = self.policy.exclusions[agent.host]
            excluded = Exclude((agent.host,), "excluded before", until)
            return [excluded, *self.backoff.requeue_faulty((agent,))]
        return None

    def add(self, agent: Agent, now: float, request: messages.Join) -> list[Effect]:
        """Add an agent that requests a place."""
        went_on = agent in self.participants.pending_rejoin and not self.participants.is_lost(agent)
        self.participants.add(agent, self.ranks, now)
        self.participants.requests[agent] = request
        self._oldest = min(self._oldest, self._waits_since(agent))
        self.recovery.on_join(agent)
        self.backoff.requeued.pop(agent.task, None)
        if went_on:  # the event of the round is that of all its members
            return []
        return [Note("joined", {"task": agent.task, "host": agent.host})]

    def judge_loss(self, agent: Agent) -> tuple[list[Effect], RunEnding | None]:
        """Judge the last loss of the task of an agent that requests a place."""
        if self.phase in (RoundPhase.ENDED, RoundPhase.DISBANDED):
            return [], None
        last = self.participants.lost.get(agent.task, agent.attempt)
        return self.policy.judge_loss(agent, last, lambda: self.hosts)

    def lose(self, agent: Agent, why: str, *, announced: bool = False) -> list[Effect]:
        """Note that an agent was lost, or has left on its own."""
        is_requeued = self.backoff.requeued.get(agent.task, -1) >= agent.attempt
        if not (announced or is_requeued) and self.is_at_work(agent):
            members = len(self.ranks.members)
            self.policy.record_loss(agent, why, self.entry.round, members)
        self.participants.mark_lost(agent)
        self.reach.remove(agent)
        return [Note("node_lost", {"task": agent.task, "host": agent.host, "why": why})]

    def note_silence(self, agent: Agent) -> None:
        """Note that an agent has timed out while its connection was open."""
        if self.is_at_work(agent):
            self.policy.record_silence(agent.host)
        self.recovery.possibly_alive[agent.task] = agent.host

    def is_member(self, agent: Agent) -> bool:
        """Return whether an agent is a member of the round that runs."""
        return self.phase is RoundPhase.RUNNING and agent in self.ranks

    def is_at_work(self, agent: Agent) -> bool:
        """Return whether an agent is a member of the round that runs, or that was just broken."""
        is_forming = self.phase is RoundPhase.FORMING
        return self.is_member(agent) or (is_forming and agent in self.participants.pending_rejoin)

    def progressed(self, agent: Agent, progress: Json, now: float) -> None:
        """Take in the progress in a heartbeat; a step of a replica is as good as a checkpoint."""
        step = progress.get("step")
        if agent in self.ranks and step is not None:
            self.policy.record_step(int(step))
        if self.ranks.members and agent == self.ranks.members[0]:
            self.estimator.record_step(step, progress.get("total"), now)
        if self.rules.ft and step is not None:
            self.policy.record_checkpoint(int(step))

    def add_grace(self, for_s: float, now: float) -> None:
        """Move all deadlines by the time that the leader was not running."""
        self.forming_since = min(now, self.forming_since + for_s)
        waits = self.participants.joined
        self.participants.joined = {a: min(now, since + for_s) for a, since in waits.items()}

    def pass_time(self, now: float) -> None:
        """Let strikes fade and exclusions end."""
        self.policy.advance(now + self._unix_offset)

    # ---- Slurm --------------------------------------------------------------------------

    def slurm_answered(
        self, states: Mapping[str, TaskState] | None, asked_at: float, now: float
    ) -> tuple[list[Effect], list[Agent]]:
        """Take in the states of the run's tasks; None: Slurm did not answer.

        Returns the effects, and the agents whose tasks have ended: the caller marks them lost.
        """
        self.participants.update_task_states(states)
        if self._is_booting:
            self._booting_at = now
        known, recovery = states or {}, self.recovery
        for task, attempt in self.participants.lost.items():
            if task in known and task_recovery.is_lost(known[task], attempt):
                self.policy.explain_loss(known[task])
        effects = self._judge_starts(known)
        running = self.phase is RoundPhase.RUNNING
        lost = {} if running and self.growth.holds else self.participants.lost
        due = recovery.tasks_to_restart(known, lost, self.backoff.requeued, now)
        if due:
            alive = {task: node for task, node in recovery.possibly_alive.items() if task in due}
            effects.append(ClearHolds(due, alive, recovery.failed_on(due)))
        members = self.ranks.members if running else self.participants.pending_rejoin
        ended = list(self.participants.ended_agents(members, asked_at))
        recovery.possibly_alive |= {agent.task: agent.host for agent in ended}
        return effects, ended

    def hopeless_ending(self) -> RunEnding | None:
        """Return how the run ends if min nodes cannot come together any more; None: they can."""
        running_short = self.phase is RoundPhase.RUNNING and self.short_since is not None
        if not (running_short or self.phase is RoundPhase.FORMING):
            return None
        states, recovery = self.participants.task_states or {}, self.recovery
        present = {a.task for a in self.participants.joined}
        present |= recovery.returning_tasks(states, self._last_here)
        why = task_recovery.min_nodes_unreachable(states, present, self.rules, recovery.tried_hosts)
        return None if why is None else RunEnding("failed", why)

    def waits_in_vain(self, why: str | None, now: float) -> bool:
        """Take in why the run cannot get min nodes at present; return whether to wait no longer."""
        counts = self.is_short and not self._is_booting
        return self.backoff.is_pointless(why if counts else None, now)

    def _judge_starts(self, states: Mapping[str, TaskState]) -> list[Effect]:
        """Judge the attempts that ended before they joined, according to Slurm."""
        agents = (*self.ranks.members, *self.participants.joined)
        here = {a.task: a.attempt for a in agents if not self.participants.is_lost(a)}
        starts = self.recovery.failed_starts(states, self._last_here, here)
        num_hosts = len({a.host for a in agents} - set(self.policy.excluded))
        return [e for s in starts for e in self.policy.start_failed(s, num_hosts)]

    @property
    def _last_here(self) -> dict[str, int]:
        return last_here(self.participants.lost, self.backoff.requeued)

    @property
    def wants_slurm(self) -> bool:
        """Whether the leader needs the states of the run's tasks at present."""
        if self.phase is RoundPhase.RUNNING:
            waits = bool(self.participants.joined) or self.short_since is not None
            return waits or self.awaits_tasks
        return self.phase is RoundPhase.FORMING

    @property
    def awaits_tasks(self) -> bool:
        """Whether some of the run's tasks have no agent yet and may start, or fail to."""
        num_here = len(self.ranks.members) + len(self.participants.joined)
        absent = num_here + self.recovery.num_over < self.rules.max_nodes
        return absent or self.recovery.are_awaited

    # ---- FORMING ------------------------------------------------------------------------

    def begin_forming(self, now: float) -> None:
        """The round is over: its members are to join again."""
        self.phase, self.forming_since, self.short_since = RoundPhase.FORMING, now, None
        self.participants.expect(self.ranks.members)
        self.reach.has_changed = True  # members have no precedence any more
        self.done.clear()

    def form(self, now: float) -> tuple[list[Effect], bool]:
        """Apply the rules of FORMING; return the effects, and whether a round is to close now."""
        if self.phase is not RoundPhase.FORMING:
            return [], False
        effects = self._give_up_on_pending(now)
        if self.participants.pending_rejoin:
            return effects, False
        if self.policy.is_due or self.left_out or self._may_close(now):
            effects += self.probe(now)
            if not self.reach.pending.isdisjoint(self.participants.joined):
                return effects, False
        if self.policy.is_due:
            if any(agent in self.ranks for agent in self.left_out):
                self.policy.not_counted = True
            effects += self._judge_round()
        if self.phase is RoundPhase.FORMING and self._may_close(now):
            return effects, True
        return [*effects, *(self.disband() if self.is_short_for_too_long(now) else [])], False

    def close_round(self, now: float) -> None:
        """Assign ranks to the agents that have joined."""
        candidates = list(self.usable)
        if self.growth.max_nodes < self.rules.max_nodes:
            candidates.sort(key=lambda agent: agent not in self.ranks)
            num_former = sum(agent in self.ranks for agent in candidates)
            del candidates[max(self.growth.max_nodes, num_former) :]
        self.ranks = self.ranks.next(candidates, self.rules)
        self.participants.remove(self.ranks.members)
        self.phase = RoundPhase.RUNNING
        self.short_since = None
        self.backoff.times_requeued = 0
        self.policy.new_round()
        self.recovery.has_trained = True
        self.recovery.update_awaited(self.participants.lost)
        self.estimator.on_close(now, len(self.ranks.members))

    # ---- agents that do not reach each other ------------------------------------------------

    @property
    def usable(self) -> Mapping[Agent, float]:
        """The agents that wait, except those that are left out; see `Participants.joined`."""
        joined = self.participants.joined
        if not self.left_out:
            return joined
        return {agent: since for agent, since in joined.items() if agent not in self.left_out}

    @property
    def admissible(self) -> Mapping[Agent, float]:
        """The usable agents that are known to reach the members of the round that runs."""
        pending = self.reach.pending
        if not pending:
            return self.usable
        return {agent: since for agent, since in self.usable.items() if agent not in pending}

    def probe(self, now: float) -> list[Effect]:
        """Have agents probe their connections; once all are known, decide which are left out."""
        if self.reach.is_settled(now):
            return []
        members = self.ranks.members if self.phase is RoundPhase.RUNNING else ()
        group = tuple(dict.fromkeys((*members, *self.participants.joined)))
        effects = self.reach.probe(group, now)
        if not self.reach.pending.isdisjoint(group):
            return effects
        graph = self.reach.cuts(group)
        stay = members if self.short_since is None else ()  # others may make a group of min nodes
        away = self.reach.left_out(stay, self._rather_left_out)
        apart = [a for a in group if a not in stay and not graph.get(a, set()).isdisjoint(stay)]
        others = [a for a in group if a not in stay and a not in apart]
        left = (*away, *apart, *self.reach.left_out(others, self._rather_left_out))
        if set(left) != set(self.left_out):
            effects.append(left_out_note(left, graph))
        self.left_out = left
        return effects

    def _rather_left_out(self, agent: Agent) -> tuple[object, ...]:
        leads = agent.task == self.entry.leader.task
        return agent not in self.left_out, leads, agent in self.ranks, -agent.slot, agent.task

    def _give_up_on_pending(self, now: float) -> list[Effect]:
        if not self.participants.pending_rejoin or not self._timed_out(now):
            return []
        late = sorted(self.participants.pending_rejoin, key=lambda a: a.slot)
        self.participants.pending_rejoin.clear()
        self.policy.not_counted = True
        why = LossReason.NOT_REJOINED
        return [Note("node_lost", {"task": a.task, "host": a.host, "why": why}) for a in late]

    @property
    def hosts(self) -> set[str]:
        """Those of members and of nodes that wait."""
        return {a.host for a in (*self.ranks.members, *self.participants.joined)}

    def _judge_round(self) -> list[Effect]:
        effects, ending = self.policy.judge(self.entry.round, self.hosts)
        if ending is not None:
            return [*effects, *self.end_run(ending)]
        faulty = tuple(a for a in self.participants.joined if a.host in self.policy.excluded)
        for agent in faulty:
            self.participants.mark_lost(agent)
        return [*effects, *(self.backoff.requeue_faulty(faulty) if faulty else [])]

    def _may_close(self, now: float) -> bool:
        participants, rules = self.participants, self.rules
        if len(self.usable) < rules.min_nodes or now < self.not_before:
            return False
        if len(participants.joined) >= rules.max_nodes or self._timed_out(now):
            return True
        if participants.task_states is None:
            last = next(reversed(participants.joined.values()))
            return now - last >= rules.last_call_s
        return not participants.expected_tasks

    def _timed_out(self, now: float) -> bool:
        return now - self._waiting_since(now) >= self.rules.straggler_timeout_s

    def _waits_since(self, agent: Agent) -> float:
        request = self.participants.requests.get(agent)
        return self.participants.joined[agent] - (request.waited_s if request else 0.0)

    def _waiting_since(self, now: float) -> float:
        return max(self.forming_since, next(iter(self.participants.joined.values()), now))

    # ---- nodes that wait, and are requeued -------------------------------------------------

    def requeue_late(self, now: float, *, admits: bool = False) -> list[Effect]:
        """Requeue nodes that have waited for too long; at once if the run grows no further.

        Nodes that the group admits (``admits``) wait for a checkpoint, but until their agents would
        give up.
        """
        joined = list(self.participants.joined.items())
        spares = len(joined) % self.rules.unit_nodes  # the first place of a lost node is theirs
        unused = {agent: self._waits_since(agent) for agent, _ in joined[spares:]}
        if not self.growth.holds or admits or self.rules.below_min_timeout_s is None:
            is_over = partial(self.backoff.is_over, longest=admits)
            unused = {agent: since for agent, since in unused.items() if is_over(now - since)}
        late = tuple(agent for agent in unused if self.backoff.may_requeue([agent]))
        self.participants.remove(late)
        delay_s = HELD_S if self.growth.holds else None
        return self.backoff.requeue(late, delay_s) if late else []

    def weigh_growth(self, now: float) -> list[Effect]:
        """Hold the pending tasks if further nodes are worth too little, or let them start."""
        if self.phase is RoundPhase.RUNNING:
            nodes = len(self.ranks.members)
        elif self.phase is RoundPhase.FORMING and self.growth.holds:
            nodes = len(self.participants.joined) + len(self.participants.pending_rejoin)
        else:
            return []
        return self.growth.weigh(nodes, self.estimator.step_times, now)

    @property
    def is_short(self) -> bool:
        """Whether the nodes are fewer than min nodes, and may be requeued."""
        joined = self.participants.joined
        if self.rules.below_min_timeout_s is None:
            return False
        if self.phase is RoundPhase.RUNNING:
            nodes = (*self.ranks.members, *joined)
            return self.short_since is not None and self.backoff.may_requeue(nodes)
        waits = self.phase is RoundPhase.FORMING and not self.participants.pending_rejoin
        too_few = len(joined) > 0 and len(self.usable) < self.rules.min_nodes
        return waits and too_few and self.backoff.may_requeue(joined)

    def is_short_for_too_long(self, now: float) -> bool:
        """Whether the nodes have been fewer than min nodes for too long."""
        since = self._waiting_since(now) if self.short_since is None else self.short_since
        since, is_over = max(since, self._booting_at), self.backoff.is_over
        if is_over(now - self._oldest, longest=True):  # it may have left meanwhile
            self._oldest = min(map(self._waits_since, self.participants.joined), default=math.inf)
        waits = is_over(now - since) or is_over(now - self._oldest, longest=True)
        return waits and self.is_short

    @property
    def _is_booting(self) -> bool:
        """Whether min nodes will be here once the nodes are up that Slurm boots for the run."""
        states = (self.participants.task_states or {}).values()
        num_booting = sum(state.is_booting for state in states)
        members = self.ranks.members if self.phase is RoundPhase.RUNNING else ()
        return 0 < self.rules.min_nodes - len(members) - len(self.usable) <= num_booting

    def disband(self, why: str = "") -> list[Effect]:
        """Decide to requeue all nodes."""
        changes: dict[str, Any] = {}
        if self.phase is RoundPhase.RUNNING:
            self.participants.joined |= dict.fromkeys(self.ranks.members, 0.0)
        if self.rules.ft:
            self.ranks, changes = RankAssignment(), {"members": ()}
        self.phase = RoundPhase.DISBANDED
        effects = self.backoff.requeue_all(tuple(self.participants.joined), why)
        return [self.decide(times_requeued=self.backoff.times_requeued, **changes), *effects]


StopCause = Literal["regroup", "node_lost", "failed", "agent_restarted", "at_max_nodes", "cut_off"]
"""Why a round was stopped, for the event log."""


def stop(
    agents: tuple[Agent, ...], reason: str, cause: StopCause, round_: int, step: int | None = None
) -> list[Effect]:
    """Let agents stop their workers and join again.

    All of them have announced the checkpoint of ``step``; None: they stop without one.
    """
    at = {} if step is None else {"step": step}
    fields = {"reason": reason, "cause": cause, "round": round_, **at}
    note = Note("round_stopped", {**fields, "nodes": len(agents), "hosts": hosts_of(agents)})
    return [note, Send(agents, messages.Stop(reason))]


class RoundState:
    """Rules of a run whose nodes train as one group. Events return effects, in order."""

    waits_when_cut_off = False
    """Whether members that time out are lost only once the leader is known not to be cut off."""

    def __init__(self, entry: LogEntry, rules: RoundRules, now: float, rng: random.Random) -> None:
        self.run = RunState(entry, rules, now, rng)
        self.change = GroupChange(rules)
        self._index = entry.index  # index of the entry that closed the last round of this term

    # ---- events -------------------------------------------------------------------------

    def is_current(self, agent: Agent, report: messages.MemberReport) -> bool:
        """Return whether a report is about the last round."""
        return report.index == self._index

    def received(self, agent: Agent, message: messages.RunMessage, now: float) -> list[Effect]:
        """Take in a message of an agent; see `messages`."""
        match message:
            case messages.Notice(reason, left_s):
                return self.noticed(agent, reason, left_s, now)
            case messages.MemberReport() if not self.is_current(agent, message):
                return []
            case messages.CheckpointWanted():
                return self.wants_checkpoint(agent, now)
            case messages.Vote():
                return self.voted(agent, message, now)
            case messages.Finished():
                return self.finished(agent, now)
            case messages.Failed():
                return self.worker_failed(message.failures, agent, now)
            case messages.CheckpointAnnounced():
                return self.checkpointed(agent, message.step, message.paused, now)
        return []

    def join(
        self,
        agent: Agent,
        now: float,
        request: messages.Join = messages.Join(1),  # noqa: B008 - immutable
    ) -> list[Effect]:
        """Take in an agent that is ready for the next round."""
        effects, ending = self.run.judge_loss(agent)
        if ending is not None:
            return [*effects, *self.run.end_run(ending)]
        refused = self.run.refuse(agent)
        if refused is not None:
            return [*effects, *refused]
        if self.run.is_member(agent):
            effects += self._break(now, f"{agent.host} joins anew", "agent_restarted")
        return [*effects, *self.run.add(agent, now, request), *self.tick(now)]

    def worker_failed(self, failures: Iterable[Failure], agent: Agent, now: float) -> list[Effect]:
        """Workers of a member failed; its other workers have been stopped."""
        if not self.run.is_at_work(agent):
            return []
        self.run.policy.failures += failures
        return [*self._break(now, f"a worker failed on {agent.host}", "failed"), *self.tick(now)]

    def finished(self, agent: Agent, now: float) -> list[Effect]:
        """All workers of a member have returned."""
        run = self.run
        if run.is_member(agent):
            run.done.add(agent)
            if len(run.done) == len(run.ranks.members):
                return run.end_run(RunEnding("succeeded"))
        return []

    def checkpointed(self, agent: Agent, step: int, paused: int, now: float) -> list[Effect]:
        """All workers of a member have announced a checkpoint; see `GroupChange.announced`."""
        if not self.run.is_member(agent):
            return []
        self.run.policy.record_checkpoint(step)
        self.change.announced(agent, step, paused, now)
        return self.tick(now)

    def noticed(self, agent: Agent, reason: str, left_s: float, now: float) -> list[Effect]:
        """A member has a preemption notice. An agent that is in no round just leaves."""
        if not self.run.is_member(agent):
            return []
        return [*self.change.noticed(agent, reason, left_s, now), *self.tick(now)]

    def wants_checkpoint(self, agent: Agent, now: float) -> list[Effect]:
        """A worker of a member requests a checkpoint of the whole group."""
        if not self.run.is_member(agent):
            return []
        self.change.want_checkpoint()
        return self.tick(now)

    def voted(self, agent: Agent, vote: StepVote, now: float) -> list[Effect]:
        """A member votes on a proposed step."""
        if self.run.phase is not RoundPhase.RUNNING:
            return []
        return [*self.change.voted(agent, vote, now), *self.tick(now)]

    def agent_lost(
        self, agent: Agent, why: str, now: float, *, announced: bool = False
    ) -> list[Effect]:
        """An agent was lost (its connection broke, or it timed out), or has left by itself."""
        run = self.run
        if run.phase in (RoundPhase.ENDED, RoundPhase.DISBANDED):
            return []
        announced = announced or agent in self.change.preempted
        effects = run.lose(agent, why, announced=announced)
        if run.is_at_work(agent):
            effects += self._break(now, f"{agent.host} is gone: {why}", "node_lost")
            run.policy.not_counted = True
        run.participants.pending_rejoin.discard(agent)
        return [*effects, *self.tick(now)]

    def slurm_answered(
        self, states: Mapping[str, TaskState] | None, asked_at: float, now: float
    ) -> list[Effect]:
        """Take in the states of the run's tasks; None: Slurm did not answer."""
        effects, ended = self.run.slurm_answered(states, asked_at, now)
        for agent in ended:
            effects += self.agent_lost(agent, LossReason.TASK_ENDED, now)
        ending = self.run.hopeless_ending()
        return [*effects, *(self.run.end_run(ending) if ending else []), *self.tick(now)]

    def sweep_answered(self, why: str | None, now: float) -> list[Effect]:
        """Take in why the run cannot get min nodes at present; None: it may get them."""
        return self.run.disband(why or "") if self.run.waits_in_vain(why, now) else []

    def tick(self, now: float) -> list[Effect]:
        """Apply the rules that depend on time."""
        self.run.pass_time(now)
        growth = self.run.weigh_growth(now)
        if self.run.phase is RoundPhase.RUNNING:
            return [*growth, *self._leave_out(now), *self._consider_change(now)]
        effects, closes = self.run.form(now)
        return [*growth, *effects, *(self._close_round(now) if closes else [])]

    # ---- rules --------------------------------------------------------------------------

    def _close_round(self, now: float) -> list[Effect]:
        self.run.close_round(now)
        members = self.run.ranks.members
        self.change.new_round(members)
        effects = self.run.announce(members)
        self._index = self.run.entry.index
        return effects

    def _leave_out(self, now: float) -> list[Effect]:
        """Break the round if members are known not to reach each other."""
        run = self.run
        effects = run.probe(now)
        away = [agent for agent in run.left_out if agent in run.ranks]
        if not away:
            return effects
        others = sorted(run.reach.cuts(run.ranks.members)[away[0]], key=lambda a: a.slot)
        why = f"{away[0].host} and {others[0].host} do not reach each other"
        return [*effects, *self._break(now, why, "cut_off")]

    def _consider_change(self, now: float) -> list[Effect]:
        run = self.run
        if run.phase is not RoundPhase.RUNNING:
            return []
        joined = run.admissible
        if not joined and self.change.is_quiet:
            return run.requeue_late(now) if run.participants.joined else []
        states = run.participants.task_states or {}
        waiting = JoinCandidates(joined, states, run.estimator.outlook, run.growth)
        finishing = bool(run.done)
        effects, admits, why, step = self.change.consider(waiting, now, finishing=finishing)
        if why is not None:
            return [*effects, *self._break(now, why, "regroup", step)]
        return [*effects, *run.requeue_late(now, admits=admits)]

    def _break(
        self, now: float, reason: str, cause: StopCause, step: int | None = None
    ) -> list[Effect]:
        run = self.run
        if run.phase is not RoundPhase.RUNNING:
            return []
        lost = run.participants.is_lost
        stopped = tuple(a for a in run.ranks.members if not lost(a))
        released = self._release()
        run.policy.not_counted = cause != "failed" or bool(released)
        if cause in ("failed", "node_lost"):
            run.reach.suspect(now)
        run.begin_forming(now)
        run.estimator.on_break(now, departs=cause != "regroup" or bool(self.change.preempted))
        self.change.end_round()
        round_ = run.entry.round
        return [*released, *(stop(stopped, reason, cause, round_, step) if stopped else [])]

    def _release(self) -> list[Effect]:
        """Decide not to wait for the members with a preemption notice."""
        participants = self.run.participants
        preempted = tuple(a for a in self.change.preempted if not participants.is_lost(a))
        if not preempted:
            return []
        for agent in preempted:
            participants.mark_lost(agent)
        return [self.run.decide(), Note("members_released", {"tasks": [a.task for a in preempted]})]
