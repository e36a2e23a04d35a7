"""Group change: when a round is broken for nodes that join, or that are to be left (pure).

Newcomers   A newcomer parks. Whether it is worth a restart is weighed (`group_change`); when, is
            ``scale_up``: ``immediate``; ``checkpoint``: at a checkpoint, see below, or, where the
            script makes none that it announces, ``scale_up_timeout_s`` after the newcomer came;
            ``on_restart``: the newcomer is taken in when the round breaks for another reason.

Departures  A member whose node is to be left soon is *under notice*. Its round is broken at a
            checkpoint too. If there is none in time, the member leaves by its deadline, as its own
            agent decides. Where there is more than `HASTE_S` left, others are waited for: a time
            limit comes to all nodes at once, and one checkpoint does for all.

At a checkpoint  The leader sends the members one *checkpoint request* at a time
            (`hpc_elastic.worker.shared_page`). The members agree on a step at which all ranks save
            (`hpc_elastic.step_agreement`). If the group is about to change when the step is
            confirmed, the request says ``pause``: all ranks stay at that checkpoint, so that no
            step is made that the restart would undo. If no worker polls steps, the request names
            the next checkpoint of each worker instead, until one does. The round is broken when all
            members are at the checkpoint. If the reason for the change is gone before, the members
            are released.

Times are monotonic seconds of the leader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

from hpc_elastic._util import ThroughputMeter
from hpc_elastic.rendezvous.effects import Effect, Note, Send
from hpc_elastic.rendezvous.log_entry import Agent, RoundRules
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.step_agreement import (
    AgreementState,
    Confirmation,
    Proposal,
    StepAgreement,
    StepVote,
)
from hpc_elastic.worker.shared_page import CheckpointRequest

HASTE_S = 10.0
"""With less time left nobody else is waited for."""
GATHER_S = 2.0
AHEAD_S = 0.5
"""A step is proposed so far ahead of the furthest member."""
NOT_PAUSED_S = 30.0
"""After a checkpoint at which ranks did not stay as requested, the next one waits for so long."""
_NAMED = 5


@dataclass(frozen=True)
class PreemptedMember:
    """A member that is to leave by some time."""

    reason: str
    by: float


class ChangeDecision(NamedTuple):
    """What is to be done now."""

    effects: list[Effect]
    admits: bool
    """Whether nodes that wait are wanted."""
    why: str | None = None
    """Why the round is to be broken; None: it goes on."""
    step: int | None = None
    """The step whose checkpoint all members have announced."""


class JoinCandidates(NamedTuple):
    """The nodes that wait to be taken in, and what is known of them."""

    joined: Mapping[Agent, float]
    """Agents, and since when each waits, the longest first."""
    view: Mapping[str, TaskState]
    outlook: Forecast


# ---- Where the members of a round stand with their checkpoint boundaries (pure)
# Workers announce every checkpoint that is complete. A worker that is to *pause* stays at the one
# that it announces. The group may be stopped once every member has announced that checkpoint: those
# that had passed it before they saw the request are stuck in a collective with those that stay.


@dataclass
class CheckpointBarrier:
    """Where the members of a round stand, by their announcements of checkpoints."""

    seen: bool = False
    """Whether any worker of the run has announced a checkpoint yet."""
    announced: dict[Agent, int] = field(default_factory=dict)
    """The last step that all workers of a member have announced."""
    step: int | None = None
    """The step at which a member stays; None if none does."""
    since: float = 0.0
    arrived: set[Agent] = field(default_factory=set)
    """Members that have announced ``step``."""

    def new_round(self) -> None:
        """Forget what the last round's members announced."""
        self.announced.clear()
        self.release()

    def release(self) -> None:
        """Forget where the members stay, since they continue."""
        self.arrived.clear()
        self.step = None

    def announce(self, agent: Agent, step: int, pauses: bool, now: float) -> None:
        """A member has a complete checkpoint of ``step``, and stays there or continues."""
        self.seen = True
        self.announced[agent] = step
        if pauses and (self.step is None or step > self.step):
            self.step, self.since = step, now
            self.arrived = {a for a, s in self.announced.items() if s >= step}
        elif self.step is not None and step >= self.step:
            self.arrived.add(agent)

    def reached(self, members: Sequence[Agent], now: float) -> int | None:
        """Return the step at which all members have arrived; None before."""
        if self.step is None or not members:
            return None
        are_all = len(self.arrived) >= len(members)
        first_only = members[0] in self.arrived and now - self.since >= STRAGGLE_S
        return self.step if are_all or first_only else None


class GroupChange:
    """What a running round knows of the next one."""

    agreements: type[StepAgreement[Agent]] = StepAgreement

    def __init__(self, rules: RoundRules) -> None:
        self.rules = rules
        self.members: tuple[Agent, ...] = ()
        self.barrier = CheckpointBarrier()
        self.agreement = self.agreements(AHEAD_S)
        self.preempted: dict[Agent, PreemptedMember] = {}
        """Members under notice."""
        self._soonest = math.inf
        """The first of their deadlines."""
        self._gathered = math.inf
        """Until when others are waited for."""
        self._is_wanted = False
        """Whether a worker asks for a checkpoint, and no agreement has been reached since."""
        self._is_needed = False
        """Whether the group is to change at the step that is agreed on."""
        self._pause: CheckpointRequest | None = None
        """The confirmed request to stay at a checkpoint; None if there is none, or no more."""
        self._noted: tuple[int, int] | None = None
        """The growth decision that was logged last: how many of how many are wanted."""

    def new_round(self, members: tuple[Agent, ...]) -> None:
        """A round has closed: its workers have fresh pages, and have passed nothing."""
        self.members = members
        self.barrier.new_round()
        self._reset_agreement()

    def end_round(self) -> None:
        """The round is over, and with it all that was asked of its members."""
        self._noted = None
        self.preempted.clear()
        self._soonest = self._gathered = math.inf
        self._reset_agreement()

    def _reset_agreement(self) -> None:
        self.agreement = self.agreements(AHEAD_S)
        self._is_wanted = self._is_needed = False
        self._pause = None

    # ---- reports of members -------------------------------------------------------------

    def announced(self, agent: Agent, step: int, paused: int, now: float) -> None:
        """All workers of a member have announced the checkpoint of a step.

        Args:
            agent: The member.
            step: Optimizer steps done.
            paused: The number of the request for which some of them stay there; 0: none stays.
            now: The time.
        """
        stays = self._pause is not None and paused == self._pause.number
        self.barrier.announce(agent, step, stays, now)

    def noticed(self, agent: Agent, reason: str, left_s: float, now: float) -> list[Effect]:
        """A member is to leave within so long."""
        by = now + left_s
        self.preempted[agent] = PreemptedMember(reason, by)
        self._soonest = min(self._soonest, by)
        self._gathered = min(self._gathered, now + GATHER_S)
        self.agreement.hurry()
        return [preemption_note(agent, reason, left_s)]

    def want_checkpoint(self) -> None:
        """A worker asks for a checkpoint of the whole group."""
        self._is_wanted = True

    def voted(self, agent: Agent, vote: StepVote, now: float) -> list[Effect]:
        """A member votes on a request, or reports that it has passed a confirmed step."""
        agreement = self.agreement
        if vote.number != agreement.number:
            return []
        if agreement.state is AgreementState.CONFIRMED:
            if vote.passed is not None and vote.passed > agreement.step:
                agreement.pass_step(agent)
                if not agreement.awaited and self._pause is not None:
                    agreement.pause(NOT_PAUSED_S, now)
            return []
        if self._pauses_next and vote.passed is not None:  # the workers poll steps after all
            agreement.hurry()
            return self._begin_agreement(now)
        return self._send_agreed(agreement.vote(agent, vote, now))

    # ---- rules --------------------------------------------------------------------------

    @property
    def ahead(self) -> int:
        """The step that is proposed or confirmed; 0: none."""
        return 0 if self.agreement.state is AgreementState.IDLE else self.agreement.step

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is going on, as nearly always."""
        idle = self.agreement.state is AgreementState.IDLE and not self._is_wanted
        return idle and not self.preempted and self._pause is None and self._noted is None

    @property
    def _pauses_next(self) -> bool:
        """Whether each worker is to stay at its next checkpoint."""
        return self._pause is not None and self._pause.step is None

    def consider(self, waiting: JoinCandidates, now: float, *, finishing: bool) -> ChangeDecision:
        """Decide whether to go on, to prepare a change, or to break the round.

        Args:
            waiting: The nodes that wait.
            now: The time.
            finishing: Whether a member is done: no checkpoint can be agreed on any more.
        """
        effects, admits = self._weigh(waiting)
        if admits and self.rules.scale_up == "immediate":
            return ChangeDecision(effects, admits, self._reason(waiting, admits=True))
        if not (admits or self._may_leave(now)):
            effects += [*self._release(), *self._agree(False, finishing, now)]
            return ChangeDecision(effects, admits)
        reason = self._reason(waiting, admits=admits)
        step = self.barrier.reached(self.members, now)
        if step is not None and step >= self.ahead:
            reason = f"{reason}, at the checkpoint of step {step}"
            return ChangeDecision(effects, admits, reason, step)
        if admits and self._is_pointless(waiting, now):
            reason = f"{reason}; the script announces no checkpoints"
            return ChangeDecision(effects, admits, reason)
        effects += self._agree(True, finishing, now)
        return ChangeDecision(effects, admits)

    def _weigh(self, waiting: JoinCandidates) -> tuple[list[Effect], bool]:
        """Weigh the newcomers; note it if that has changed."""
        if not waiting.joined:
            self._noted = None
            return [], False
        decision = self._decide(waiting)
        effects: list[Effect] = []
        if self._noted != (decision.admit, len(waiting.joined)):
            self._noted = (decision.admit, len(waiting.joined))
            effects.append(self._note(decision, waiting))
        return effects, decision.admit > 0 and self.rules.scale_up != "on_restart"

    def _decide(self, waiting: JoinCandidates) -> ScaleUpDecision:
        room = self.rules.max_nodes - len(self.members) + len(self.preempted)
        if room <= 0:
            return ScaleUpDecision(0, "the group has its max nodes")
        states = (waiting.view.get(a.task) for a in list(waiting.joined)[:room])
        left = [state.time_left_s if state is not None else None for state in states]
        return should_scale_up(len(self.members), left, waiting.outlook)

    def _note(self, decision: ScaleUpDecision, waiting: JoinCandidates) -> Note:
        tasks = [a.task for a in waiting.joined][:20]
        when = self.rules.scale_up if decision.admit else "not now"
        return Note("scale_up_decision", {"waiting": tasks, "admit": when, "why": decision.why})

    def _may_leave(self, now: float) -> bool:
        """Return whether members under notice are to be let go at the next checkpoint."""
        if not self.preempted:
            return False
        everybody = len(self.preempted) == len(self.members)
        return everybody or now >= self._gathered or self._soonest - now <= HASTE_S

    def _reason(self, waiting: JoinCandidates, *, admits: bool) -> str:
        """Name the nodes that come and leave."""
        parts = []
        if admits:
            parts.append(_names(waiting.joined) + " joins")
        if self.preempted:
            reason = next(iter(self.preempted.values())).reason
            parts.append(f"{_names(self.preempted)} leaves ({reason})")
        return ", ".join(parts)

    def _is_pointless(self, waiting: JoinCandidates, now: float) -> bool:
        """Return whether no checkpoint was announced for the whole time that newcomers wait."""
        if self.barrier.seen:
            return False
        since = next(iter(waiting.joined.values()))
        agreement = self.agreement
        if agreement.furthest is not None and agreement.state is not AgreementState.IDLE:
            since = max(since, agreement.since)
        return now - since >= self.rules.scale_up_timeout_s

    def _release(self) -> list[Effect]:
        """Let members that stay at a checkpoint continue."""
        if self._pause is None:
            return []
        request, self._pause = replace(self._pause, released=True), None
        self.barrier.release()
        return self._send(request)

    def _agree(self, is_needed: bool, finishing: bool, now: float) -> list[Effect]:
        """Advance the agreement on the step of the next checkpoint."""
        agreement = self.agreement
        if is_needed and not self._is_needed:
            agreement.hurry()
        self._is_needed = is_needed
        if finishing or agreement.is_late(now) or not (is_needed or self._is_wanted):
            is_unanswered = is_needed and agreement.step == 0 and agreement.furthest is None
            withdrawn = agreement.withdraw(now)
            if withdrawn is None:
                return []
            if is_unanswered and not finishing:
                return self._send_agreed(withdrawn)
            self._is_wanted = self._is_wanted and not finishing
            return self._send(None)
        return [] if self._pauses_next else self._begin_agreement(now)

    def _begin_agreement(self, now: float) -> list[Effect]:
        proposal = self.agreement.begin_agreement(self.members, now)
        if proposal is not None:  # members that stay at a checkpoint continue
            self._pause = None
            self.barrier.release()
        return self._send_agreed(proposal)

    def _send_agreed(self, result: Proposal | Confirmation | None) -> list[Effect]:
        """Send the members what a vote has led to."""
        number, step = self.agreement.number, self.agreement.step
        match result:
            case None:
                return []
            case Confirmation():
                self._is_wanted = False
                request = CheckpointRequest(number, step, confirmed=True, pause=self._is_needed)
                self._pause = request if request.pause else None
                return self._send(request)
            case Proposal(0) if self._is_needed:  # no worker polls steps
                self._pause = CheckpointRequest(number, None, confirmed=True, pause=True)
                return self._send(self._pause)
            case Proposal(0):
                self._is_wanted = False
                return self._send(None)
            case Proposal():
                return self._send(CheckpointRequest(number, step))

    def _send(self, request: CheckpointRequest | None) -> list[Effect]:
        fields = None if request is None else asdict(request)
        return [Send(self.members, {"type": "checkpoint_request", "request": fields})]


def preemption_note(agent: Agent, reason: str, left_s: float) -> Note:
    """Return the event of a member that is to leave within so long."""
    fields = {"task": agent.task, "host": agent.host, "reason": reason}
    return Note("preemption_notice", {**fields, "left_s": round(left_s, 1)})


def _names(agents: Mapping[Agent, object]) -> str:
    return ", ".join(a.host for a in list(agents)[:_NAMED])


# ---- Whether a node that came late is worth the restart of the group (pure)
# A group of n nodes with r seconds of work left that takes k more in has r * n / (n + k) left at
# best; it saves r * k / (n + k) seconds, and pays one restart. `should_scale_up` compares them.


@dataclass(frozen=True)
class Forecast:
    """What a leader knows of the rest of the run; seconds, None where nothing is known."""

    remaining_s: float | None = None
    """Until the training is done, at the present pace."""
    restart_cost_s: float | None = None
    """From the stop of a group to the first step of the next one, as last measured."""


@dataclass(frozen=True)
class ScaleUpDecision:
    """Whether to admit, how many, and the reason as a sentence for the log."""

    admit: int
    why: str


def should_scale_up(
    members: int, newcomers_time_left_s: Sequence[float | None], outlook: Forecast
) -> ScaleUpDecision:
    """Decide how many of the nodes that wait are worth a restart.

    Args:
        members: Nodes that train now, at least 1.
        newcomers_time_left_s: Per node that waits, its wall time left; None where it has no end.
        outlook: What is known of the rest of the run.
    """
    cost = outlook.restart_cost_s
    if cost is None:
        return ScaleUpDecision(len(newcomers_time_left_s), "no restart was measured yet")
    staying = [left for left in newcomers_time_left_s if left is None or left > 2 * cost]
    if not staying:
        return ScaleUpDecision(
            0, f"their wall time ends before a restart of {cost:.1f} s is repaid"
        )
    ends = [end for end in (outlook.remaining_s, *staying) if end is not None]
    if not ends:
        return ScaleUpDecision(
            len(staying), f"no end is in sight, and a restart costs {cost:.1f} s"
        )
    saved = min(ends) * len(staying) / (members + len(staying))
    what = (
        f"{len(staying)} more nodes save about {saved:.0f} s of {min(ends):.0f} s, "
        f"a restart costs {cost:.1f} s"
    )
    return ScaleUpDecision(len(staying) if saved > cost else 0, what)


class ProgressEstimator:
    """Forecast of the run, from what the leader sees; times are its monotonic seconds."""

    def __init__(self) -> None:
        self.total: int | None = None
        """Steps of the training; None if unknown."""
        self._broken_at: float | None = None
        self._closed_at: float | None = None
        self._cost_s: float | None = None
        self._last_step: int | None = None
        self._meter = ThroughputMeter(math.inf)

    def broke(self, now: float) -> None:
        """A round was broken."""
        self._broken_at = now

    def closed(self, now: float) -> None:
        """A round was closed."""
        self._closed_at = now
        self._last_step, self._meter = None, ThroughputMeter(math.inf)

    def stepped(self, step: int | None, total: int | None, now: float) -> None:
        """A worker of the round reported a step."""
        if step is None or self._closed_at is None:
            return
        if self._last_step is None:
            since = self._closed_at if self._broken_at is None else self._broken_at
            self._cost_s, self._broken_at = now - since, None
        self.total, self._last_step = total, step
        self._meter.record_count(step, now)

    @property
    def outlook(self) -> Forecast:
        """What is known now."""
        return Forecast(self._remaining_s(), self._cost_s)

    def _remaining_s(self) -> float | None:
        rate = self._meter.rate
        if self.total is None or self._last_step is None or not rate:
            return None
        return max(0, self.total - self._last_step) / rate


STRAGGLE_S = 10.0
"""Members behind the first rank, which holds, are waited for this long. A script may announce its
boundaries on the rank that writes the checkpoints alone."""
