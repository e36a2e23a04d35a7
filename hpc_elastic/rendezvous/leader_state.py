"""What a leader does in its epoch: whom it hears, and what it may still decide (pure).

Theory of operation
-------------------
The leader owns the `round_state`, and stands between it and the world:

Liveness   Whom it hears, and whose silence means loss, stands in `leader_state`.

Decisions  Closing a round, releasing members, giving all nodes back and ending the run are
           *decisions*: each is the next `log_entry` of the run. The leader asks for the record to
           be created, and carries the decision out only when it was; everything that follows waits
           in order. If the number is taken, or a later record is seen, another agent leads: the
           leader is fenced and steps down.

Lease      The leader renews a lease on the shared file system while it hears at least half of the
           members of the last round, and could form a group with those it hears. Agents that can
           not reach it elect another only once the lease has run out, so that one node that is cut
           off does not depose a leader that the others follow. A leader that hears fewer may be
           the one that is cut off: it renews no lease and closes no round for as long as the
           others need to elect. If nobody did, they are dead, and it goes on.
           A leader that can not renew its lease steps down before members that it does not hear
           may elect another; and where it can not record a decision either, at any rate.

Reports    of members are numbered by the record of the round that they belong to: what is said of
           an earlier one is old news. Requests for a place are numbered by the agent.

Slurm      is asked when `task_recovery` allows it; what its word means stands in `task_recovery`.

Sweep      A run below min nodes asks whether it waits in vain, for nodes that other runs of its
           sweep hold. A run that trains lets others start (`hpc_elastic.slurm.sweep_queue`).

Events return the effects to carry out, in order. Times are monotonic seconds of the leader's node.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_elastic.rendezvous import task_recovery
from hpc_elastic.rendezvous.effects import (
    Action,
    Announce,
    AskSlurm,
    AskStacks,
    AskSweep,
    ClearHolds,
    ConfirmStep,
    Create,
    Depart,
    Drop,
    EndRun,
    Exclude,
    GiveBack,
    Hold,
    LeaderEffect,
    LetOthersStart,
    Message,
    Note,
    Postpone,
    ProposeStep,
    PublishResult,
    Release,
    RemoveNotice,
    RenewLease,
    Send,
    StartRound,
    StepDown,
    StopRound,
)
from hpc_elastic.rendezvous.failure_policy import Stragglers
from hpc_elastic.rendezvous.group_change import ProgressEstimator
from hpc_elastic.rendezvous.hang_diagnosis import HangDiagnosis
from hpc_elastic.rendezvous.log_entry import Agent, Failure, LogEntry, RoundRules, RunEnding
from hpc_elastic.rendezvous.round_state import RoundPhase, RoundState
from hpc_elastic.rendezvous.step_agreement import StepVote
from hpc_elastic.rendezvous.task_recovery import CONFIRM_LOST_S, SlurmPollSchedule
from hpc_elastic.slurm.job_state import TaskState

OVERDUE = "has not found the new leader"
_SWEEP_EVERY_S, _SWEEP_LONGEST_S = 5.0, 15.0
"""Between two looks at the other runs of the sweep: longer each time, until one shows something."""


class LeaderState:
    """One leader in one epoch."""

    machines: type[RoundState] = RoundState
    inherited: tuple[Note, ...] = ()
    """What there is to be noted of the leadership before."""

    def __init__(
        self,
        claim: LogEntry,
        rules: RoundRules,
        liveness: HeartbeatConfig,
        now: float,
        rng: random.Random,
    ) -> None:
        self.machine = self.machines.resume(claim, rules, now, rng)
        self.at = claim
        """The last record of this epoch; the next decision is the one after it."""
        self.round_record = claim.number
        """The number of the record that closed the last round of this epoch."""
        self.fenced = False
        self.estimate = ProgressEstimator()
        self.progress: dict[Agent, Message] = {}
        """What the workers of each member reported last."""
        self.liveness = liveness
        self._attendance = HeartbeatTracker(liveness, self.machine.muster.unsettled, now)
        self._yielding = False
        self._lease_due = now
        self._unrenewed_since: float | None = None
        """When the renewal of the lease was asked for that has not been done yet."""
        self._wanted: LogEntry | None = None
        self._asks: dict[Agent, int] = {}
        """The number of each agent's last request for a place."""
        self._answers: dict[int, dict[Agent, int]] = {}
        """The requests that each round answers that was decided and is not announced yet."""
        self._queue: list[Action] = []
        self._slurm = SlurmPollSchedule()
        self._sweep_due, self._sweep_pause_s = now, _SWEEP_EVERY_S
        self._inquest = HangDiagnosis()
        self._asked = LeaveRequests()
        self.stragglers = Stragglers()

    # ---- events -------------------------------------------------------------------------

    def connected(self, agent: Agent, now: float) -> list[LeaderEffect]:
        """An agent has proved who it is, on a new connection."""
        if self.fenced:
            return []
        effects: list[LeaderEffect] = []
        if agent in self._attendance.heard:
            effects.append(Drop(agent))
            effects += self.disconnected(agent, "connected anew", now)
        self._attendance.connected(agent, now)
        self.machine.comebacks.seen(agent.task)
        self._yield_if_cut_off(now)
        return effects

    def received(self, agent: Agent, message: Message, now: float) -> list[LeaderEffect]:
        """An agent says something; see `leader` for the messages."""
        if self.fenced or agent not in self._attendance.heard:
            return []
        self._attendance.heard[agent] = now
        match message["type"]:
            case "leave":
                knows = self.knows_notice(agent.task)
                return [*knows, *self.disconnected(agent, str(message["why"]), now)]
            case "noticed":
                return self.knows_notice(agent.task)
            case "join" | "here" if self.at.ending is not None:
                return [Send(agent, self.at.ending.message)]
            case "join" | "here" if self.machine.phase is RoundPhase.ENDED:
                return []  # it hears the end with everybody else, once that is recorded
            case "join":
                self._asks[agent] = message["ask"]
                self._slurm.hurry()
        return [*self._do(self._events(agent, message, now), now), *self._ask_slurm(now)]

    def disconnected(self, agent: Agent, why: str, now: float) -> list[LeaderEffect]:
        """The connection to an agent is gone."""
        if not self._forget(agent):
            return []
        self.machine.comebacks.seen(agent.task)
        return self._do(self.machine.gone(agent, why, now), now)

    def asked_to_leave(self, claimed: Mapping[str, float]) -> list[LeaderEffect]:
        """These notices are in this leader's hands, each with the seconds that it leaves."""
        tell, confirmed, in_vain = self._asked.look(claimed, self._attendance.heard)
        told = [Send(agent, {"type": "notice", "left_s": left_s}) for agent, left_s in tell]
        vain = [RemoveNotice(name, in_vain=True) for name in in_vain]
        return [*told, *map(RemoveNotice, confirmed), *vain]

    def knows_notice(self, task: str) -> list[LeaderEffect]:
        """The agent of a task knows that its node is to be left."""
        heard = self._attendance.heard
        known = (self._asked.confirmed(agent, heard) for agent in heard if agent.task == task)
        return [RemoveNotice(name) for names in known for name in names]

    def slurm_says(self, view: Mapping[str, TaskState] | None, now: float) -> list[LeaderEffect]:
        """Slurm answered, or did not (None)."""
        asked_at = self._slurm.answered(len(view or {}), now)
        if self.fenced or not self.machine.wants_slurm:
            return []
        known = (view or {}).items()
        self._attendance.have_no_node(t for t, s in known if task_recovery.has_no_node(s))
        effects = self._do(self.machine.slurm_says(view, asked_at, now), now)
        if self.machine.comebacks.are_due:
            self._slurm.ask_within(CONFIRM_LOST_S, now)
        return effects

    def sweep_says(self, why: str | None, now: float) -> list[LeaderEffect]:
        """The run waits in vain for min nodes, and why; None: it may yet get them."""
        longer_s = min(_SWEEP_LONGEST_S, 1.5 * self._sweep_pause_s)
        if why is not None:  # to be seen again soon: then the nodes go back
            self._sweep_pause_s = longer_s = _SWEEP_EVERY_S
        self._sweep_due, self._sweep_pause_s = now + self._sweep_pause_s, longer_s
        return [] if self.fenced else self._do(self.machine.sweep_says(why, now), now)

    def created(self, now: float) -> list[LeaderEffect]:
        """The record that was asked for exists: carry the decision out."""
        assert self._wanted is not None
        if self.fenced:
            return []
        self.at, self._wanted = self._wanted, None
        decision, *queued = self._queue
        self._queue = []
        return [*self._carry_out(decision, now), *self._do(queued, now)]

    def refused(self) -> list[LeaderEffect]:
        """The record that was asked for is somebody else's."""
        return self._step_down()

    def saw(self, last_number: int) -> list[LeaderEffect]:
        """The last record on the shared file system has this number."""
        newest = self.at if self._wanted is None else self._wanted
        return self._step_down() if last_number > newest.number else []

    def tick(self, now: float) -> list[LeaderEffect]:
        """Time has passed; to be called every `HeartbeatConfig.heartbeat_interval_s` at least."""
        if self.fenced:
            return []
        if late_s := self._attendance.forgive_if_slept(now):
            self.machine.slept(late_s, now)
        effects = self._drop_silent(now)
        self._yield_if_cut_off(now)
        effects += self._do(self.machine.tick(now), now)
        effects += self._do(self._inquest.tick(self.machine, now), now)
        effects += self._beat(now)
        effects += self._renew_lease(now)
        return [*effects, *self._ask_slurm(now), *self._see_to_sweep(now)]

    def renewed(self) -> list[LeaderEffect]:
        """The lease was renewed."""
        self._unrenewed_since = None
        return []

    @property
    def is_deciding(self) -> bool:
        """Whether a decision is not recorded yet."""
        return self._wanted is not None and not self.fenced

    # ---- messages -----------------------------------------------------------------------

    def _events(self, agent: Agent, message: Message, now: float) -> list[Action]:
        ours = message.get("record") == self._record_of(agent)
        match message["type"]:
            case "join":
                return self.machine.join(agent, now)
            case "notice":
                return self.machine.noticed(
                    agent, str(message["reason"]), float(message["left_s"]), now
                )
            case "want" if ours:
                return self.machine.wants_checkpoint(agent, now)
            case "answer" if ours:
                return self.machine.answered(agent, StepVote.of(message), now)
            case "finished" if ours:
                return self.machine.finished(agent, now)
            case "failed" if ours:
                failures = [Failure(**f) for f in message["failures"]]
                return self.machine.worker_failed(failures, agent, now)
            case "boundary" if ours:
                step, held = int(message["step"]), int(message["held"])
                return self.machine.boundary(agent, step, held, now)
            case "stalled" | "stacks" if ours:
                return self._inquest.hear(self.machine, agent, message, now)
            case "close":
                return self.machine.close()
            case "beat" if message["progress"]:
                self.progress[agent] = message["progress"]
                return self._learn(agent, message["progress"], now)
        return []

    def _record_of(self, agent: Agent) -> int | None:
        """Return the number of the record by which an agent's reports count."""
        return self.round_record

    def _learn(self, agent: Agent, progress: Message, now: float) -> list[Action]:
        if self.machine.members and agent == self.machine.members[0]:
            self.estimate.stepped(progress.get("step"), progress.get("total"), now)
            self.machine.outlook = self.estimate.outlook
        told = "loads" in progress and agent in self.machine.roster
        return self.stragglers.heard(agent, progress["loads"], self.machine.round) if told else []

    # ---- decisions ----------------------------------------------------------------------

    def _do(self, actions: list[Action], now: float) -> list[LeaderEffect]:
        """Carry actions out in order; what follows a decision waits until that is recorded."""
        effects: list[LeaderEffect] = []
        self._note_requests(actions)
        for i, action in enumerate(actions):
            if self._wanted is not None:
                self._queue += actions[i:]
                break
            record = self._decided(action)
            if record is None:
                effects += self._carry_out(action, now)
            else:
                self._wanted = record
                self._queue.append(action)
                effects.append(Create(record))
        return effects

    def _note_requests(self, actions: list[Action]) -> None:
        """Note which requests a round answers when it is decided: members may ask anew later."""
        for action in actions:
            if isinstance(action, StartRound) and action.number not in self._answers:
                self._answers[action.number] = {a: self._asks[a] for a in action.told}

    def _decided(self, action: Action) -> LogEntry | None:
        """Return the record that this action must be, if it is a decision."""
        match action:
            case StartRound(number, members, restarts):
                return self._next(round=number, members=members, restarts=restarts, given_back=0)
            case Release():
                return self._next()
            case GiveBack(all=True):
                return self._next(given_back=self.at.given_back + 1)
            case EndRun(status, failure, victims, results) if self.at.ending is None:
                return self._next(ending=RunEnding(status, failure, victims, results))
        return None

    def _next(self, **changes: Any) -> LogEntry:
        machine = self.machine
        return replace(
            self.at, number=self.at.number + 1, lost=dict(machine.muster.lost),
            unseen=dict(machine.comebacks.unseen), away=dict(machine.patience.away),
            tally=machine.blame.tally(), **changes,
        )  # fmt: skip

    def _carry_out(self, action: Action, now: float) -> list[LeaderEffect]:
        match action:
            case Note() | Exclude():
                return [action]
            case ClearHolds(tasks, unseen, failed_on):  # it may have waited for a record
                here = self.machine.not_given_back(tasks)
                held = tuple(task for task in tasks if task in here or task in failed_on)
                still = {task: node for task, node in unseen.items() if task in held}
                return [ClearHolds(held, still, failed_on)] if held else []
            case StopRound(agents, reason):
                self.estimate.broke(now)
                stop = stop_note(action, self.machine.round)
                return [stop, *self._tell(agents, {"type": "stop", "reason": reason})]
            case StartRound():
                self.estimate.closed(now)
                self._attendance.closed_round()
                self.round_record = self.at.number
                return [Announce(action, self.at.number, self._answers.pop(action.number))]
            case Hold(agents, number):
                return self._tell(agents, {"type": "hold", "number": number})
            case ProposeStep(agents, number, step):
                return self._tell(agents, {"type": "propose", "number": number, "step": step})
            case ConfirmStep(agents, number):
                return self._tell(agents, {"type": "confirm", "number": number})
            case AskStacks(agents, number):
                return self._tell(agents, {"type": "stacks", "number": number})
            case Release(agents):
                return [Note("members_released", {"tasks": [a.task for a in agents]})]
            case Depart(agent):
                self._attendance.have_no_node([agent.task])
                return [departed_note(action)]
            case GiveBack(agents, delay_s, everybody):
                told = self._tell(agents, {"type": "give back", "delay_s": delay_s})
                postponed = [Postpone(delay_s)] if everybody else []
                return [given_back_note(action), *postponed, *told]
            case EndRun():
                assert self.at.ending is not None
                return [
                    PublishResult(self.at),
                    *self._tell(tuple(self._attendance.heard), self.at.ending.message),
                ]

    def _tell(self, agents: tuple[Agent, ...], message: Message) -> list[LeaderEffect]:
        heard = self._attendance.heard
        return [Send(a, message) for a in agents if a in heard]

    def _step_down(self) -> list[LeaderEffect]:
        if self.fenced:
            return []
        self.fenced = True
        return [StepDown()]

    # ---- who lives ----------------------------------------------------------------------

    def _drop_silent(self, now: float) -> list[LeaderEffect]:
        effects: list[LeaderEffect] = []
        for agent in self._attendance.silent(now):
            effects.append(Drop(agent))
            self._forget(agent)
            effects += self._lose(agent, "silent", now)
        for agent in self._attendance.take_overdue(now):
            effects += self._lose(agent, OVERDUE, now)
        return effects

    def _lose(self, agent: Agent, why: str, now: float) -> list[LeaderEffect]:
        """Take an agent for lost because nothing is heard of it."""
        if agent in self.machine.roster:
            self._attendance.is_lost_in_silence(agent)
        return self._do(self.machine.fell_silent(agent, why, now), now)

    def _forget(self, agent: Agent) -> bool:
        """Let go of an agent; tell whether it was here."""
        if self.fenced or self._attendance.heard.pop(agent, None) is None:
            return False
        self.progress.pop(agent, None)
        return True

    def _hears_half(self) -> bool:
        return self._attendance.hears_half(self._num_electors)

    @property
    def _num_electors(self) -> int:
        """So many were in the last round."""
        return len(self.machine.members)

    def _is_below_min(self) -> bool:
        """Whether this leader could decide nothing: whoever can not reach it may try to lead."""
        forming = self.machine.phase is RoundPhase.FORMING
        return forming and len(self._attendance.heard) < self.machine.rules.min_nodes

    def _yield_if_cut_off(self, now: float) -> None:
        if self._hears_half():
            self._yielding = False
            self.machine.not_before = now
        elif not self._yielding:
            self._yielding = True
            self.machine.not_before = now + self.liveness.election_s

    # ---- heartbeats, the lease, and Slurm -----------------------------------------------

    def _renew_lease(self, now: float) -> list[LeaderEffect]:
        """Renew the lease where that is due; step down where it is in vain."""
        if not self._hears_half() or self._is_below_min():
            self._unrenewed_since = None
            return []
        if now < self._lease_due:
            return []
        if self._unrenewed_since is None:
            self._unrenewed_since = now
        vain_s = now - self._unrenewed_since
        lapses = vain_s > self.liveness.lapse_s - self.liveness.lease_s
        if lapses and self._attendance.misses_somebody:
            return self._step_down()
        if self.is_deciding and vain_s > 2 * self.liveness.heartbeat_timeout_s:
            return self._step_down()
        self._lease_due = now + self.liveness.lease_s - self.liveness.heartbeat_interval_s / 2
        return [RenewLease()]

    def _beat(self, now: float) -> list[LeaderEffect]:
        return self._tell(tuple(self._attendance.heard), {"type": "beat"})

    def _ask_slurm(self, now: float) -> list[LeaderEffect]:
        machine = self.machine
        waiting = bool(machine.joined or machine.muster.unsettled)
        if not (machine.wants_slurm and (waiting or machine.awaits_tasks)):
            return []
        about = (machine.round, machine.forming_since, waiting)
        return [AskSlurm()] if self._slurm.ask(about, now, gently=not waiting) else []

    def _see_to_sweep(self, now: float) -> list[LeaderEffect]:
        machine = self.machine
        if not machine.rules.in_sweep or now < self._sweep_due:
            return []
        if machine.is_short:
            self._sweep_due = math.inf  # until it is answered
            return [AskSweep(dict(machine.muster.lost))]
        self._sweep_pause_s = _SWEEP_EVERY_S
        if machine.phase is RoundPhase.RUNNING:
            self._sweep_due = now + _SWEEP_EVERY_S
            return [LetOthersStart(tuple(machine.muster.lost))]
        return []


# ---- Which agents a leader hears, and whose silence counts (pure)
# An agent lives as long as it is heard: a broken connection is a loss at once, silence is one
# after ``heartbeat_timeout_s``. Where a tick comes late it was the leader that slept or was busy,
# and nobody's silence counts for that long. A member of the last round that does not find a new
# leader within `HeartbeatConfig.election_s` is lost too.
#
# A leader that hears fewer than half of the last round's members, because the others have fallen
# silent (and not because their connections closed), may itself be the one that is cut off.
#
# Times are monotonic seconds of the leader's node.


_BEATS_PER_S = 5000
_PUNCTUAL_S = 0.1


@dataclass(frozen=True)
class HeartbeatConfig:
    """When silence means loss; seconds."""

    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    stale_s: float = 0.0
    """How old a file may be that is read anew on the run's file system."""

    @property
    def lease_s(self) -> float:
        """Between two renewals of a lease: each is an operation of a shared file system."""
        return 2 * self.heartbeat_interval_s

    @property
    def lapse_s(self) -> float:
        """A lease that was not renewed for so long has lapsed."""
        return 5 * self.heartbeat_interval_s + self.stale_s

    @property
    def election_s(self) -> float:
        """So long it may take others to elect a leader, and to find it."""
        return 2 * self.heartbeat_timeout_s + self.stale_s

    @classmethod
    def of(
        cls,
        heartbeat_interval_s: float,
        heartbeat_timeout_s: float,
        max_nodes: int,
        stale_s: float = 0.0,
    ) -> HeartbeatConfig:
        """Return a run's, from its settings: in a large one each agent beats more seldom.

        A leader is asked to take five thousand heartbeats a second, as long as three of each agent
        are due before its silence counts.
        """
        gentle_s = min(max_nodes / _BEATS_PER_S, heartbeat_timeout_s / 3)
        return cls(max(heartbeat_interval_s, gentle_s), heartbeat_timeout_s, stale_s)


class HeartbeatTracker:
    """Who is there."""

    def __init__(self, liveness: HeartbeatConfig, expected: Iterable[Agent], now: float) -> None:
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
        late_s, self._ticked = now - self._ticked - self.liveness.heartbeat_interval_s, now
        if late_s <= _PUNCTUAL_S:
            return 0.0
        self.heard = {a: min(now, heard + late_s) for a, heard in self.heard.items()}
        self._expected = {t: (a, until + late_s) for t, (a, until) in self._expected.items()}
        return late_s

    def silent(self, now: float) -> list[Agent]:
        """Return the agents that were not heard for too long."""
        limit = now - self.liveness.heartbeat_timeout_s
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


# ---- Which nodes are asked to be left by notices that a leader has claimed (pure)
# A notice is kept until a node that it names has confirmed it. A message may be lost with its
# connection, and a leader may be cut off from the node without knowing it yet.


PATIENCE = 30
"""A notice that names no agent that is there is removed after this many looks."""


@dataclass
class _Notice:
    told: set[Agent] = field(default_factory=set)
    confirmed: set[Agent] = field(default_factory=set)
    num_vain_looks: int = 0


class LeaveRequests:
    """The notices of one leader."""

    def __init__(self) -> None:
        self._notices: dict[str, _Notice] = {}

    def look(
        self, claimed: Mapping[str, float], heard: Collection[Agent]
    ) -> tuple[list[tuple[Agent, float]], list[str], list[str]]:
        """Say what the notices ask for.

        Args:
            claimed: Notices that the leader has, by task, host or ``all``; and the seconds left.
            heard: Agents that are connected.

        Returns:
            Who is to be told, and the seconds that are left; the notices to remove because they
            are confirmed; and those to remove because they name nobody.
        """
        self._notices = {name: self._notices.get(name, _Notice()) for name in claimed}
        tell: list[tuple[Agent, float]] = []
        confirmed: list[str] = []
        in_vain: list[str] = []
        for name, notice in self._notices.items():
            waiting = [a for a in heard if _names(name, a) and a not in notice.confirmed]
            notice.told.update(waiting)
            tell += [(agent, claimed[name]) for agent in waiting]
            if waiting:
                continue
            if notice.confirmed:
                confirmed.append(name)
                continue
            notice.num_vain_looks += 1
            if notice.num_vain_looks >= PATIENCE:
                in_vain.append(name)
        return tell, self._forget(confirmed), self._forget(in_vain)

    def confirmed(self, agent: Agent, heard: Collection[Agent]) -> list[str]:
        """An agent knows that its node is to be left; return the notices to remove."""
        over: list[str] = []
        for name, notice in self._notices.items():
            if agent in notice.told:
                notice.confirmed.add(agent)
                if not any(a in heard for a in notice.told - notice.confirmed):
                    over.append(name)
        return self._forget(over)

    def _forget(self, over: list[str]) -> list[str]:
        """Forget what is over: another notice of the same name is a new one."""
        for name in over:
            del self._notices[name]
        return over


def _names(name: str, agent: Agent) -> bool:
    return name in (agent.task, agent.host, "all")


# ---- What the event log says of a leader's actions (pure); the kinds stand in `hpc_elastic.report`


_NAMED = 20
"""So many nodes are named: a line is to stay short in a run of thousands."""


def stop_note(action: StopRound, round_: int) -> Note:
    """Return the note of a round, or of a replica's workers, that is stopped."""
    fields: dict[str, object] = {"reason": action.reason, "cause": action.cause, "round": round_}
    if action.step is not None:
        fields["step"] = action.step
    return Note(
        "round_stopped", {**fields, "nodes": len(action.agents), "hosts": _hosts(action.agents)}
    )


def departed_note(action: Depart) -> Note:
    """Return the note of a replica that is none any more."""
    agent = action.agent
    return Note(
        "replica_left", {"task": agent.task, "host": agent.host, "nodes": len(action.members)}
    )


def given_back_note(action: GiveBack) -> Note:
    """Return the note of nodes that are sent back to the queue."""
    delay_s, agents = round(action.delay_s, 1), action.agents
    fields = {"nodes": len(agents), "hosts": _hosts(agents), "all": action.all}
    why = {"why": action.why} if action.why else {}
    return Note("nodes_requeued", {**fields, "delay_s": delay_s, **why})


def round_note(start: StartRound, *, record: int, epoch: int) -> Note:
    """Return the note of a round that has closed."""
    members = start.members
    fields: dict[str, object] = {
        "number": start.number, "record": record, "epoch": epoch, "nodes": len(members),
        "world_size": sum(m.nproc for m in members), "members": [vars(m) for m in members],
        "restarts": start.restarts,
    }  # fmt: skip
    if start.placed is not None:
        fields["placed"] = [a.task for a in start.placed]
    return Note("round", fields)


def _hosts(agents: Iterable[Agent]) -> list[str]:
    return [a.host for a in agents][:_NAMED]
