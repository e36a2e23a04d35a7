"""The rules of the rendezvous: events in, actions out. No clock, no socket, no log.

Theory of operation
-------------------
A run has one *leader*, and every agent (one a node) keeps one connection to it. Who leads, and
what a leader's decisions are worth, is settled in `record`; how a leader knows that somebody lives,
in `attendance`. Which decisions it makes about the group stands here.

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

A task that Slurm calls RUNNING and that does not come, and a member that was told to stop and
does not come back, hold the others up for ``start_timeout_s`` at most. Who is waited for stands in
`muster`. A task that Slurm calls ended or queued is gone at once, if its agent was last heard of
before Slurm was asked.

FORMING -> DISBANDED  With fewer than ``min_nodes`` for too long all nodes go back to the queue for
a while (`patience`); at once where they wait in vain for nodes that other runs of the sweep hold.

FORMING -> ENDED    So many tasks have failed for good that the others are fewer than min nodes.

RUNNING -> FORMING  The round *breaks* when a member is lost or leaves, when a worker fails, when a
member asks to join anew, or when the group is to change: newcomers are admitted, or nodes have to
be left (`regroup`). Everybody else in the round is told to stop its workers and to join again.
Members under notice are not: they are *released*. That they are not waited for is a decision, so
that it holds under the next leader too, who may be needed at once: the leader's own node may be
one of those that leave. What a broken round costs the run stands in `blame`.

Nodes that wait and are not wanted go back to the queue, and so does a node that is to blame for
failures. Slurm is asked about a task that was lost until it is back: if it was requeued with two
minutes of delay, or not at all, it is brought back (`comeback`).

RUNNING -> ENDED    All members are done, or restarts have run out, or somebody closes it.

No event costs more than constant time, but for those that a round has once: a group of ten
thousand forms in ten thousand small steps.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from hpc_elastic.rendezvous import slurms_word
from hpc_elastic.rendezvous.actions import (
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
from hpc_elastic.rendezvous.agreement import Answer
from hpc_elastic.rendezvous.blame import Blame
from hpc_elastic.rendezvous.comeback import Comebacks, last_here
from hpc_elastic.rendezvous.failures import Failure
from hpc_elastic.rendezvous.growth import Outlook
from hpc_elastic.rendezvous.muster import Muster
from hpc_elastic.rendezvous.patience import Patience
from hpc_elastic.rendezvous.record import Agent, Record
from hpc_elastic.rendezvous.regroup import Regroup, Waiting
from hpc_elastic.rendezvous.roster import Roster
from hpc_elastic.rendezvous.rules import Rules
from hpc_elastic.slurm.states import TaskState

__all__ = ["Machine", "Phase", "Rules"]


class Phase(Enum):
    """Where the run stands."""

    FORMING = "forming"
    RUNNING = "running"
    DISBANDED = "disbanded"
    ENDED = "ended"


@dataclass
class Machine:
    """The leader's state. Each event method returns the actions to carry out, in order.

    Times are monotonic seconds of one clock, given by the caller.
    """

    rules: Rules
    patience: Patience
    roster: Roster = field(default_factory=Roster)
    """Of the last round."""
    round: int = 0
    """Rounds closed so far, over all epochs."""
    phase: Phase = Phase.FORMING
    end: EndRun | None = None
    forming_since: float = 0.0
    not_before: float = 0.0
    """No round may close before this time (`leadership`)."""
    muster: Muster = field(default_factory=Muster)
    done: set[Agent] = field(default_factory=set)
    outlook: Outlook = field(default_factory=Outlook)
    regroup: Regroup = field(init=False)
    blame: Blame = field(init=False)
    comebacks: Comebacks = field(default_factory=Comebacks)
    _away_s: float = 0.0

    def __post_init__(self) -> None:
        self.regroup = Regroup(self.rules)
        self.blame = Blame(self.rules)
        self.comebacks.max_requeues = self.rules.max_requeues

    @classmethod
    def resume(cls, record: Record, rules: Rules, now: float, rng: random.Random) -> Machine:
        """Go on from where the leader before has left off: its members are to join again."""
        machine = cls(
            rules, Patience(rules, rng, record.given_back, dict(record.away)),
            Roster(record.members), round=record.round, forming_since=now,
            muster=Muster(lost=dict(record.lost)), comebacks=Comebacks(dict(record.unseen)),
        )  # fmt: skip
        machine.blame = Blame.resume(record, rules)
        machine.muster.expect(record.members)
        if record.ending is not None:
            machine.phase = Phase.ENDED
            ending = record.ending
            machine.end = EndRun(ending.status, ending.failure, ending.victims)
        return machine

    # ---- events -------------------------------------------------------------------------

    def join(self, agent: Agent, now: float) -> list[Action]:
        """An agent is ready for the next round."""
        if self.end is not None:
            return [self.end]
        if self.phase is Phase.DISBANDED:
            return [self.patience.send_after(agent, self._away_s)]
        if agent.host in self.blame.excluded:
            excluded = Exclude(self.blame.excluded, "excluded before")
            return [excluded, self.patience.send_bad((agent,))]
        actions: list[Action] = []
        if self.phase is Phase.RUNNING and agent in self.roster:
            actions += self._break(now, f"{agent.host} joins anew", "anew")
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
        if self.phase is not Phase.RUNNING or agent not in self.roster:
            return []
        self.done.add(agent)
        return self._end(EndRun("succeeded")) if len(self.done) == len(self.members) else []

    def boundary(self, agent: Agent, step: int, held: int, now: float) -> list[Action]:
        """All workers of a member have announced the checkpoint of ``step``.

        ``held`` is the number of the request to hold that some of them obey there, or 0.
        """
        if self.phase is not Phase.RUNNING or agent not in self.roster:
            return []
        self.blame.announced(step)
        self.regroup.announced(agent, step, held, now)
        return self._advance(now)

    def noticed(self, agent: Agent, reason: str, left_s: float, now: float) -> list[Action]:
        """A member's node is to be left within so long. One that is in no round just leaves."""
        if self.phase is not Phase.RUNNING or agent not in self.roster:
            return []
        return [*self.regroup.noticed(agent, reason, left_s, now), *self._advance(now)]

    def wants_checkpoint(self, agent: Agent, now: float) -> list[Action]:
        """A worker of a member asks for a checkpoint of the whole group."""
        if self.phase is not Phase.RUNNING or agent not in self.roster:
            return []
        self.regroup.wants_checkpoint()
        return self._advance(now)

    def answered(self, agent: Agent, answer: Answer, now: float) -> list[Action]:
        """A member answers a proposal."""
        if self.phase is not Phase.RUNNING:
            return []
        return [*self.regroup.answered(agent, answer, now), *self._advance(now)]

    def gone(self, agent: Agent, why: str, now: float) -> list[Action]:
        """An agent was lost (its connection broke, it fell silent), or left on its own."""
        if self.phase in (Phase.ENDED, Phase.DISBANDED):
            return []
        self.muster.lose(agent)
        actions: list[Action] = [Note("gone", {"task": agent.task, "host": agent.host, "why": why})]
        if self._is_at_work(agent):
            actions += self._break(now, f"{agent.host} is gone: {why}", "gone")
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
        members = self.members if self.phase is Phase.RUNNING else self.muster.unsettled
        for agent in list(self.muster.ended(members, asked_at)):
            actions += self.gone(agent, "the scheduler says that its task has ended", now)
            self.comebacks.vanished(agent)
        if self.phase is Phase.FORMING and (why := self._hopeless(view or {})):
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
        return [] if self.phase is Phase.ENDED else self._end(EndRun("closed"))

    # ---- what others may ask ------------------------------------------------------------

    @property
    def wants_slurm(self) -> bool:
        """Whether an answer of Slurm could change anything now."""
        if self.phase is Phase.RUNNING:
            return bool(self.joined) or self.awaits_tasks
        return self.phase is Phase.FORMING

    @property
    def is_short(self) -> bool:
        """Whether nodes wait that are fewer than min nodes, and may be given back."""
        waits = self.phase is Phase.FORMING and not self.muster.unsettled
        too_few = 0 < len(self.joined) < self.rules.min_nodes
        may_go = self.rules.min_wait_s is not None and self.patience.would_return(self.joined)
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
        running = self.phase is Phase.RUNNING and agent in self.roster
        return running or (self.phase is Phase.FORMING and agent in self.muster.unsettled)

    def _break(
        self, now: float, reason: str, cause: StopCause, step: int | None = None
    ) -> list[Action]:
        if self.phase is not Phase.RUNNING:
            return []
        self.phase = Phase.FORMING
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
        if self.phase is Phase.RUNNING:
            return self._consider(now)
        if self.phase is not Phase.FORMING:
            return []
        actions = self._give_up_on_unsettled(now)
        if self.muster.unsettled:
            return actions
        if self.blame.is_due:
            actions += self._judge()
        if self.phase is Phase.FORMING and self._may_close(now):
            actions += self._close_round()
        elif self.phase is Phase.FORMING and self._too_few_for_too_long(now):
            actions += self._disband()
        return actions

    def _give_up_on_unsettled(self, now: float) -> list[Action]:
        if not self.muster.unsettled or not self._timed_out(now):
            return []
        late = sorted(self.muster.unsettled, key=lambda a: a.slot)
        self.muster.unsettled.clear()
        self.blame.excused = True
        return [
            Note("gone", {"task": a.task, "host": a.host, "why": "did not join again in time"})
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
        return now - self._waiting_since(now) >= self.rules.start_timeout_s

    def _waiting_since(self, now: float) -> float:
        return max(self.forming_since, next(iter(self.joined.values()), now))

    def _close_round(self) -> list[Action]:
        self.roster = self.roster.next(self.joined, self.rules.max_nodes)
        self.muster.leave(self.members)
        self.round += 1
        self.phase = Phase.RUNNING
        self.patience.given_back = 0
        self.regroup.new_round(self.members)
        self.blame.new_round()
        self.comebacks.look(self.muster.lost)
        return [StartRound(self.round, self.members, self.restarts)]

    def _hopeless(self, view: Mapping[str, TaskState]) -> Failure | None:
        present = {a.task for a in self.joined} | self.comebacks.returning(view, self._last_here)
        rules, tried = self.rules, self.comebacks.tried
        return slurms_word.hopeless(view, present, rules.min_nodes, rules.max_nodes, tried)

    # ---- rules: nodes that wait, leave, or are to come back --------------------------------

    def _consider(self, now: float) -> list[Action]:
        if not self.joined and self.regroup.is_quiet:
            return []
        waiting = Waiting(self.joined, self.muster.view or {}, self.outlook)
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
        self.phase = Phase.DISBANDED
        given_back = self.patience.send_all(tuple(self.joined), why)
        self._away_s = given_back.delay_s
        return [given_back]

    # ---- the end ------------------------------------------------------------------------

    def _end(self, end: EndRun) -> list[Action]:
        self.phase = Phase.ENDED
        self.end = end
        return [end]
