"""The rules of the rendezvous: events in, actions out. No clock, no socket, no log.

Theory of operation
-------------------
A run has one *leader*, and every agent (one a node) keeps one connection to it. Who leads, and
what a leader's decisions are worth, is settled in `log_entry`; how a leader knows that somebody
lives, in `leader_state`. Which decisions it makes about the group stands here.

The run is in one of four phases:

FORMING    agents join; the next round has not closed yet
RUNNING    a round has closed: its members have ranks and their workers run
DISBANDED  there were too few for too long: every node goes back to the queue
ENDED      the run has succeeded, failed or been closed; whoever asks is told so

FORMING -> RUNNING  A round *closes* once

  1. at least ``min_nodes`` agents have joined,
  2. every member of the last round has joined again, or is gone, and
  3. max nodes have joined; or every task that Slurm calls RUNNING has joined; or, where
     Slurm does not say, nobody has joined for ``last_call_s``.

A task that Slurm calls RUNNING and that does not come, and a member that was told to stop and does
not come back, hold the others up for ``straggler_timeout_s`` at most. Who is waited for stands in
`round_state`. A task that Slurm calls ended or queued is gone at once, if its agent was last heard
of before Slurm was asked.

FORMING -> DISBANDED  With fewer than ``min_nodes`` for too long all nodes go back to the queue for
a while (`task_recovery`); at once where they wait in vain for nodes that other runs of the sweep
hold.

FORMING -> ENDED    So many tasks have failed for good that the others are fewer than min nodes.

RUNNING -> FORMING  The round *breaks* when a member is lost or leaves, when a worker fails, when a
member asks to join anew, or when the group is to change: newcomers are admitted, or nodes have to
be left (`group_change`). Everybody else in the round is told to stop its workers and to join again.
Members under notice are not: they are *released*. That they are not waited for is a decision, so
that it holds under the next leader too, who may be needed at once: the leader's own node may be
one of those that leave. What a broken round costs the run stands in `failure_policy`.

Nodes that wait and are not wanted go back to the queue, and so does a node that is to blame for
failures. Slurm is asked about a task that was lost until it is back: if it was requeued with two
minutes of delay, or not at all, it is brought back (`task_recovery`).

RUNNING -> ENDED    All members are done, or restarts have run out, or somebody closes it.

No event costs more than constant time, but for those that a round has once: a group of ten
thousand forms in ten thousand small steps.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from hpc_elastic.rendezvous import task_recovery
from hpc_elastic.rendezvous.effects import (
    Action,
    ClearHolds,
    EndRun,
    Exclude,
    Note,
    Release,
    StartRound,
    StopCause,
    StopRound,
)
from hpc_elastic.rendezvous.failure_policy import FailurePolicy
from hpc_elastic.rendezvous.group_change import Forecast, GroupChange, JoinCandidates
from hpc_elastic.rendezvous.log_entry import Agent, Failure, LogEntry, RoundRules
from hpc_elastic.rendezvous.step_agreement import StepVote
from hpc_elastic.rendezvous.task_recovery import LostTaskRecovery, RequeueBackoff, last_here
from hpc_elastic.slurm.job_state import Phase, TaskState


class RoundPhase(Enum):
    """Where the run stands."""

    FORMING = "forming"
    RUNNING = "running"
    DISBANDED = "disbanded"
    ENDED = "ended"


# ---- Who has come for the next round, who is still to come, and who is lost (pure)
# A member of a broken round is *unsettled* until it has joined again or is gone. A task that
# Slurm calls RUNNING and that has not joined is *awaited*, unless it is the attempt that was
# lost: Slurm learns of a dead node late. An attempt that has joined settles the earlier ones of
# its task.
#
# Times are monotonic seconds of the leader.


@dataclass
class Participants:
    """What is known of the run's agents and tasks, but for the members of a round that runs."""

    joined: dict[Agent, float] = field(default_factory=dict)
    """Agents that wait for a round, in the order in which they joined."""
    unsettled: set[Agent] = field(default_factory=set)
    """Members of the broken round that have neither joined again nor gone."""
    lost: dict[str, int] = field(default_factory=dict)
    """Task -> attempt that was lost, or let go."""
    view: Mapping[str, TaskState] | None = None
    """What Slurm said last in this forming; None: nothing, or it did not answer."""
    awaited: set[str] = field(default_factory=set)
    """Tasks that Slurm calls RUNNING, that have not joined and were not lost."""
    _last_join: dict[Agent, float] = field(default_factory=dict)
    _by_task: dict[str, Agent] = field(default_factory=dict)

    # ---- agents -------------------------------------------------------------------------

    def enter(self, agent: Agent, roster: RankAssignment, now: float) -> None:
        """An agent has joined; it may be a member, or another attempt of a member's task."""
        for other in (self._by_task.get(agent.task), roster.attempt_of(agent.task)):
            if other is not None and other != agent:
                self.joined.pop(other, None)
                self.unsettled.discard(other)
        self._by_task[agent.task] = agent
        self.joined.pop(agent, None)  # to come last in order
        self.joined[agent] = self._last_join[agent] = now
        self.lost.pop(agent.task, None)
        self.awaited.discard(agent.task)
        self.unsettled.discard(agent)

    def leave(self, agents: Iterable[Agent]) -> None:
        """Agents have got a place, or go back to the queue: they do not wait any more."""
        for agent in agents:
            self.joined.pop(agent, None)

    def lose(self, agent: Agent) -> None:
        """An agent is gone, or is let go."""
        self.joined.pop(agent, None)
        self.lost[agent.task] = max(agent.attempt, self.lost.get(agent.task, agent.attempt))
        self.awaited.discard(agent.task)

    def is_lost(self, agent: Agent) -> bool:
        """Tell whether an agent was lost, and has not come again."""
        return self.lost.get(agent.task, -1) >= agent.attempt

    def expect(self, members: Iterable[Agent]) -> None:
        """A round is broken: these are to join again, unless they were lost."""
        self.unsettled = {a for a in members if not self.is_lost(a)}
        self.view = None
        self.awaited.clear()

    def slept(self, for_s: float, now: float) -> None:
        """The leader was not running for so long: nobody is late because of that."""
        self.joined = {agent: min(now, since + for_s) for agent, since in self.joined.items()}

    @property
    def last_came(self) -> float:
        """When the last of those who wait has joined; there must be one."""
        return self.joined[next(reversed(self.joined))]

    # ---- Slurm's word -------------------------------------------------------------------

    def slurm_says(self, view: Mapping[str, TaskState] | None) -> None:
        """Slurm has answered; None: it has not."""
        self.view = view
        self.awaited = {
            task
            for task, state in (view or {}).items()
            if state.phase is Phase.RUNNING
            and not task_recovery.is_lost(state, self.lost.get(task))
            and self._by_task.get(task) not in self.joined
        }

    def ended(self, members: Iterable[Agent], asked_at: float) -> Iterator[Agent]:
        """Yield those who wait, and members, that Slurm knew to have ended when it was asked.

        One that was heard of after that may be another attempt than Slurm speaks of.
        """
        view = self.view or {}
        for agent in dict.fromkeys((*self.joined, *sorted(members, key=lambda a: a.slot))):
            earlier = self._last_join.get(agent, 0.0) < asked_at
            if earlier and agent.task in view and task_recovery.has_ended(agent, view[agent.task]):
                yield agent

    def missing(self, min_nodes: int) -> list[str]:
        """Name the tasks that a round waits for; below min nodes, all that are queued."""
        awaited = {a.task for a in self.unsettled} | self.awaited
        if len(self.joined) < min_nodes:
            here = {a.task for a in self.joined}
            view = (self.view or {}).items()
            awaited |= {t for t, s in view if t not in here and s.phase is not Phase.ENDED}
        return sorted(awaited)


# ---- The members of the last round, by rank and by task (pure)
# Ranks are stable: members of the last round keep their order; newcomers follow in the order of
# their slots.


class RankAssignment:
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

    def next(self, candidates: Iterable[Agent], max_nodes: int) -> RankAssignment:
        """Return the next round's."""
        newest = len(self._ranks)
        ranked = sorted(candidates, key=lambda a: (self._ranks.get(a, newest), a.slot, a.task))
        return RankAssignment(tuple(ranked[:max_nodes]))


@dataclass
class RoundState:
    """The leader's state. Each event method returns the actions to carry out, in order.

    Times are monotonic seconds of one clock, given by the caller.
    """

    rules: RoundRules
    patience: RequeueBackoff
    roster: RankAssignment = field(default_factory=RankAssignment)
    """Of the last round."""
    round: int = 0
    """Rounds closed so far, over all epochs."""
    phase: RoundPhase = RoundPhase.FORMING
    end: EndRun | None = None
    forming_since: float = 0.0
    not_before: float = 0.0
    """No round may close before this time (`leader_state`)."""
    muster: Participants = field(default_factory=Participants)
    done: set[Agent] = field(default_factory=set)
    outlook: Forecast = field(default_factory=Forecast)
    regroup: GroupChange = field(init=False)
    blame: FailurePolicy = field(init=False)
    comebacks: LostTaskRecovery = field(default_factory=LostTaskRecovery)
    _away_s: float = 0.0

    def __post_init__(self) -> None:
        self.regroup = GroupChange(self.rules)
        self.blame = FailurePolicy(self.rules)
        self.comebacks.max_requeues = self.rules.max_requeues

    @classmethod
    def resume(
        cls, record: LogEntry, rules: RoundRules, now: float, rng: random.Random
    ) -> RoundState:
        """Go on from where the leader before has left off: its members are to join again."""
        machine = cls(
            rules,
            RequeueBackoff(rules, rng, record.given_back, dict(record.away)),
            RankAssignment(record.members),
            round=record.round,
            forming_since=now,
            muster=Participants(lost=dict(record.lost)),
            comebacks=LostTaskRecovery(dict(record.unseen)),
        )
        machine.blame = FailurePolicy.resume(record, rules)
        machine.muster.expect(record.members)
        if record.ending is not None:
            machine.phase = RoundPhase.ENDED
            ending = record.ending
            machine.end = EndRun(ending.status, ending.failure, ending.victims)
        return machine

    # ---- events -------------------------------------------------------------------------

    def join(self, agent: Agent, now: float) -> list[Action]:
        """An agent is ready for the next round."""
        if self.end is not None:
            return [self.end]
        if self.phase is RoundPhase.DISBANDED:
            return [self.patience.send_after(agent, self._away_s)]
        if agent.host in self.blame.excluded:
            excluded = Exclude(self.blame.excluded, "excluded before")
            return [excluded, self.patience.send_bad((agent,))]
        actions: list[Action] = []
        if self.phase is RoundPhase.RUNNING and agent in self.roster:
            actions += self._break(now, f"{agent.host} joins anew", "agent_restarted")
        self.muster.enter(agent, self.roster, now)
        self.comebacks.joined(agent.task)
        self.patience.away.pop(agent.task, None)
        actions.append(Note("joined", {"task": agent.task, "host": agent.host}))
        return actions + self._advance(now)

    def worker_failed(self, failures: Iterable[Failure], agent: Agent, now: float) -> list[Action]:
        """Workers of a member failed; its other workers have been stopped."""
        if not self._is_at_work(agent):
            return []
        self.blame.failures += failures
        actions = self._break(now, f"a worker failed on {agent.host}", "failed")
        return actions + self._advance(now)

    def finished(self, agent: Agent, now: float) -> list[Action]:
        """All workers of a member have returned."""
        if self.phase is not RoundPhase.RUNNING or agent not in self.roster:
            return []
        self.done.add(agent)
        return self._end(EndRun("succeeded")) if len(self.done) == len(self.members) else []

    def boundary(self, agent: Agent, step: int, held: int, now: float) -> list[Action]:
        """All workers of a member have announced the checkpoint of ``step``.

        ``held`` is the number of the request to hold that some of them obey there, or 0.
        """
        if self.phase is not RoundPhase.RUNNING or agent not in self.roster:
            return []
        self.blame.announced(step)
        self.regroup.announced(agent, step, held, now)
        return self._advance(now)

    def noticed(self, agent: Agent, reason: str, left_s: float, now: float) -> list[Action]:
        """A member's node is to be left within so long. One that is in no round just leaves."""
        if self.phase is not RoundPhase.RUNNING or agent not in self.roster:
            return []
        return [*self.regroup.noticed(agent, reason, left_s, now), *self._advance(now)]

    def wants_checkpoint(self, agent: Agent, now: float) -> list[Action]:
        """A worker of a member asks for a checkpoint of the whole group."""
        if self.phase is not RoundPhase.RUNNING or agent not in self.roster:
            return []
        self.regroup.wants_checkpoint()
        return self._advance(now)

    def answered(self, agent: Agent, answer: StepVote, now: float) -> list[Action]:
        """A member answers a proposal."""
        if self.phase is not RoundPhase.RUNNING:
            return []
        return [*self.regroup.answered(agent, answer, now), *self._advance(now)]

    def gone(self, agent: Agent, why: str, now: float) -> list[Action]:
        """An agent was lost (its connection broke, it fell silent), or left on its own."""
        if self.phase in (RoundPhase.ENDED, RoundPhase.DISBANDED):
            return []
        self.muster.lose(agent)
        actions: list[Action] = [
            Note("node_lost", {"task": agent.task, "host": agent.host, "why": why})
        ]
        if self._is_at_work(agent):
            actions += self._break(now, f"{agent.host} is gone: {why}", "node_lost")
            self.blame.excused = True
        self.muster.unsettled.discard(agent)
        return actions + self._advance(now)

    def fell_silent(self, agent: Agent, why: str, now: float) -> list[Action]:
        """An agent is not heard any more, though nothing has ended its connection."""
        if self._is_at_work(agent):
            self.blame.fell_silent(agent.host)
        actions = self.gone(agent, why, now)
        self.comebacks.vanished(agent)
        return actions

    def slurm_says(
        self, view: Mapping[str, TaskState] | None, asked_at: float, now: float
    ) -> list[Action]:
        """Slurm answered how the tasks of the run are; None: it did not answer."""
        self.muster.slurm_says(view)
        actions = self._judge_starts(view or {})
        due = self.comebacks.due(view or {}, self.muster.lost, self.patience.away, now)
        unseen = {task: node for task, node in self.comebacks.unseen.items() if task in due}
        actions += [ClearHolds(due, unseen, self.comebacks.failed_on(due))] if due else []
        members = self.members if self.phase is RoundPhase.RUNNING else self.muster.unsettled
        for agent in list(self.muster.ended(members, asked_at)):
            actions += self.gone(agent, "the scheduler says that its task has ended", now)
            self.comebacks.vanished(agent)
        if self.phase is RoundPhase.FORMING and (why := self._hopeless(view or {})):
            return actions + self._end(EndRun("failed", why))
        return actions + self._advance(now)

    def sweep_says(self, why: str | None, now: float) -> list[Action]:
        """The queue shows that the run waits in vain for min nodes, and why; None: it may not."""
        if not self.patience.is_in_vain(why if self.is_short else None, now):
            return []
        return self._disband(why or "")

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        return self._advance(now)

    def slept(self, for_s: float, now: float) -> None:
        """The leader was not running for so long: nobody is late because of that."""
        self.forming_since = min(now, self.forming_since + for_s)
        self.muster.slept(for_s, now)

    def close(self) -> list[Action]:
        """Somebody closes the rendezvous for good (torch's ``set_closed`` and ``shutdown``)."""
        return [] if self.phase is RoundPhase.ENDED else self._end(EndRun("closed"))

    # ---- what others may ask ------------------------------------------------------------

    @property
    def wants_slurm(self) -> bool:
        """Whether an answer of Slurm could change anything now."""
        if self.phase is RoundPhase.RUNNING:
            return bool(self.joined) or self.awaits_tasks
        return self.phase is RoundPhase.FORMING

    @property
    def is_short(self) -> bool:
        """Whether nodes wait that are fewer than min nodes, and may be given back."""
        waits = self.phase is RoundPhase.FORMING and not self.muster.unsettled
        too_few = 0 < len(self.joined) < self.rules.min_nodes
        may_go = self.rules.below_min_timeout_s is not None and self.patience.would_return(
            self.joined
        )
        return waits and too_few and may_go

    @property
    def awaits_tasks(self) -> bool:
        """Whether some of the run's tasks are not here and may start, or fail to."""
        num_here = len(self.members) + len(self.joined)
        absent = num_here + self.comebacks.num_over < self.rules.max_nodes
        return absent or self.comebacks.are_awaited

    @property
    def members(self) -> tuple[Agent, ...]:
        """Members of the last round, in rank order."""
        return self.roster.members

    @property
    def restarts(self) -> int:
        """Restarts spent so far, over all epochs."""
        return self.blame.restarts

    @property
    def joined(self) -> dict[Agent, float]:
        """Agents that wait for a round, and since when, in the order in which they joined."""
        return self.muster.joined

    def not_given_back(self, tasks: Iterable[str]) -> tuple[str, ...]:
        """Return those tasks that the run has not sent away itself since they were lost."""
        lost, away = self.muster.lost, self.patience.away
        return tuple(t for t in tasks if away.get(t, -1) < lost.get(t, 0))

    def missing(self) -> list[str]:
        """Name the tasks that a forming round waits for; below min nodes, all that are queued."""
        return self.muster.missing(self.rules.min_nodes)

    # ---- rules: a round -----------------------------------------------------------------

    def _is_at_work(self, agent: Agent) -> bool:
        running = self.phase is RoundPhase.RUNNING and agent in self.roster
        return running or (self.phase is RoundPhase.FORMING and agent in self.muster.unsettled)

    def _break(
        self, now: float, reason: str, cause: StopCause, step: int | None = None
    ) -> list[Action]:
        if self.phase is not RoundPhase.RUNNING:
            return []
        self.phase = RoundPhase.FORMING
        self.forming_since = now
        stopped = tuple(a for a in self.members if not self.muster.is_lost(a))
        released = self._release()
        self.blame.broke(excused=cause != "failed" or bool(released))
        self.muster.expect(self.members)
        self.done.clear()
        self.regroup.broke()
        return [*released, *([StopRound(stopped, reason, cause, step)] if stopped else [])]

    def _release(self) -> list[Action]:
        """Wait no more for the members under notice."""
        leaving = tuple(a for a in self.regroup.departures if not self.muster.is_lost(a))
        for agent in leaving:
            self.muster.lose(agent)
        return [Release(leaving)] if leaving else []

    def _advance(self, now: float) -> list[Action]:
        if self.phase is RoundPhase.RUNNING:
            return self._consider(now)
        if self.phase is not RoundPhase.FORMING:
            return []
        actions = self._give_up_on_unsettled(now)
        if self.muster.unsettled:
            return actions
        if self.blame.is_due:
            actions += self._judge()
        if self.phase is RoundPhase.FORMING and self._may_close(now):
            actions += self._close_round()
        elif self.phase is RoundPhase.FORMING and self._too_few_for_too_long(now):
            actions += self._disband()
        return actions

    def _give_up_on_unsettled(self, now: float) -> list[Action]:
        if not self.muster.unsettled or not self._timed_out(now):
            return []
        late = sorted(self.muster.unsettled, key=lambda a: a.slot)
        self.muster.unsettled.clear()
        self.blame.excused = True
        return [
            Note("node_lost", {"task": a.task, "host": a.host, "why": "did not join again in time"})
            for a in late
        ]

    def _judge(self) -> list[Action]:
        hosts = {a.host for a in (*self.members, *self.joined)}
        actions = self.blame.judge(self.round, hosts)
        if actions and isinstance(actions[-1], EndRun):
            return [*actions[:-1], *self._end(actions[-1])]
        bad = tuple(a for a in self.joined if a.host in self.blame.excluded)
        for agent in bad:
            self.muster.lose(agent)
        return [*actions, *([self.patience.send_bad(bad)] if bad else [])]

    def _judge_starts(self, view: Mapping[str, TaskState]) -> list[Action]:
        """Judge the attempts that ended before they joined, as Slurm says."""
        agents = (*self.members, *self.joined)
        here = {a.task: a.attempt for a in agents if not self.muster.is_lost(a)}
        starts = self.comebacks.failed_starts(view, self._last_here, here)
        num_hosts = len({a.host for a in agents} - set(self.blame.excluded))
        return [action for s in starts for action in self.blame.start_failed(s, num_hosts)]

    @property
    def _last_here(self) -> dict[str, int]:
        return last_here(self.muster.lost, self.patience.away)

    def _may_close(self, now: float) -> bool:
        if len(self.joined) < self.rules.min_nodes or now < self.not_before:
            return False
        if len(self.joined) >= self.rules.max_nodes or self._timed_out(now):
            return True
        if self.muster.view is None:
            return now - self.muster.last_came >= self.rules.last_call_s
        return not self.muster.awaited

    def _timed_out(self, now: float) -> bool:
        return now - self._waiting_since(now) >= self.rules.straggler_timeout_s

    def _waiting_since(self, now: float) -> float:
        return max(self.forming_since, next(iter(self.joined.values()), now))

    def _close_round(self) -> list[Action]:
        self.roster = self.roster.next(self.joined, self.rules.max_nodes)
        self.muster.leave(self.members)
        self.round += 1
        self.phase = RoundPhase.RUNNING
        self.patience.given_back = 0
        self.regroup.new_round(self.members)
        self.blame.new_round()
        self.comebacks.look(self.muster.lost)
        return [StartRound(self.round, self.members, self.restarts)]

    def _hopeless(self, view: Mapping[str, TaskState]) -> Failure | None:
        present = {a.task for a in self.joined} | self.comebacks.returning(view, self._last_here)
        rules, tried = self.rules, self.comebacks.tried
        return task_recovery.hopeless(view, present, rules.min_nodes, rules.max_nodes, tried)

    # ---- rules: nodes that wait, leave, or are to come back --------------------------------

    def _consider(self, now: float) -> list[Action]:
        if not self.joined and self.regroup.is_quiet:
            return []
        waiting = JoinCandidates(self.joined, self.muster.view or {}, self.outlook)
        actions, admits, why, step = self.regroup.consider(waiting, now, finishing=bool(self.done))
        if why is not None:
            return actions + self._break(now, why, "regroup", step)
        return actions if admits else actions + self._send_back_parked(now)

    def _send_back_parked(self, now: float) -> list[Action]:
        late = self.patience.late(self.joined, now)
        self.muster.leave(late)
        return [self.patience.send_away(late)] if late else []

    def _too_few_for_too_long(self, now: float) -> bool:
        too_few = 0 < len(self.joined) < self.rules.min_nodes
        may_go = too_few and self.patience.would_return(self.joined)
        return may_go and self.patience.is_over(now - self._waiting_since(now))

    def _disband(self, why: str = "") -> list[Action]:
        self.phase = RoundPhase.DISBANDED
        given_back = self.patience.send_all(tuple(self.joined), why)
        self._away_s = given_back.delay_s
        return [given_back]

    # ---- the end ------------------------------------------------------------------------

    def _end(self, end: EndRun) -> list[Action]:
        self.phase = RoundPhase.ENDED
        self.end = end
        return [end]
