"""What a leader does in its epoch: whom it hears, and what it may still decide (pure).

Theory of operation
-------------------
The leader owns the `machine`, and stands between it and the world:

Liveness   Whom it hears, and whose silence means loss, stands in `attendance`.

Decisions  Closing a round, releasing members, giving all nodes back and ending the run are
           *decisions*: each is the next `record` of the run. The leader asks for the record to be
           created, and carries the decision out only when it was; everything that follows waits in
           order. If the number is taken, or a later record is seen, another agent leads: the
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

Slurm      is asked when `questions` allows it; what its word means stands in `slurms_word`.

Sweep      A run below min nodes asks whether it waits in vain, for nodes that other runs of its
           sweep hold. A run that trains lets others start (`hpc_elastic.slurm.turns`).

Events return the effects to carry out, in order. Times are monotonic seconds of the leader's node.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpc_elastic.rendezvous import notes, slurms_word
from hpc_elastic.rendezvous.actions import (
    Action,
    AskStacks,
    ClearHolds,
    Confirm,
    Depart,
    EndRun,
    Exclude,
    GiveBack,
    Hold,
    Note,
    Propose,
    Release,
    StartRound,
    StopRound,
)
from hpc_elastic.rendezvous.agreement import Answer
from hpc_elastic.rendezvous.asked import Asked
from hpc_elastic.rendezvous.attendance import Attendance, Liveness
from hpc_elastic.rendezvous.comeback import SURE_S
from hpc_elastic.rendezvous.failures import Failure
from hpc_elastic.rendezvous.growth import Estimate
from hpc_elastic.rendezvous.hang import Inquest
from hpc_elastic.rendezvous.leader_effects import (
    Announce,
    AskSlurm,
    AskSweep,
    Create,
    Drop,
    Effect,
    LetOthersStart,
    Message,
    Postpone,
    Publish,
    RemoveNotice,
    RenewLease,
    StepDown,
    Tell,
)
from hpc_elastic.rendezvous.machine import Machine, Phase
from hpc_elastic.rendezvous.questions import Questions
from hpc_elastic.rendezvous.record import Agent, Ending, Record
from hpc_elastic.rendezvous.rules import Rules
from hpc_elastic.rendezvous.stragglers import Stragglers
from hpc_elastic.slurm.states import TaskState

OVERDUE = "has not found the new leader"
_SWEEP_EVERY_S, _SWEEP_LONGEST_S = 5.0, 15.0
"""Between two looks at the other runs of the sweep: longer each time, until one shows something."""


class Leadership:
    """One leader in one epoch."""

    machines: type[Machine] = Machine
    inherited: tuple[Note, ...] = ()
    """What there is to be noted of the leadership before."""

    def __init__(
        self, claim: Record, rules: Rules, liveness: Liveness, now: float, rng: random.Random
    ) -> None:
        self.machine = self.machines.resume(claim, rules, now, rng)
        self.at = claim
        """The last record of this epoch; the next decision is the one after it."""
        self.round_record = claim.number
        """The number of the record that closed the last round of this epoch."""
        self.fenced = False
        self.estimate = Estimate()
        self.progress: dict[Agent, Message] = {}
        """What the workers of each member reported last."""
        self.liveness = liveness
        self._attendance = Attendance(liveness, self.machine.muster.unsettled, now)
        self._yielding = False
        self._lease_due = now
        self._unrenewed_since: float | None = None
        """When the renewal of the lease was asked for that has not been done yet."""
        self._wanted: Record | None = None
        self._asks: dict[Agent, int] = {}
        """The number of each agent's last request for a place."""
        self._answers: dict[int, dict[Agent, int]] = {}
        """The requests that each round answers that was decided and is not announced yet."""
        self._queue: list[Action] = []
        self._slurm = Questions()
        self._sweep_due, self._sweep_pause_s = now, _SWEEP_EVERY_S
        self._inquest = Inquest()
        self._asked = Asked()
        self.stragglers = Stragglers()

    # ---- events -------------------------------------------------------------------------

    def connected(self, agent: Agent, now: float) -> list[Effect]:
        """An agent has proved who it is, on a new connection."""
        if self.fenced:
            return []
        effects: list[Effect] = []
        if agent in self._attendance.heard:
            effects.append(Drop(agent))
            effects += self.disconnected(agent, "connected anew", now)
        self._attendance.connected(agent, now)
        self.machine.comebacks.seen(agent.task)
        self._yield_if_cut_off(now)
        return effects

    def received(self, agent: Agent, message: Message, now: float) -> list[Effect]:
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
                return [Tell(agent, self.at.ending.message)]
            case "join" | "here" if self.machine.phase is Phase.ENDED:
                return []  # it hears the end with everybody else, once that is recorded
            case "join":
                self._asks[agent] = message["ask"]
                self._slurm.hurry()
        return [*self._do(self._events(agent, message, now), now), *self._ask_slurm(now)]

    def disconnected(self, agent: Agent, why: str, now: float) -> list[Effect]:
        """The connection to an agent is gone."""
        if not self._forget(agent):
            return []
        self.machine.comebacks.seen(agent.task)
        return self._do(self.machine.gone(agent, why, now), now)

    def asked_to_leave(self, claimed: Mapping[str, float]) -> list[Effect]:
        """These notices are in this leader's hands, each with the seconds that it leaves."""
        tell, confirmed, in_vain = self._asked.look(claimed, self._attendance.heard)
        told = [Tell(agent, {"type": "notice", "left_s": left_s}) for agent, left_s in tell]
        vain = [RemoveNotice(name, in_vain=True) for name in in_vain]
        return [*told, *map(RemoveNotice, confirmed), *vain]

    def knows_notice(self, task: str) -> list[Effect]:
        """The agent of a task knows that its node is to be left."""
        heard = self._attendance.heard
        known = (self._asked.confirmed(agent, heard) for agent in heard if agent.task == task)
        return [RemoveNotice(name) for names in known for name in names]

    def slurm_says(self, view: Mapping[str, TaskState] | None, now: float) -> list[Effect]:
        """Slurm answered, or did not (None)."""
        asked_at = self._slurm.answered(len(view or {}), now)
        if self.fenced or not self.machine.wants_slurm:
            return []
        known = (view or {}).items()
        self._attendance.have_no_node(t for t, s in known if slurms_word.has_no_node(s))
        effects = self._do(self.machine.slurm_says(view, asked_at, now), now)
        if self.machine.comebacks.are_due:
            self._slurm.ask_within(SURE_S, now)
        return effects

    def sweep_says(self, why: str | None, now: float) -> list[Effect]:
        """The run waits in vain for min nodes, and why; None: it may yet get them."""
        longer_s = min(_SWEEP_LONGEST_S, 1.5 * self._sweep_pause_s)
        if why is not None:  # to be seen again soon: then the nodes go back
            self._sweep_pause_s = longer_s = _SWEEP_EVERY_S
        self._sweep_due, self._sweep_pause_s = now + self._sweep_pause_s, longer_s
        return [] if self.fenced else self._do(self.machine.sweep_says(why, now), now)

    def created(self, now: float) -> list[Effect]:
        """The record that was asked for exists: carry the decision out."""
        assert self._wanted is not None
        if self.fenced:
            return []
        self.at, self._wanted = self._wanted, None
        decision, *queued = self._queue
        self._queue = []
        return [*self._carry_out(decision, now), *self._do(queued, now)]

    def refused(self) -> list[Effect]:
        """The record that was asked for is somebody else's."""
        return self._step_down()

    def saw(self, last_number: int) -> list[Effect]:
        """The last record on the shared file system has this number."""
        newest = self.at if self._wanted is None else self._wanted
        return self._step_down() if last_number > newest.number else []

    def tick(self, now: float) -> list[Effect]:
        """Time has passed; to be called every `Liveness.heartbeat_s` at least."""
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

    def renewed(self) -> list[Effect]:
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
                return self.machine.answered(agent, Answer.of(message), now)
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

    def _do(self, actions: list[Action], now: float) -> list[Effect]:
        """Carry actions out in order; what follows a decision waits until that is recorded."""
        effects: list[Effect] = []
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

    def _decided(self, action: Action) -> Record | None:
        """Return the record that this action must be, if it is a decision."""
        match action:
            case StartRound(number, members, restarts):
                return self._next(round=number, members=members, restarts=restarts, given_back=0)
            case Release():
                return self._next()
            case GiveBack(all=True):
                return self._next(given_back=self.at.given_back + 1)
            case EndRun(status, failure, victims, results) if self.at.ending is None:
                return self._next(ending=Ending(status, failure, victims, results))
        return None

    def _next(self, **changes: Any) -> Record:
        machine = self.machine
        return replace(
            self.at, number=self.at.number + 1, lost=dict(machine.muster.lost),
            unseen=dict(machine.comebacks.unseen), away=dict(machine.patience.away),
            tally=machine.blame.tally(), **changes,
        )  # fmt: skip

    def _carry_out(self, action: Action, now: float) -> list[Effect]:
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
                stop = notes.stop(action, self.machine.round)
                return [stop, *self._tell(agents, {"type": "stop", "reason": reason})]
            case StartRound():
                self.estimate.closed(now)
                self._attendance.closed_round()
                self.round_record = self.at.number
                return [Announce(action, self.at.number, self._answers.pop(action.number))]
            case Hold(agents, number):
                return self._tell(agents, {"type": "hold", "number": number})
            case Propose(agents, number, step):
                return self._tell(agents, {"type": "propose", "number": number, "step": step})
            case Confirm(agents, number):
                return self._tell(agents, {"type": "confirm", "number": number})
            case AskStacks(agents, number):
                return self._tell(agents, {"type": "stacks", "number": number})
            case Release(agents):
                return [Note("released", {"tasks": [a.task for a in agents]})]
            case Depart(agent):
                self._attendance.have_no_node([agent.task])
                return [notes.departed(action)]
            case GiveBack(agents, delay_s, everybody):
                told = self._tell(agents, {"type": "give back", "delay_s": delay_s})
                postponed = [Postpone(delay_s)] if everybody else []
                return [notes.given_back(action), *postponed, *told]
            case EndRun():
                assert self.at.ending is not None
                return [
                    Publish(self.at),
                    *self._tell(tuple(self._attendance.heard), self.at.ending.message),
                ]

    def _tell(self, agents: tuple[Agent, ...], message: Message) -> list[Effect]:
        heard = self._attendance.heard
        return [Tell(a, message) for a in agents if a in heard]

    def _step_down(self) -> list[Effect]:
        if self.fenced:
            return []
        self.fenced = True
        return [StepDown()]

    # ---- who lives ----------------------------------------------------------------------

    def _drop_silent(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for agent in self._attendance.silent(now):
            effects.append(Drop(agent))
            self._forget(agent)
            effects += self._lose(agent, "silent", now)
        for agent in self._attendance.take_overdue(now):
            effects += self._lose(agent, OVERDUE, now)
        return effects

    def _lose(self, agent: Agent, why: str, now: float) -> list[Effect]:
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
        forming = self.machine.phase is Phase.FORMING
        return forming and len(self._attendance.heard) < self.machine.rules.min_nodes

    def _yield_if_cut_off(self, now: float) -> None:
        if self._hears_half():
            self._yielding = False
            self.machine.not_before = now
        elif not self._yielding:
            self._yielding = True
            self.machine.not_before = now + self.liveness.election_s

    # ---- heartbeats, the lease, and Slurm -----------------------------------------------

    def _renew_lease(self, now: float) -> list[Effect]:
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
        if self.is_deciding and vain_s > 2 * self.liveness.lost_after_s:
            return self._step_down()
        self._lease_due = now + self.liveness.lease_s - self.liveness.heartbeat_s / 2
        return [RenewLease()]

    def _beat(self, now: float) -> list[Effect]:
        return self._tell(tuple(self._attendance.heard), {"type": "beat"})

    def _ask_slurm(self, now: float) -> list[Effect]:
        machine = self.machine
        waiting = bool(machine.joined or machine.muster.unsettled)
        if not (machine.wants_slurm and (waiting or machine.awaits_tasks)):
            return []
        about = (machine.round, machine.forming_since, waiting)
        return [AskSlurm()] if self._slurm.ask(about, now, gently=not waiting) else []

    def _see_to_sweep(self, now: float) -> list[Effect]:
        machine = self.machine
        if not machine.rules.in_sweep or now < self._sweep_due:
            return []
        if machine.is_short:
            self._sweep_due = math.inf  # until it is answered
            return [AskSweep(dict(machine.muster.lost))]
        self._sweep_pause_s = _SWEEP_EVERY_S
        if machine.phase is Phase.RUNNING:
            self._sweep_due = now + _SWEEP_EVERY_S
            return [LetOthersStart(tuple(machine.muster.lost))]
        return []
