"""What a leader does in its epoch: whom it hears, and what it may still decide (pure).

Theory of operation
-------------------
The leader owns the `machine`, and stands between it and the world:

Liveness   An agent lives as long as it is heard: a broken connection is a loss at once, silence is
           one after ``lost_after_s``. Where a tick comes late it was the leader that slept or was
           busy, and nobody's silence counts for that long. A member of the last round that does not
           find a new leader within ``2 * lost_after_s`` is lost too.

Decisions  Closing a round, giving all nodes back and ending the run are *decisions*: each is the
           next `record` of the run. The leader asks for the record to be created, and carries the
           decision out only when it was; everything that follows waits in order. If the number is
           taken, or a later record is seen, another agent leads: the leader is fenced and steps
           down.

Lease      The leader renews a lease on the shared file system while it hears at least half of the
           members of the last round, and could form a group with those it hears. Agents that can
           not reach it elect another only once the lease has run out, so that one node that is cut
           off does not depose a leader that the others follow. A leader that hears fewer, because
           the others have fallen silent (and not because their connections closed), is itself the
           one that may be cut off: it renews no lease and closes no round for as long as the
           others need to elect, ``2 * lost_after_s``. If nobody did, they are dead, and it goes on.

Slurm      is asked when `questions` allows it; what its word means stands in `slurms_word`.

Events return the effects to carry out, in order. Times are monotonic seconds of the leader's node.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpc_elastic.rendezvous import slurms_word
from hpc_elastic.rendezvous.actions import (
    Action,
    EndRun,
    GiveBack,
    Hold,
    Note,
    StartRound,
    StopRound,
)
from hpc_elastic.rendezvous.failures import Failure
from hpc_elastic.rendezvous.growth import Estimate
from hpc_elastic.rendezvous.machine import Machine, Phase, Rules
from hpc_elastic.rendezvous.questions import Questions
from hpc_elastic.rendezvous.record import Agent, Ending, Record
from hpc_elastic.slurm.states import TaskState

Message = dict[str, Any]

_BEATS_PER_S = 5000
_PUNCTUAL_S = 0.1


@dataclass(frozen=True)
class Liveness:
    """When silence means loss; seconds."""

    heartbeat_s: float
    lost_after_s: float

    @classmethod
    def of(cls, heartbeat_s: float, lost_after_s: float, max_nodes: int) -> Liveness:
        """Return a run's, from its settings: in a large one each agent beats more seldom.

        A leader is asked to take five thousand heartbeats a second, as long as three of each agent
        are due before its silence counts.
        """
        gentle_s = min(max_nodes / _BEATS_PER_S, lost_after_s / 3)
        return cls(max(heartbeat_s, gentle_s), lost_after_s)


@dataclass(frozen=True)
class Tell:
    """Send a message to an agent."""

    agent: Agent
    message: Message


@dataclass(frozen=True)
class Drop:
    """Abandon the connection to an agent that has fallen silent, or has come back on another."""

    agent: Agent


@dataclass(frozen=True)
class Create:
    """Create this record; then say `Leadership.created`, or `Leadership.refused` if it is taken."""

    record: Record


@dataclass(frozen=True)
class Announce:
    """Start the round's bootstrap store, and tell every member its place (see `placements`)."""

    start: StartRound
    record: int
    asks: Mapping[Agent, int]
    """Which request of each member this is the answer to. It may have come back since the decision,
    and ask for another round than this one."""


@dataclass(frozen=True)
class Publish:
    """Write the run's result, and take its pending tasks out of the queue."""

    record: Record


@dataclass(frozen=True)
class Postpone:
    """Let no queued task of the run start for a while."""

    delay_s: float


@dataclass(frozen=True)
class AskSlurm:
    """Ask how the tasks of the run are; then say `Leadership.slurm_says`."""


@dataclass(frozen=True)
class RenewLease:
    """Show on the shared file system that the leader of this epoch lives."""


@dataclass(frozen=True)
class StepDown:
    """Let go of everybody: another agent leads."""


Effect = (
    Tell | Drop | Create | Announce | Publish | Postpone | AskSlurm | RenewLease | StepDown | Note
)


class Leadership:
    """One leader in one epoch."""

    def __init__(
        self, claim: Record, rules: Rules, liveness: Liveness, now: float, rng: random.Random
    ) -> None:
        self.machine = Machine.resume(claim, rules, now, rng)
        self.at = claim
        """The last record of this epoch; the next decision is the one after it."""
        self.fenced = False
        self.estimate = Estimate()
        self.progress: dict[Agent, Message] = {}
        """What the workers of each member reported last."""
        self.liveness = liveness
        self._heard: dict[Agent, float] = {}
        self._expected = {
            a.task: (a, now + 2 * liveness.lost_after_s) for a in self.machine.unsettled
        }
        """Members of the last round that have not found this leader yet, and until when."""
        self._silent: set[str] = set()
        """Tasks of the last round's members that were lost by silence."""
        self._yielding = False
        self._wanted: Record | None = None
        self._asks: dict[Agent, int] = {}
        """The number of each agent's last request for a place."""
        self._answers: dict[int, dict[Agent, int]] = {}
        """The requests that each round answers that was decided and is not announced yet."""
        self._queue: list[Action] = []
        self._ticked = now
        self._slurm = Questions()

    # ---- events -------------------------------------------------------------------------

    def connected(self, agent: Agent, now: float) -> list[Effect]:
        """An agent has proved who it is, on a new connection."""
        if self.fenced:
            return []
        effects: list[Effect] = []
        if agent in self._heard:
            effects.append(Drop(agent))
            effects += self.disconnected(agent, "connected anew", now)
        self._heard[agent] = now
        self._expected.pop(agent.task, None)
        self._silent.discard(agent.task)
        self._yield_if_cut_off(now)
        return effects

    def received(self, agent: Agent, message: Message, now: float) -> list[Effect]:
        """An agent says something; see `leader` for the messages."""
        if self.fenced or agent not in self._heard:
            return []
        self._heard[agent] = now
        match message["type"]:
            case "leave":
                return self.disconnected(agent, str(message["why"]), now)
            case "join" if self.at.ending is not None:
                return [Tell(agent, _end(self.at.ending))]
            case "join" if self.machine.phase is Phase.ENDED:
                return []  # it hears the end with everybody else, once that is recorded
            case "join":
                self._asks[agent] = message["ask"]
                self._slurm.hurry()
        return [*self._do(self._events(agent, message, now), now), *self._ask_slurm(now)]

    def disconnected(self, agent: Agent, why: str, now: float) -> list[Effect]:
        """The connection to an agent is gone."""
        if self.fenced or self._heard.pop(agent, None) is None:
            return []
        self.progress.pop(agent, None)
        return self._do(self.machine.gone(agent, why, now), now)

    def slurm_says(self, view: Mapping[str, TaskState] | None, now: float) -> list[Effect]:
        """Slurm answered, or did not (None)."""
        asked_at = self._slurm.answered(len(view or {}), now)
        if self.fenced or not self.machine.wants_slurm:
            return []
        self._silent -= {t for t, s in (view or {}).items() if slurms_word.has_no_node(s)}
        return self._do(self.machine.slurm_says(view, asked_at, now), now)

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
        self._forgive_if_slept(now)
        effects = self._drop_silent(now)
        self._yield_if_cut_off(now)
        effects += self._do(self.machine.tick(now), now)
        effects += self._beat(now)
        if self._hears_half() and not self._is_below_min():
            effects.append(RenewLease())
        return effects + self._ask_slurm(now)

    # ---- messages -----------------------------------------------------------------------

    def _events(self, agent: Agent, message: Message, now: float) -> list[Action]:
        ours = message.get("record") == self.at.number
        match message["type"]:
            case "join":
                return self.machine.join(agent, now)
            case "finished" if ours:
                return self.machine.finished(agent, now)
            case "failed" if ours:
                failures = [Failure(**f) for f in message["failures"]]
                return self.machine.worker_failed(failures, agent, now)
            case "boundary" if ours:
                step, held = int(message["step"]), int(message["held"])
                return self.machine.boundary(agent, step, held, now)
            case "close":
                return self.machine.close()
            case "beat" if message["progress"]:
                self.progress[agent] = message["progress"]
                self._learn(agent, message["progress"], now)
        return []

    def _learn(self, agent: Agent, progress: Message, now: float) -> None:
        if self.machine.members and agent == self.machine.members[0]:
            self.estimate.stepped(progress.get("step"), progress.get("total"), now)
            self.machine.outlook = self.estimate.outlook

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
                self._answers[action.number] = {a: self._asks[a] for a in action.members}

    def _decided(self, action: Action) -> Record | None:
        """Return the record that this action must be, if it is a decision."""
        match action:
            case StartRound(number, members, restarts):
                return self._next(round=number, members=members, restarts=restarts, given_back=0)
            case GiveBack(all=True):
                return self._next(given_back=self.at.given_back + 1)
            case EndRun(status, failure, victims) if self.at.ending is None:
                return self._next(ending=Ending(status, failure, victims))
        return None

    def _next(self, **changes: Any) -> Record:
        lost = dict(self.machine.lost)
        return replace(self.at, number=self.at.number + 1, lost=lost, **changes)

    def _carry_out(self, action: Action, now: float) -> list[Effect]:
        match action:
            case Note():
                return [action]
            case StopRound(agents, reason):
                self.estimate.broke(now)
                note = Note("stop", {"reason": reason})
                return [note, *self._tell(agents, {"type": "stop", "reason": reason})]
            case StartRound():
                self.estimate.closed(now)
                self._silent.clear()
                return [Announce(action, self.at.number, self._answers.pop(action.number))]
            case Hold(agents, number):
                return self._tell(agents, {"type": "hold", "number": number})
            case GiveBack(agents, delay_s, everybody):
                note = Note("given back", {"nodes": len(agents), "delay_s": round(delay_s, 1)})
                told = self._tell(agents, {"type": "give back", "delay_s": delay_s})
                return [note, *([Postpone(delay_s)] if everybody else []), *told]
            case EndRun():
                assert self.at.ending is not None
                return [Publish(self.at), *self._tell(tuple(self._heard), _end(self.at.ending))]

    def _tell(self, agents: tuple[Agent, ...], message: Message) -> list[Effect]:
        return [Tell(a, message) for a in agents if a in self._heard]

    def _step_down(self) -> list[Effect]:
        if self.fenced:
            return []
        self.fenced = True
        return [StepDown()]

    # ---- who lives ----------------------------------------------------------------------

    def _forgive_if_slept(self, now: float) -> None:
        late_s, self._ticked = now - self._ticked - self.liveness.heartbeat_s, now
        if late_s > _PUNCTUAL_S:
            self._heard = {a: min(now, heard + late_s) for a, heard in self._heard.items()}
            self._expected = {t: (a, until + late_s) for t, (a, until) in self._expected.items()}
            self.machine.slept(late_s, now)

    def _drop_silent(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        limit = now - self.liveness.lost_after_s
        for agent in [a for a, heard in self._heard.items() if heard < limit]:
            if self.machine.is_member(agent):
                self._silent.add(agent.task)
            effects.append(Drop(agent))
            effects += self.disconnected(agent, "silent", now)
        for agent in [a for a, until in self._expected.values() if now > until]:
            del self._expected[agent.task]
            self._silent.add(agent.task)
            why = "has not found the new leader"
            effects += self._do(self.machine.gone(agent, why, now), now)
        return effects

    def _hears_half(self) -> bool:
        """Whether this leader is on the side of the last round's members that may go on."""
        num_mute = len(self._silent) + len(self._expected)
        return num_mute <= len(self.machine.members) / 2

    def _is_below_min(self) -> bool:
        """Whether this leader could decide nothing: whoever can not reach it may try to lead."""
        forming = self.machine.phase is Phase.FORMING
        return forming and len(self._heard) < self.machine.rules.min_nodes

    def _yield_if_cut_off(self, now: float) -> None:
        if self._hears_half():
            self._yielding = False
            self.machine.not_before = now
        elif not self._yielding:
            self._yielding = True
            self.machine.not_before = now + 2 * self.liveness.lost_after_s

    # ---- heartbeats and Slurm -----------------------------------------------------------

    def _beat(self, now: float) -> list[Effect]:
        return self._tell(tuple(self._heard), {"type": "beat"})

    def _ask_slurm(self, now: float) -> list[Effect]:
        waiting = self.machine.joined or self.machine.unsettled
        if not (waiting and self.machine.wants_slurm):
            return []
        return [AskSlurm()] if self._slurm.ask(self.machine.forming_since, now) else []


def _end(ending: Ending) -> Message:
    return {"type": "end", "status": ending.status, "failure": ending.summary}


def placements(announce: Announce) -> Iterator[tuple[Agent, Message]]:
    """Yield what each member of a round is told, but for the store; constant size each."""
    start = announce.start
    world_size = sum(m.nproc for m in start.members)
    first_rank = 0
    for group_rank, agent in enumerate(start.members):
        yield agent, {
            "type": "round", "ask": announce.asks[agent], "record": announce.record,
            "number": start.number,
            "restarts": start.restarts, "group_rank": group_rank,
            "group_size": len(start.members), "first_rank": first_rank, "world_size": world_size,
        }  # fmt: skip
        first_rank += agent.nproc
