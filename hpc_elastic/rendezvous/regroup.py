"""When a round is broken so that the group can change: nodes come, nodes are to be left (pure).

Newcomers   A newcomer parks. Whether it is worth a restart is weighed (`growth`); when, is
            ``grow``: ``now``; ``boundary``: at a checkpoint, see below, or, where the script makes
            none that it announces, ``grow_after_s`` after the newcomer came; ``never``: the
            newcomer is taken in when the round breaks for another reason.

Departures  A member whose node is to be left soon is *under notice*. Its round is broken at a
            checkpoint too. If there is none in time, the member leaves by its deadline, as its own
            agent decides. Where there is more than `HASTE_S` left, others are waited for: a time
            limit comes to all nodes at once, and one checkpoint does for all.

At a checkpoint  The members are asked to *hold* at their next checkpoint (`boundary`), and then to
            agree on a step at which all ranks make one (`agreement`): no step is made that the
            restart would undo. The round is broken when all are there. A rank that holds goes on
            if a later step is proposed, or ranks that hold at different checkpoints would wait for
            each other; so no checkpoint before that step counts.

Times are monotonic seconds of the leader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hpc_elastic.rendezvous.actions import Action, Hold, Note
from hpc_elastic.rendezvous.agreement import Agreement, Answer, State
from hpc_elastic.rendezvous.boundary import Boundaries
from hpc_elastic.rendezvous.growth import Decision, Outlook, weigh
from hpc_elastic.rendezvous.record import Agent
from hpc_elastic.rendezvous.rules import Rules
from hpc_elastic.slurm.states import TaskState

HASTE_S = 10.0
"""With less time left nobody else is waited for."""
GATHER_S = 2.0
_NAMED = 5


@dataclass(frozen=True)
class Departure:
    """A member that is to leave by some time."""

    reason: str
    by: float


class Considered(NamedTuple):
    """What is to be done now."""

    actions: list[Action]
    admits: bool
    """Whether nodes that wait are wanted."""
    why: str | None = None
    """Why the round is to be broken; None: it goes on."""
    step: int | None = None
    """The step whose checkpoint all members have announced."""


class Waiting(NamedTuple):
    """The nodes that wait to be taken in, and what is known of them."""

    joined: Mapping[Agent, float]
    """Agents, and since when each waits, the longest first."""
    view: Mapping[str, TaskState]
    outlook: Outlook


@dataclass
class Regroup:
    """What a running round knows of the next one."""

    rules: Rules
    members: tuple[Agent, ...] = ()
    boundaries: Boundaries = field(default_factory=Boundaries)
    agreements: type[Agreement] = Agreement
    agreement: Agreement = field(default_factory=Agreement)
    departures: dict[Agent, Departure] = field(default_factory=dict)
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
        self.departures[agent] = Departure(reason, by)
        self._soonest = min(self._soonest, by)
        self._gathered = min(self._gathered, now + GATHER_S)
        self.agreement.hurry()
        return [Note("notice", {"task": agent.task, "host": agent.host, "reason": reason,
                                "left_s": round(left_s, 1)})]  # fmt: skip

    def wants_checkpoint(self) -> None:
        """A worker asks for a checkpoint of the whole group."""
        self.agreement.want()

    def answered(self, agent: Agent, answer: Answer, now: float) -> list[Action]:
        """A member has answered a proposal."""
        return list(self.agreement.answered(agent, answer, now))

    # ---- rules --------------------------------------------------------------------------

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is going on, as nearly always."""
        agreement = self.agreement
        idle = agreement.state is State.IDLE and not agreement.wanted
        return idle and not self.departures and not self._holding and self._noted is None

    def consider(self, waiting: Waiting, now: float, *, finishing: bool) -> Considered:
        """Decide whether to go on, to prepare a change, or to break the round.

        Args:
            waiting: The nodes that wait.
            now: The time.
            finishing: Whether a member is done: no checkpoint can be agreed on any more.
        """
        actions, admits = self._weigh(waiting)
        if admits and self.rules.grow == "now":
            return Considered(actions, admits, self._who(waiting, admits=True))
        if not (admits or self._may_leave(now)):
            actions += [*self._hold(False), *self._agree(False, finishing, now)]
            return Considered(actions, admits)
        who = self._who(waiting, admits=admits)
        step = self.boundaries.reached(self.members, now)
        if step is not None and step >= self.agreement.ahead:
            return Considered(actions, admits, f"{who}, at the checkpoint of step {step}", step)
        if admits and self._is_pointless(waiting, now):
            return Considered(actions, admits, f"{who}; the script announces no checkpoints")
        actions += [*self._hold(True), *self._agree(True, finishing, now)]
        return Considered(actions, admits)

    def _weigh(self, waiting: Waiting) -> tuple[list[Action], bool]:
        """Weigh the newcomers; note it if that has changed."""
        if not waiting.joined:
            self._noted = None
            return [], False
        decision = self._decide(waiting)
        actions: list[Action] = []
        if self._noted != (decision.admit, len(waiting.joined)):
            self._noted = (decision.admit, len(waiting.joined))
            actions.append(self._note(decision, waiting))
        return actions, decision.admit > 0 and self.rules.grow != "never"

    def _decide(self, waiting: Waiting) -> Decision:
        room = self.rules.max_nodes - len(self.members) + len(self.departures)
        if room <= 0:
            return Decision(0, "the group has its max nodes")
        states = (waiting.view.get(a.task) for a in list(waiting.joined)[:room])
        left = [state.time_left_s if state is not None else None for state in states]
        return weigh(len(self.members), left, waiting.outlook)

    def _note(self, decision: Decision, waiting: Waiting) -> Note:
        tasks = [a.task for a in waiting.joined][:20]
        when = self.rules.grow if decision.admit else "not now"
        return Note("growth", {"waiting": tasks, "admit": when, "why": decision.why})

    def _may_leave(self, now: float) -> bool:
        """Tell whether members under notice are to be let go at the next checkpoint."""
        if not self.departures:
            return False
        everybody = len(self.departures) == len(self.members)
        return everybody or now >= self._gathered or self._soonest - now <= HASTE_S

    def _who(self, waiting: Waiting, *, admits: bool) -> str:
        """Say who comes, and who leaves."""
        parts = []
        if admits:
            parts.append(_names(waiting.joined) + " joins")
        if self.departures:
            reason = next(iter(self.departures.values())).reason
            parts.append(f"{_names(self.departures)} leaves ({reason})")
        return ", ".join(parts)

    def _is_pointless(self, waiting: Waiting, now: float) -> bool:
        """Tell whether newcomers have waited in vain for a checkpoint that is announced."""
        if self.boundaries.seen:
            return False
        since = next(iter(waiting.joined.values()))
        if self.agreement.furthest is not None and self.agreement.state is not State.IDLE:
            since = max(since, self.agreement.since)
        return now - since >= self.rules.grow_after_s

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
