"""Group change: when a round is broken for nodes that join or leave (pure).

Newcomers   A newcomer waits while `should_scale_up` decides whether it is worth a restart.
            ``scale_up`` decides when: ``immediate``; ``checkpoint``: at a checkpoint, see below, or
            ``scale_up_timeout_s`` after the newcomer joined if the script announces none;
            ``on_restart``: when the round breaks for another reason.

Departures  A member is *preempted* if its node is to be left soon. Its round is broken at a
            checkpoint too. If there is none in time, its own agent leaves by the deadline. With
            more than `HASTE_S` left, the leader waits for further notices: a time limit comes to
            all nodes at once, and one checkpoint is enough for all.

At a checkpoint  The leader sends the members one *checkpoint request* at a time
            (`hpc_elastic.worker.shared_page`). The members agree on a step at which all ranks save
            (`hpc_elastic.step_agreement`). If the group is about to change when the step is
            confirmed, the request has ``pause``: all ranks stay at that checkpoint, so that the
            restart loses no step. If no worker polls steps, the request names the next checkpoint
            of each worker instead, until one does. The round is broken when all members are at the
            checkpoint. If the reason for the change goes away before, the members are released.

Times are monotonic seconds of the leader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from hpc_elastic._util import ThroughputMeter, counted
from hpc_elastic.rendezvous.effects import Effect, Note, Postpone, Send
from hpc_elastic.rendezvous.log_entry import Agent, RoundRules
from hpc_elastic.rendezvous.messages import CheckpointRequested
from hpc_elastic.site import StepTimeModel, most_useful_nodes
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.step_agreement import (
    AgreementState,
    Confirmation,
    Proposal,
    StepAgreement,
    StepVote,
)
from hpc_elastic.worker.shared_page import CheckpointRequest

HASTE_S = 10.0  # with less time left the leader waits for no further notices
GATHER_S = 2.0
AHEAD_S = 0.5  # a proposed step is this far ahead of the furthest member
NOT_PAUSED_S = 30.0
"""Delay of the next request after a checkpoint at which ranks did not stay as requested."""
STRAGGLE_S = 10.0
"""Time limit of members behind the first rank, which stays at the checkpoint. A script may announce
its boundaries only on the rank that writes the checkpoints."""
_MAX_NAMED = 5


class ChangeDecision(NamedTuple):
    """What a round does now."""

    effects: list[Effect]
    admits: bool  # whether the group admits the nodes that wait
    why: str | None = None  # why to break the round; None if it goes on
    step: int | None = None  # the step whose checkpoint all members have announced


class JoinCandidates(NamedTuple):
    """The nodes that wait to join the group."""

    joined: Mapping[Agent, float]  # agents, and since when each waits, the longest wait first
    view: Mapping[str, TaskState]
    outlook: Forecast
    growth: GrowthLimit


@dataclass
class CheckpointBarrier:
    """The last announced checkpoints of the members of a round.

    Workers announce every complete checkpoint. A worker that is to *pause* stays at the checkpoint
    that it announces. The group may be stopped once every member has announced that checkpoint: a
    member that passed it before the request arrived is stuck in a collective with those that stay.
    """

    seen: bool = False  # whether any worker of the run has announced a checkpoint yet
    announced: dict[Agent, int] = field(default_factory=dict)
    """The last step that all workers of a member have announced."""
    step: int | None = None  # the step at which a member stays; None if none does
    since: float = 0.0
    arrived: set[Agent] = field(default_factory=set)  # members that have announced ``step``

    def new_round(self) -> None:
        """Forget the announcements of the last round."""
        self.announced.clear()
        self.release()

    def release(self) -> None:
        """Members continue."""
        self.arrived.clear()
        self.step = None

    def announce(self, agent: Agent, step: int, pauses: bool, now: float) -> None:
        """Record a member's complete checkpoint of ``step``, at which it stays or continues."""
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
    """Preparation of a running round for the next one."""

    agreements: type[StepAgreement[Agent]] = StepAgreement

    def __init__(self, rules: RoundRules) -> None:
        self.rules = rules
        self.members: tuple[Agent, ...] = ()
        self.barrier = CheckpointBarrier()
        self.preempted: dict[Agent, str] = {}
        """Members that are to leave soon, each with the reason."""
        self.end_round()

    def new_round(self, members: tuple[Agent, ...]) -> None:
        """A round has closed: its workers have fresh pages and no steps."""
        self.members = members
        self.barrier.new_round()
        self._reset_agreement()

    def end_round(self) -> None:
        """The round is over, with all requests to its members."""
        self.preempted.clear()
        self._first_deadline = self._gather_until = math.inf
        """Of the preempted members; and when the leader stops waiting for further notices."""
        self._logged: tuple[int, int] | None = None
        """The scale-up decision that was logged last: how many of how many nodes are admitted."""
        self._reset_agreement()

    def _reset_agreement(self) -> None:
        self.agreement = self.agreements(AHEAD_S)
        self._is_wanted = False
        """Whether a worker has requested a checkpoint since the last agreement."""
        self._is_needed = False  # whether the group is to change at the agreed step
        self._pause: CheckpointRequest | None = None
        """The open, confirmed request to stay at a checkpoint; None if there is none."""

    def announced(self, agent: Agent, step: int, paused: int, now: float) -> None:
        """All workers of a member have announced the checkpoint of a step.

        ``paused`` is the number of the request for which some of them stay there; 0 if none stays.
        """
        stays = self._pause is not None and paused == self._pause.number
        self.barrier.announce(agent, step, stays, now)

    def noticed(self, agent: Agent, reason: str, left_s: float, now: float) -> list[Effect]:
        """A member is to leave within ``left_s``."""
        self.preempted[agent] = reason
        self._first_deadline = min(self._first_deadline, now + left_s)
        self._gather_until = min(self._gather_until, now + GATHER_S)
        self.agreement.hurry()
        return [preemption_note(agent, reason, left_s)]

    def want_checkpoint(self) -> None:
        """A worker requests a checkpoint of the whole group."""
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
    def is_quiet(self) -> bool:
        """Whether no change or checkpoint is pending, as nearly always."""
        idle = self.agreement.state is AgreementState.IDLE and not self._is_wanted
        return idle and not self.preempted and self._pause is None and self._logged is None

    @property
    def _pauses_next(self) -> bool:
        """Whether each worker is to stay at its next checkpoint."""
        return self._pause is not None and self._pause.step is None

    def consider(self, waiting: JoinCandidates, now: float, *, finishing: bool) -> ChangeDecision:
        """Decide whether to go on, to prepare a change, or to break the round.

        Once a member is done (``finishing``), no agreement on a step is possible any more.
        """
        effects, admits = self._weigh_candidates(waiting)
        if admits and self.rules.scale_up == "immediate":
            return ChangeDecision(effects, admits, self._reason(waiting, admits=True))
        if not (admits or self._may_leave(now)):
            effects += [*self._release(), *self._advance_agreement(False, finishing, now)]
            return ChangeDecision(effects, admits)
        reason = self._reason(waiting, admits=admits)
        step = self.barrier.reached(self.members, now)
        is_agreed = self.agreement.state is not AgreementState.IDLE
        if step is not None and (not is_agreed or step >= self.agreement.step):
            reason = f"{reason}, at the checkpoint of step {step}"
            return ChangeDecision(effects, admits, reason, step)
        if admits and self._is_waiting_pointless(waiting, now):
            reason = f"{reason}; the script announces no checkpoints"
            return ChangeDecision(effects, admits, reason)
        effects += self._advance_agreement(True, finishing, now)
        return ChangeDecision(effects, admits)

    def _weigh_candidates(self, waiting: JoinCandidates) -> tuple[list[Effect], bool]:
        """Return whether the group admits newcomers, and the event if that has changed."""
        if not waiting.joined:
            self._logged = None
            return [], False
        stay = len(self.members) - len(self.preempted)
        most, room = waiting.growth.max_nodes, self.rules.max_nodes - stay
        wanted = self.rules.usable_nodes(min(most, stay + len(waiting.joined))) - stay
        if wanted > 0:
            states = (waiting.view.get(a.task) for a in list(waiting.joined)[:wanted])
            left = [state.time_left_s if state is not None else None for state in states]
            decision = should_scale_up(len(self.members), left, waiting.outlook)
            admitted = self.rules.usable_nodes(stay + decision.admit)
            if 0 < decision.admit < wanted and admitted <= stay:
                decision = ScaleUpDecision(0, "too few of them stay for long enough")
        elif most <= stay < self.rules.max_nodes:
            decision = ScaleUpDecision(0, waiting.growth.why)
        elif room > 0:
            more = next((size for size in self.rules.sizes if size > stay), stay) - stay
            decision = ScaleUpDecision(0, f"the group grows by {more} nodes at a time")
        else:
            decision = ScaleUpDecision(0, "the group has its max nodes")
        effects: list[Effect] = []
        if self._logged != (decision.admit, len(waiting.joined)):
            self._logged = (decision.admit, len(waiting.joined))
            tasks = [a.task for a in waiting.joined][:20]
            when = self.rules.scale_up if decision.admit else "not now"
            fields = {"waiting": tasks, "admit": when, "why": decision.why}
            effects.append(Note("scale_up_decision", fields))
        return effects, decision.admit > 0 and self.rules.scale_up != "on_restart"

    def _may_leave(self, now: float) -> bool:
        """Return whether preempted members leave at the next checkpoint."""
        if not self.preempted:
            return False
        are_all = len(self.preempted) == len(self.members)
        return are_all or now >= self._gather_until or self._first_deadline - now <= HASTE_S

    def _reason(self, waiting: JoinCandidates, *, admits: bool) -> str:
        """Return the nodes that join and leave, as text."""
        parts = [f"{_names(waiting.joined)} joins"] if admits else []
        if self.preempted:
            reason = next(iter(self.preempted.values()))
            parts.append(f"{_names(self.preempted)} leaves ({reason})")
        return ", ".join(parts)

    def _is_waiting_pointless(self, waiting: JoinCandidates, now: float) -> bool:
        """Return whether no checkpoint was announced while newcomers waited for the time-out."""
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

    def _advance_agreement(self, is_needed: bool, finishing: bool, now: float) -> list[Effect]:
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
        return [Send(self.members, CheckpointRequested(request))]


def preemption_note(agent: Agent, reason: str, left_s: float) -> Note:
    """Return the event of a member that is to leave within ``left_s``."""
    fields = {"task": agent.task, "host": agent.host, "reason": reason}
    return Note("preemption_notice", {**fields, "left_s": round(left_s, 1)})


def _names(agents: Mapping[Agent, object]) -> str:
    return ", ".join(a.host for a in list(agents)[:_MAX_NAMED])


@dataclass(frozen=True)
class Forecast:
    """The rest of the run as the leader expects it; seconds, None if unknown."""

    remaining_s: float | None = None  # until the end of the training, at the present throughput
    restart_cost_s: float | None = None
    """From the stop of a group to the first step of the next one, as last measured."""
    round_s: float | None = None
    """Between two rounds that broke because nodes left or failed, on average."""


class ScaleUpDecision(NamedTuple):
    """The number of nodes to admit, and the reason as a sentence for the log."""

    admit: int
    why: str


def should_scale_up(
    members: int, newcomers_time_left_s: Sequence[float | None], outlook: Forecast
) -> ScaleUpDecision:
    """Decide how many waiting nodes are worth a restart; one without a time limit has None.

    A group of n nodes with r seconds of work left that admits k more has at best r * n / (n + k)
    left. It saves r * k / (n + k) seconds and pays one restart. Newcomers join without a restart of
    their own when the round breaks for another reason. Where rounds are short, since nodes are
    preempted, r is the time until then.
    """
    cost = outlook.restart_cost_s
    if cost is None:
        return ScaleUpDecision(len(newcomers_time_left_s), "no restart was measured yet")
    staying = [left for left in newcomers_time_left_s if left is None or left > 2 * cost]
    if not staying:
        why = f"their wall time ends before a restart of {cost:.1f} s is repaid"
        return ScaleUpDecision(0, why)
    ends = [e for e in (outlook.remaining_s, outlook.round_s, *staying) if e is not None]
    if not ends:
        why = f"no end is in sight, and a restart costs {cost:.1f} s"
        return ScaleUpDecision(len(staying), why)
    saved = min(ends) * len(staying) / (members + len(staying))
    until = " until nodes leave again" if min(ends) == outlook.round_s else ""
    why = (
        f"{counted(len(staying), 'more node')} would save about {saved:.0f} s of {min(ends):.0f} s"
        f"{until}, a restart costs {cost:.1f} s"
    )
    return ScaleUpDecision(len(staying) if saved > cost else 0, why)


_LEAST_DEPARTURES = 5
"""Fewer show no rate: they may be one burst, e.g. two nodes that somebody asks to leave."""
MEASURED_STEPS = 20  # steps of a round from which on its step time is known


class ProgressEstimator:
    """Forecast of the run from the progress of its workers; monotonic seconds of the leader.

    ``step_times`` (by number of nodes) are those that an earlier leader has measured.
    """

    def __init__(self, step_times: Mapping[int, float] = MappingProxyType({})) -> None:
        self.total: int | None = None  # steps of the training; None if unknown
        self._step_times = dict(step_times)
        self._nodes = 0
        self._broken_at: float | None = None
        self._closed_at: float | None = None
        self._began_at: float | None = None  # when the first round of this leader closed
        self._last_at = 0.0  # of any event
        self._num_departures = 0
        self._cost_s: float | None = None
        self._first_step: int | None = None
        self._last_step: int | None = None
        self._meter = ThroughputMeter(math.inf)

    def on_break(self, now: float, *, departs: bool = False) -> None:
        """A round was broken; ``departs``: because nodes leave or have failed."""
        self._broken_at = self._last_at = now
        self._num_departures += departs

    def on_close(self, now: float, nodes: int = 0) -> None:
        """A round of this many nodes has closed; 0: its step time is not to be kept."""
        self._step_times = self.step_times
        self._closed_at, self._nodes, self._first_step = now, nodes, None
        self._last_at = now
        if self._began_at is None:
            self._began_at = now
        self._last_step, self._meter = None, ThroughputMeter(math.inf)

    def record_step(self, step: int | None, total: int | None, now: float) -> None:
        """Record a step that a worker of the round reports."""
        if step is None or self._closed_at is None:
            return
        self._last_at = now
        if self._last_step is None:
            since = self._closed_at if self._broken_at is None else self._broken_at
            self._cost_s, self._broken_at = now - since, None
            self._first_step = step
        self.total, self._last_step = total, step
        self._meter.record_count(step, now)

    @property
    def step_times(self) -> dict[int, float]:
        """Seconds of a step by number of nodes, as measured last; sizes with few steps are out."""
        rate, steps = self._meter.rate, (self._last_step or 0) - (self._first_step or 0)
        if not rate or not self._nodes or steps < MEASURED_STEPS:
            return self._step_times
        return {**self._step_times, self._nodes: round(1.0 / rate, 6)}

    @property
    def outlook(self) -> Forecast:
        """The present forecast."""
        rate, remaining_s, round_s = self._meter.rate, None, None
        if self.total is not None and self._last_step is not None and rate:
            remaining_s = max(0, self.total - self._last_step) / rate
        if self._began_at is not None and self._num_departures >= _LEAST_DEPARTURES:
            round_s = (self._last_at - self._began_at) / self._num_departures
        return Forecast(remaining_s, self._cost_s, round_s)


HELD_S = 600.0
"""For how long pending tasks are held at a time: a new leader may not hold them any more."""
_HELD_AGAIN_S = 400.0
_LET_START_S = 10.0  # longer than a task that requeues itself takes to end (`slurm.requeue`)
_WEIGH_EVERY_S = 10.0
_CERTAINTY = 1.1  # held tasks may start again if a further node adds this many times the least part


class GrowthLimit:
    """Whether a run holds its pending tasks; monotonic seconds of the leader.

    A run with ``min_efficiency`` grows up to the size beyond which a further node adds less than
    that part of a node's share (`site.value`). With ``sweep_growth=soonest`` it grows while further
    nodes are worth more to it than to the other runs of the user (`site.siblings`). A run that has
    its size *holds* its pending tasks: they stay away from the queue, and may start again when that
    changes. It releases no node for this.
    """

    def __init__(self, rules: RoundRules) -> None:
        self.rules = rules
        self.share = math.inf  # number of nodes up to which the run grows beside other runs
        self.holds = False
        self.max_nodes = rules.max_nodes  # the size up to which it grows
        self.why = ""  # why it grows no further
        self._weighed_at = self._held_at = -math.inf
        self._nodes = 0

    def weigh(self, nodes: int, step_times: Mapping[int, float], now: float) -> list[Effect]:
        """Hold the pending tasks of a run of ``nodes``, or let them start, if that is to change."""
        if nodes == self._nodes and now - self._weighed_at < _WEIGH_EVERY_S:
            return []
        self._nodes, self._weighed_at = nodes, now
        self.max_nodes, self.why = self._largest_size(step_times)
        had_held, self.holds = self.holds, self.max_nodes <= nodes < self.rules.max_nodes
        if self.holds == had_held and (not had_held or now - self._held_at < _HELD_AGAIN_S):
            return []
        self._held_at = now
        postpone = Postpone(HELD_S if self.holds else _LET_START_S)
        fields = {"nodes": nodes, "grows": not self.holds, "why": self.why}
        return [postpone] if self.holds == had_held else [Note("growth_decision", fields), postpone]

    def _largest_size(self, step_times: Mapping[int, float]) -> tuple[int, str]:
        """Return the size up to which the run grows, and the reason."""
        rules = self.rules
        most, why = rules.max_nodes, "no step times speak against further nodes"
        model = None if rules.min_efficiency is None else StepTimeModel.fit(step_times)
        if rules.min_efficiency is not None and model is not None:
            least = rules.min_efficiency * (_CERTAINTY if self.holds else 1.0)
            most = most_useful_nodes(model, least, rules.sizes)
            added = model.gain(min(most, rules.max_nodes - 1))
            why = (
                f"beyond {most} nodes a further node adds {max(0.0, added):.0%} of a node's share, "
                f"and launcher.min_efficiency is {rules.min_efficiency:.0%}"
            )
        if self.share < most:
            most = rules.usable_nodes(max(rules.min_nodes, int(self.share)))
            why = f"beyond {most} nodes, the next nodes are worth more to other runs of the user"
        return most, why
