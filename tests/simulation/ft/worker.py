"""A training process: its steps and its link (`ft.manager_client`), as the Manager has them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from hpc_elastic.ft import quorum
from hpc_elastic.ft.messages import (
    NO_QUORUM,
    CancelRequest,
    CheckpointBeforeLeave,
    ConfirmSwitch,
    LeaveGranted,
    Message,
    ProposeSwitch,
    QuorumAborted,
    QuorumRequest,
    QuorumResult,
    QuorumResults,
    Shutdown,
)
from simulation.ft.meeting import Meeting
from simulation.ft.scenario import Kind
from simulation.world import Process

if TYPE_CHECKING:
    from simulation.ft.group import Group

_BETWEEN_S = 0.0005


class Doing(Enum):
    """Where in a step a worker is."""

    SETTLING = "waits at the end of the step before a proposed call"
    WAITING = "waits at a proposed call"
    ASKING = "asks"
    CONFIGURING = "configures"
    HEALING = "heals"
    COMPUTING = "computes"
    REDUCING = "reduces"
    SERVING = "serves its state"
    OVER = "is over"


@dataclass(frozen=True)
class State:
    """Parameters: what they went through, as one number."""

    step: int
    state_version: str
    history: int


class Worker:
    """One life of a group's worker."""

    def __init__(self, group: Group, number: int) -> None:
        self.name = f"{group.name}.{number}"
        self.process = Process()
        self.steps = group.sim.parts.steps(is_single=True)
        self.state = State(0, f"fresh {self.name}", hash((group.sim.seed, self.name)))
        self.doing = Doing.COMPUTING
        self.waits_since = math.inf
        self.commits = 0
        self.saves = group.sim.seed % 4 != 0
        """Its script asks after each step whether to save."""
        self.saved: State | None = None
        """As the last that may."""
        self.place: QuorumResult | None = None
        self.fails_next = False
        self.ends_next = False
        self._group = group
        self._sim = group.sim
        self._world = group.sim.world
        self._meeting: Meeting | None = None
        self._is_failed = False
        self._failures = 0
        self._asks = 0
        self._healed: State | None = None
        self._snapshot = self.state
        self._contributors: tuple[str, ...] = ()
        self._fetching: set[str] = set()
        """Who fetches this worker's state."""

    def is_reachable(self, since: float) -> bool:
        """Whether its group has had a keeper all the time."""
        return self._group.up_since <= since

    # ---- a step ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step: `Manager.start_quorum`."""
        self.steps.start_step(self._world.now)
        if self.steps.is_undecided and not self._is_failed:
            self._wait(Doing.WAITING)
        else:
            self._decide()

    def _wait(self, doing: Doing) -> None:
        self.doing, self.waits_since = doing, self._world.now
        self._sim.monitor.waits(self)

    def _decide(self) -> None:
        steps = self.steps
        self.waits_since = math.inf
        steps.settle_step(steps.quorum_step)
        if self._is_failed or steps.must_request or steps.is_undecided:
            self._ask()
        else:
            self._compute()

    def _ask(self) -> None:
        self.doing = Doing.ASKING
        self._asks += 1
        state, steps = self.state, self.steps
        scenario = self._sim.scenario
        is_wild = scenario.kind is Kind.ALL
        is_calm = self._world.now >= scenario.calm_after_s
        may_shrink = is_wild and not is_calm and scenario.rules.min_replicas == 1
        shrink_only = may_shrink and self._world.rng.random() < 0.05
        self._send(
            QuorumRequest(
                steps.quorum_step,
                state.step,
                state.state_version,
                steps.quorum_id,
                self._failures,
                1,
                shrink_only,
                self.name,
                (self.name,),
                number=self._asks,
                is_saved=steps.is_saved,
            )
        )
        if is_wild and self._world.rng.random() < 0.2:
            patience_s = 4.0 * self._world.rng.random()
            self._world.after(patience_s, self.process, self._give_up, self._asks)

    def _give_up(self, asks: int) -> None:
        if self.doing is Doing.ASKING and asks == self._asks:
            self._send(CancelRequest())
            self._ask()

    def _placed(self, results: QuorumResults) -> None:
        (place,) = results.ranks
        if self.doing is not Doing.ASKING or results.number != self._asks:
            self._send(QuorumAborted(place.quorum_id, "a worker had given up waiting for it"))
            return
        self.steps.enter_quorum(place.quorum_id)
        self.place, self.doing = place, Doing.CONFIGURING
        self._snapshot, self._healed = self.state, None
        self._leave_meeting()
        self._meeting = self._sim.meeting(place)
        self._fetching = {f"{place.quorum_id} {rank}" for rank in place.first_source_of}
        self._meeting.join(place.replica_rank, self)

    def configured(self, quorum_id: int) -> None:
        """All members have met."""
        if quorum_id != self.steps.quorum_id or self.doing is not Doing.CONFIGURING:
            return
        assert self.place is not None and self._meeting is not None
        if not self.place.heals:
            self._compute()
            return
        self.doing = Doing.HEALING
        rank = self.place.sources[0].replica_rank
        delay = self._sim.scenario.heal_s * (0.5 + self._world.rng.random())
        self._world.after(delay, self.process, self._fetched, quorum_id, rank)

    def _fetched(self, quorum_id: int, rank: int) -> None:
        if quorum_id != self.steps.quorum_id or self.doing is not Doing.HEALING:
            return
        assert self.place is not None and self._meeting is not None
        source = self._meeting.members[rank]
        is_there = source.process.alive and not source.process.paused
        if not is_there or source.steps.quorum_id != quorum_id:
            self.failed(quorum_id, 0, "its source is gone")
            return
        self._sim.monitor.heals += 1
        self._healed = source.served(f"{quorum_id} {self.place.replica_rank}")
        if self._everyone:
            self._apply_healed()
        self._compute()

    def served(self, who: str) -> State:
        """A peer has fetched the state."""
        state = self._snapshot
        self._fetching.discard(who)
        if self.doing is Doing.SERVING and not self._fetching:
            self._world.after(_BETWEEN_S, self.process, self._go_on)
        return state

    def _compute(self) -> None:
        self.doing = Doing.COMPUTING
        took = self._group.step_s * (0.7 + 0.6 * self._world.rng.random())
        self._world.after(
            took, self.process, self._computed, self.steps.quorum_id, self.steps.quorum_step
        )

    def _computed(self, quorum_id: int, call: int) -> None:
        steps = self.steps
        if (quorum_id, call) != (
            steps.quorum_id,
            steps.quorum_step,
        ) or self.doing is not Doing.COMPUTING:
            return
        assert self.place is not None and self._meeting is not None
        self.doing = Doing.REDUCING
        if self.fails_next or steps.abort_reason is not None:
            self.fails_next = False
            self.failed(quorum_id, call, steps.abort_reason or "an error of its own")
            return
        place, all_give = self.place, call > 0 or self._everyone
        divisor = place.replica_world_size if all_give else place.cohort_size
        gives = all_give or not place.heals
        self._meeting.reduce(place.replica_rank, call, self.state if gives else None, divisor)

    @property
    def _everyone(self) -> bool:
        """Whether all contribute, because who heals has done so before the forward pass."""
        assert self.place is not None
        return self._sim.scenario.is_sync or self.place.max_step == 0

    # ---- its end --------------------------------------------------------------------------

    def reduced(self, quorum_id: int, call: int, contributors: tuple[str, ...]) -> None:
        """The mean is there."""
        if not self._is_at(quorum_id, call):
            return
        self._apply_healed()
        self._contributors = contributors
        if self._fetching and self.steps.abort_reason is None:
            self.doing = Doing.SERVING  # the state must not change while it is fetched
        else:
            self._commit()

    def _go_on(self) -> None:
        if self.doing is Doing.SERVING:
            self._commit()

    def _commit(self) -> None:
        num, state = len(self._contributors), self.state
        token = quorum.next_version(state.state_version, self.steps.quorum_id, num)
        self.state = State(state.step + 1, token, hash((state.history, self._contributors)))
        self._sim.monitor.has(self.name, self.state)
        self._sim.monitor.commits += 1
        self.commits += 1
        self._is_failed, self._failures = False, 0
        self._next()

    def _next(self) -> None:
        if self.ends_next:
            self.doing = Doing.OVER
            self._send(Shutdown())
            self._world.after(0.05, self.process, self._leave_meeting)
            return
        if self.saves and self.steps.is_next_undecided:
            self._wait(Doing.SETTLING)
        else:
            self._settle()

    def _settle(self) -> None:
        """The end of a step: `CheckpointPolicy.decide`."""
        self.waits_since = math.inf
        if self.saves:
            self.steps.settle_step(self.steps.quorum_step + 1)
            self.saved = self.state if self.steps.must_save else self.saved
        self.doing = Doing.OVER
        self._world.after(_BETWEEN_S, self.process, self.begin)

    def failed(self, quorum_id: int, call: int, why: str) -> None:
        """Something of this quorum failed: the step, if it has begun; else it asks again."""
        if quorum_id != self.steps.quorum_id:
            return
        if self.doing in (Doing.CONFIGURING, Doing.HEALING):
            self._report(why)
            self._ask()
        elif self._is_at(quorum_id, call):
            self._report(why)
            self._apply_healed()
            self._is_failed, self._failures = True, self._failures + 1
            self._sim.monitor.step_failed(self.name, why)
            self._next()

    def _is_at(self, quorum_id: int, call: int) -> bool:
        here = (self.steps.quorum_id, self.steps.quorum_step)
        return here == (quorum_id, call) and self.doing is Doing.REDUCING

    def _report(self, why: str) -> None:
        if self.steps.mark_aborted(self.steps.quorum_id, why):
            self._send(QuorumAborted(self.steps.quorum_id, why))
        self._leave_meeting()

    def _save(self) -> None:
        """There is no quorum for the step: it fails, and its end is for saving."""
        self.steps.require_save()
        self.doing, self._is_failed = Doing.OVER, True
        self._world.after(self._group.step_s, self.process, self._next)

    def _apply_healed(self) -> None:
        if self._healed is None:
            return
        assert self.place is not None
        same = (self._healed.step, self._healed.state_version) == (
            self.place.max_step,
            self.place.state_version,
        )
        self._sim.monitor.check(same, "healed to another state than was said", self.name)
        self.state, self._healed = self._healed, None
        self._sim.monitor.has(self.name, self.state)

    def _leave_meeting(self) -> None:
        if self._meeting is not None and self.place is not None:
            rank = self._rank_in(self._meeting)
            if rank is not None:
                self._meeting.leave(rank)

    def _rank_in(self, meeting: Meeting) -> int | None:
        return next((r for r, w in meeting.members.items() if w is self), None)

    def died(self) -> None:
        """It has ended: its connections are closed."""
        self._leave_meeting()

    # ---- the link -------------------------------------------------------------------------

    def heard(self, message: Message) -> None:
        """Its reading thread gets a message."""
        steps = self.steps
        match message:
            case QuorumResults():
                self._placed(message)
            case LeaveGranted():
                self.doing = Doing.OVER
                self._leave_meeting()
            case CheckpointBeforeLeave():
                if self.doing is Doing.ASKING:
                    self._save()
            case QuorumAborted():
                if steps.on_abort(message):
                    self._aborted(message)
            case ProposeSwitch():
                reply = steps.on_proposal(message, self._world.now)
                if reply is not None:
                    self._send(reply)
            case ConfirmSwitch():
                steps.on_confirmation(message)
        if self.doing is Doing.WAITING and not steps.is_undecided:
            self._decide()
        if self.doing is Doing.SETTLING and not steps.is_next_undecided:
            self._settle()

    def _aborted(self, aborted: QuorumAborted) -> None:
        self._leave_meeting()
        if self.doing is Doing.SERVING:
            self._commit()
        elif self.doing in (Doing.CONFIGURING, Doing.HEALING, Doing.REDUCING):
            self.failed(aborted.quorum_id, self.steps.quorum_step, aborted.reason)

    def _send(self, message: Message) -> None:
        self._group.from_worker(self, message)

    @property
    def is_done(self) -> bool:
        """Whether it ends, or has ended, in peace."""
        return self.ends_next

    @property
    def is_settled(self) -> bool:
        """Whether it is in a quorum that stands, as far as it knows."""
        return self.steps.quorum_id != NO_QUORUM and self.steps.abort_reason is None
