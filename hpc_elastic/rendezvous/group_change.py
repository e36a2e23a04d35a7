"""Group change: when a round is broken for nodes that join, or that are to be left (pure).

Newcomers   A newcomer parks. Whether it is worth a restart is weighed (`group_change`); when, is
            ``scale_up``: ``immediate``; ``checkpoint``: at a checkpoint, see below, or, where the
            script makes none that it announces, ``scale_up_timeout_s`` after the newcomer came;
            ``on_restart``: the newcomer is taken in when the round breaks for another reason.

Departures  A member whose node is to be left soon is *under notice*. Its round is broken at a
            checkpoint too. If there is none in time, the member leaves by its deadline, as its own
            agent decides. Where there is more than `HASTE_S` left, others are waited for: a time
            limit comes to all nodes at once, and one checkpoint does for all.

At a checkpoint  The members are asked to *hold* at their next checkpoint, and then to agree on a
            step at which all ranks make one (`hpc_elastic.step_agreement`): no step is made that
            the restart would undo. The request to hold is sent before the confirmation, so that a
            rank that is to save at a step is also to stay there. The round is broken when all are
            there. A rank that holds goes on if a later step is proposed, or ranks that hold at
            different checkpoints would wait for each other; so no checkpoint before that step
            counts.

Times are monotonic seconds of the leader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

HASTE_S = 10.0
"""With less time left nobody else is waited for."""
GATHER_S = 2.0
AHEAD_S = 0.5
"""A step is proposed so far ahead of the furthest member."""
NOT_HELD_S = 30.0
"""Ranks that do not hold where they should make no other checkpoint for so long."""
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
# Workers announce every checkpoint that is complete. Once nodes wait to be admitted, the members
# are asked to *hold*: the next worker that announces a boundary stays there, so that no later
# step is made that the restart would undo. The group may be stopped once every member has
# announced that boundary: those that had passed it before they were asked are stuck in a
# collective with those that hold.


@dataclass
class CheckpointBarrier:
    """The announcements of one round, as the leader hears of them."""

    seen: bool = False
    """Whether any worker of the run has announced one yet."""
    announced: dict[Agent, int] = field(default_factory=dict)
    """The last step that all workers of a member have announced."""
    held_step: int | None = None
    held_since: float = 0.0
    arrived: set[Agent] = field(default_factory=set)
    """Members that have announced ``held_step``."""

    def new_round(self) -> None:
        """Forget what the last round's members announced."""
        self.announced.clear()
        self.let_go()

    def let_go(self) -> None:
        """The members are not to hold any more: their next boundary counts, not the last one."""
        self.arrived.clear()
        self.held_step = None

    def announce(self, agent: Agent, step: int, held: bool, now: float) -> None:
        """A member has a complete checkpoint of ``step``, and holds there or goes on."""
        self.seen = True
        self.announced[agent] = step
        if held and (self.held_step is None or step > self.held_step):
            self.held_step, self.held_since = step, now
            self.arrived = {a for a, s in self.announced.items() if s >= step}
        elif self.held_step is not None and step >= self.held_step:
            self.arrived.add(agent)

    def reached(self, members: Sequence[Agent], now: float) -> int | None:
        """Return the step at which all members have arrived; None before."""
        if self.held_step is None or not members:
            return None
        everybody = len(self.arrived) >= len(members)
        first_only = members[0] in self.arrived and now - self.held_since >= STRAGGLE_S
        return self.held_step if everybody or first_only else None


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
        self._held_step: int | None = None
        """The last step that was confirmed for a change of the group."""
        self._holding = False
        self._num_holds = 0
        self._noted: tuple[int, int] | None = None
        """The growth decision that was logged last: how many of how many are wanted."""

    def new_round(self, members: tuple[Agent, ...]) -> None:
        """A round has closed: its workers have fresh pages, and have passed nothing."""
        self.members = members
        self.barrier.new_round()
        self._reset_agreement()

    def end_round(self) -> None:
        """The round is over, and with it all that was asked of its members."""
        self._holding, self._noted = False, None
        self.preempted.clear()
        self._soonest = self._gathered = math.inf
        self._reset_agreement()

    def _reset_agreement(self) -> None:
        self.agreement = self.agreements(AHEAD_S)
        self._is_wanted = self._is_needed = False
        self._held_step = None

    # ---- reports of members -------------------------------------------------------------

    def announced(self, agent: Agent, step: int, held: int, now: float) -> None:
        """All workers of a member have announced the checkpoint of a step.

        If it is the confirmed one, no proposal can overwrite that any more, and a later one must
        come where other members hold further on.
        """
        agreed = self._held_step
        stays = self._holding and (held == self._num_holds or step == agreed)
        self.barrier.announce(agent, step, stays, now)
        if self.agreement.state is AgreementState.CONFIRMED and step >= self.agreement.step:
            self._pass_step(agent, now)

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
        """A member votes on a proposal, or has passed the confirmed step."""
        agreement = self.agreement
        if agreement.state is AgreementState.CONFIRMED:
            passed = vote.passed is not None and vote.passed > agreement.step
            if vote.number == agreement.number and passed:
                self._pass_step(agent, now)
            return []
        step = agreement.vote(agent, vote, now)
        if isinstance(step, Confirmation):
            self._is_wanted = False
            self._held_step = agreement.step if self._is_needed else self._held_step
        elif step is not None and not step.number and not self._is_needed:
            self._is_wanted = False  # the script does not ask whether to save
        return self._send(step)

    # ---- rules --------------------------------------------------------------------------

    @property
    def ahead(self) -> int:
        """The step that is proposed or confirmed; 0: none."""
        return 0 if self.agreement.state is AgreementState.IDLE else self.agreement.step

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is going on, as nearly always."""
        idle = self.agreement.state is AgreementState.IDLE and not self._is_wanted
        return idle and not self.preempted and not self._holding and self._noted is None

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
            effects += [*self._hold(False), *self._agree(False, finishing, now)]
            return ChangeDecision(effects, admits)
        reason = self._reason(waiting, admits=admits)
        step = self.barrier.reached(self.members, now)
        if step is not None and step >= self.ahead:
            reason = f"{reason}, at the checkpoint of step {step}"
            return ChangeDecision(effects, admits, reason, step)
        if admits and self._is_pointless(waiting, now):
            reason = f"{reason}; the script announces no checkpoints"
            return ChangeDecision(effects, admits, reason)
        effects += [*self._hold(True), *self._agree(True, finishing, now)]
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
        """Tell whether members under notice are to be let go at the next checkpoint."""
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
        """Tell whether newcomers have waited in vain for a checkpoint that is announced."""
        if self.barrier.seen:
            return False
        since = next(iter(waiting.joined.values()))
        agreement = self.agreement
        if agreement.furthest is not None and agreement.state is not AgreementState.IDLE:
            since = max(since, agreement.since)
        return now - since >= self.rules.scale_up_timeout_s

    def _hold(self, on: bool) -> list[Effect]:
        if on == self._holding:
            return []
        self._holding = on
        if not on:
            self.barrier.let_go()
            self._held_step = None
            return [Send(self.members, {"type": "hold", "number": 0})]
        return self._request_hold()

    def _request_hold(self) -> list[Effect]:
        self._num_holds += 1
        return [Send(self.members, {"type": "hold", "number": self._num_holds})]

    def _agree(self, is_needed: bool, finishing: bool, now: float) -> list[Effect]:
        """Go on with the agreement; ask members to hold anew where a proposal is withdrawn.

        For a step that was proposed, members went on from a checkpoint at which they held.
        """
        ahead = self.ahead
        if finishing:
            step: Proposal | None = self.agreement.withdraw(now)
            self._is_wanted = self._is_wanted and step is None
        else:
            step = self._advance_agreement(is_needed, now)
        effects = self._send(step)
        if self.ahead < ahead and self._holding:
            self.barrier.let_go()
            effects += self._request_hold()
        return effects

    def _advance_agreement(self, is_needed: bool, now: float) -> Proposal | None:
        if is_needed and not self._is_needed:
            self.agreement.hurry()
        self._is_needed = is_needed
        if not (is_needed or self._is_wanted):
            return self.agreement.withdraw(now)
        if self.agreement.is_late(now):
            return self.agreement.withdraw(now)
        return self.agreement.begin_agreement(self.members, now)

    def _pass_step(self, agent: Agent, now: float) -> None:
        agreement = self.agreement
        agreement.pass_step(agent)
        if agreement.state is AgreementState.IDLE and agreement.step == self._held_step:
            agreement.pause(NOT_HELD_S, now)

    def _send(self, step: Proposal | Confirmation | None) -> list[Effect]:
        match step:
            case None:
                return []
            case Proposal(number, at):
                return [Send(self.members, {"type": "propose", "number": number, "step": at})]
            case Confirmation(number):
                return [Send(self.members, {"type": "confirm", "number": number})]


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
