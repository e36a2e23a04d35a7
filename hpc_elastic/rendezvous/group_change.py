"""When a round is broken so that the group can change: nodes come, nodes are to be left (pure).

Newcomers   A newcomer parks. Whether it is worth a restart is weighed (`group_change`); when, is
            ``scale_up``: ``immediate``; ``checkpoint``: at a checkpoint, see below, or, where the
            script makes none that it announces, ``scale_up_timeout_s`` after the newcomer came;
            ``on_restart``: the newcomer is taken in when the round breaks for another reason.

Departures  A member whose node is to be left soon is *under notice*. Its round is broken at a
            checkpoint too. If there is none in time, the member leaves by its deadline, as its own
            agent decides. Where there is more than `HASTE_S` left, others are waited for: a time
            limit comes to all nodes at once, and one checkpoint does for all.

At a checkpoint  The members are asked to *hold* at their next checkpoint (`group_change`), and
then to
            agree on a step at which all ranks make one (`step_agreement`): no step is made that the
            restart would undo. The round is broken when all are there. A rank that holds goes on
            if a later step is proposed, or ranks that hold at different checkpoints would wait for
            each other; so no checkpoint before that step counts.

Times are monotonic seconds of the leader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hpc_elastic.rendezvous.effects import Action, Hold, Note
from hpc_elastic.rendezvous.log_entry import Agent, RoundRules
from hpc_elastic.rendezvous.step_agreement import AgreementState, StepAgreement, StepVote
from hpc_elastic.slurm.job_state import TaskState

HASTE_S = 10.0
"""With less time left nobody else is waited for."""
GATHER_S = 2.0
_NAMED = 5


@dataclass(frozen=True)
class PreemptedMember:
    """A member that is to leave by some time."""

    reason: str
    by: float


class ChangeDecision(NamedTuple):
    """What is to be done now."""

    actions: list[Action]
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


@dataclass
class GroupChange:
    """What a running round knows of the next one."""

    rules: RoundRules
    members: tuple[Agent, ...] = ()
    boundaries: CheckpointBarrier = field(default_factory=CheckpointBarrier)
    agreements: type[StepAgreement] = StepAgreement
    agreement: StepAgreement = field(default_factory=StepAgreement)
    departures: dict[Agent, PreemptedMember] = field(default_factory=dict)
    """Members under notice."""
    _soonest: float = math.inf
    """The first of their deadlines."""
    _gathered: float = math.inf
    """Until when others are waited for."""
    _holding: bool = False
    _num_holds: int = 0
    _noted: tuple[int, int] | None = None
    """The growth decision that was logged last: how many of how many are wanted."""

    def new_round(self, members: tuple[Agent, ...]) -> None:
        """A round has closed."""
        self.members = members
        self.boundaries.new_round()
        self.agreement = self.agreements(members)

    def broke(self) -> None:
        """The round is over, and with it all that was asked of its members."""
        self._holding, self._noted = False, None
        self.departures.clear()
        self._soonest = self._gathered = math.inf
        self.agreement = self.agreements()

    # ---- what members say ---------------------------------------------------------------

    def announced(self, agent: Agent, step: int, held: int, now: float) -> None:
        """All workers of a member have announced the checkpoint of a step."""
        agreed = self.agreement.held_step
        stays = self._holding and (held == self._num_holds or step == agreed)
        self.boundaries.announce(agent, step, stays, now)
        self.agreement.announced(agent, step, now)

    def noticed(self, agent: Agent, reason: str, left_s: float, now: float) -> list[Action]:
        """A member is to leave within so long."""
        by = now + left_s
        self.departures[agent] = PreemptedMember(reason, by)
        self._soonest = min(self._soonest, by)
        self._gathered = min(self._gathered, now + GATHER_S)
        self.agreement.hurry()
        return [Note("preemption_notice", {"task": agent.task, "host": agent.host, "reason": reason,
                                "left_s": round(left_s, 1)})]  # fmt: skip

    def wants_checkpoint(self) -> None:
        """A worker asks for a checkpoint of the whole group."""
        self.agreement.want()

    def answered(self, agent: Agent, answer: StepVote, now: float) -> list[Action]:
        """A member has answered a proposal."""
        return list(self.agreement.answered(agent, answer, now))

    # ---- rules --------------------------------------------------------------------------

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is going on, as nearly always."""
        agreement = self.agreement
        idle = agreement.state is AgreementState.IDLE and not agreement.wanted
        return idle and not self.departures and not self._holding and self._noted is None

    def consider(self, waiting: JoinCandidates, now: float, *, finishing: bool) -> ChangeDecision:
        """Decide whether to go on, to prepare a change, or to break the round.

        Args:
            waiting: The nodes that wait.
            now: The time.
            finishing: Whether a member is done: no checkpoint can be agreed on any more.
        """
        actions, admits = self._weigh(waiting)
        if admits and self.rules.scale_up == "immediate":
            return ChangeDecision(actions, admits, self._who(waiting, admits=True))
        if not (admits or self._may_leave(now)):
            actions += [*self._hold(False), *self._agree(False, finishing, now)]
            return ChangeDecision(actions, admits)
        who = self._who(waiting, admits=admits)
        step = self.boundaries.reached(self.members, now)
        if step is not None and step >= self.agreement.ahead:
            return ChangeDecision(actions, admits, f"{who}, at the checkpoint of step {step}", step)
        if admits and self._is_pointless(waiting, now):
            return ChangeDecision(actions, admits, f"{who}; the script announces no checkpoints")
        actions += [*self._hold(True), *self._agree(True, finishing, now)]
        return ChangeDecision(actions, admits)

    def _weigh(self, waiting: JoinCandidates) -> tuple[list[Action], bool]:
        """Weigh the newcomers; note it if that has changed."""
        if not waiting.joined:
            self._noted = None
            return [], False
        decision = self._decide(waiting)
        actions: list[Action] = []
        if self._noted != (decision.admit, len(waiting.joined)):
            self._noted = (decision.admit, len(waiting.joined))
            actions.append(self._note(decision, waiting))
        return actions, decision.admit > 0 and self.rules.scale_up != "on_restart"

    def _decide(self, waiting: JoinCandidates) -> ScaleUpDecision:
        room = self.rules.max_nodes - len(self.members) + len(self.departures)
        if room <= 0:
            return ScaleUpDecision(0, "the group has its max nodes")
        states = (waiting.view.get(a.task) for a in list(waiting.joined)[:room])
        left = [state.time_left_s if state is not None else None for state in states]
        return weigh(len(self.members), left, waiting.outlook)

    def _note(self, decision: ScaleUpDecision, waiting: JoinCandidates) -> Note:
        tasks = [a.task for a in waiting.joined][:20]
        when = self.rules.scale_up if decision.admit else "not now"
        return Note("scale_up_decision", {"waiting": tasks, "admit": when, "why": decision.why})

    def _may_leave(self, now: float) -> bool:
        """Tell whether members under notice are to be let go at the next checkpoint."""
        if not self.departures:
            return False
        everybody = len(self.departures) == len(self.members)
        return everybody or now >= self._gathered or self._soonest - now <= HASTE_S

    def _who(self, waiting: JoinCandidates, *, admits: bool) -> str:
        """Say who comes, and who leaves."""
        parts = []
        if admits:
            parts.append(_names(waiting.joined) + " joins")
        if self.departures:
            reason = next(iter(self.departures.values())).reason
            parts.append(f"{_names(self.departures)} leaves ({reason})")
        return ", ".join(parts)

    def _is_pointless(self, waiting: JoinCandidates, now: float) -> bool:
        """Tell whether newcomers have waited in vain for a checkpoint that is announced."""
        if self.boundaries.seen:
            return False
        since = next(iter(waiting.joined.values()))
        if self.agreement.furthest is not None and self.agreement.state is not AgreementState.IDLE:
            since = max(since, self.agreement.since)
        return now - since >= self.rules.scale_up_timeout_s

    def _hold(self, on: bool) -> list[Action]:
        if on == self._holding:
            return []
        self._holding = on
        if not on:
            self.boundaries.let_go()
            self.agreement.held_step = None
            return [Hold(self.members, 0)]
        self._num_holds += 1
        return [Hold(self.members, self._num_holds)]

    def _agree(self, needed: bool, finishing: bool, now: float) -> list[Action]:
        ahead = self.agreement.ahead
        if finishing:
            actions = list(self.agreement.take_back(now))
        else:
            actions = list(self.agreement.advance(needed, now))
        return actions + (self._hold_anew() if self.agreement.ahead < ahead else [])

    def _hold_anew(self) -> list[Action]:
        """Ask who holds still: for a step that was proposed, members went on from a boundary."""
        if not self._holding:
            return []
        self.boundaries.let_go()
        self._num_holds += 1
        return [Hold(self.members, self._num_holds)]


def _names(agents: Mapping[Agent, object]) -> str:
    return ", ".join(a.host for a in list(agents)[:_NAMED])


# ---- Whether a node that came late is worth the restart of the group (pure)
# A group of n nodes with r seconds of work left that takes k more in has r * n / (n + k) left at
# best; it saves r * k / (n + k) seconds, and pays one restart. `weigh` compares the two.


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


def weigh(
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


@dataclass
class ProgressEstimator:
    """Keeps the outlook up to date from what the leader sees; times are its monotonic seconds."""

    broken_at: float | None = None
    closed_at: float | None = None
    first: tuple[float, int] | None = None
    """When the round's first step was seen, and which it was."""
    last: tuple[float, int] | None = None
    total: int | None = None
    stop_s: float = 0.0
    cost_s: float | None = None

    def broke(self, now: float) -> None:
        """A round was broken."""
        self.broken_at = now

    def closed(self, now: float) -> None:
        """A round was closed."""
        self.stop_s = 0.0 if self.broken_at is None else now - self.broken_at
        self.closed_at, self.broken_at = now, None
        self.first = self.last = None

    def stepped(self, step: int | None, total: int | None, now: float) -> None:
        """A worker of the round reported a step."""
        if step is None or self.closed_at is None:
            return
        self.total = total
        if self.first is None:
            self.first = (now, step)
            self.cost_s = self.stop_s + now - self.closed_at
        self.last = (now, step)

    @property
    def outlook(self) -> Forecast:
        """What is known now."""
        return Forecast(self._remaining_s(), self.cost_s)

    def _remaining_s(self) -> float | None:
        if self.first is None or self.last is None or self.total is None:
            return None
        steps, seconds = self.last[1] - self.first[1], self.last[0] - self.first[0]
        if steps <= 0 or seconds <= 0:
            return None
        return max(0, self.total - self.last[1]) * seconds / steps


STRAGGLE_S = 10.0
"""Members behind the first rank, which holds, are waited for this long. A script may announce its
boundaries on the rank that writes the checkpoints alone."""
