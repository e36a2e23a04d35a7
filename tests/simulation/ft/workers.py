"""Workers of replica groups, and the process groups of their quorums, in virtual time.

A worker makes its steps as the Manager does, with the real `ft.manager_client.QuorumSteps`. In a
group of several workers each step has a collective of the group, which needs all of them, and ends
with a vote.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import blake2b
from typing import Any, Protocol

from hpc_elastic.ft import quorum
from hpc_elastic.ft.messages import (
    NO_QUORUM,
    CancelRequest,
    CheckpointBeforeLeave,
    CommitDecision,
    CommitVote,
    ConfirmSwitch,
    Hello,
    LeaveGranted,
    Message,
    ProposeSwitch,
    QuorumAborted,
    QuorumRequest,
    QuorumResult,
    QuorumResults,
    Shutdown,
    StateMismatch,
    SwitchRequest,
    Welcome,
)
from hpc_elastic.ft.state_check import Mismatch, StateDigest, detail_row
from simulation.ft.invariants import Kind, Monitor, Scenario, State
from simulation.world import Process, World

LOCAL_S = 0.0003
_BETWEEN_S = 0.0005
_MOST_PARTS = 6
_CHECK_EVERY = 5
"""Steps between two comparisons of the states."""
_WELCOME_S = 10.0
_VOTE_S, _FINAL_VOTE_S = 4.0, 2.0
_NO_QUORUM = "the step has no quorum: it is for saving"


class Doing(Enum):
    """The state of a worker in a step."""

    CONNECTING = "connects to its server"
    SETTLING = "waits at the end of the step before a proposed call"
    WAITING = "waits at a proposed call"
    REQUESTING = "requests a quorum"
    CONFIGURING = "configures"
    HEALING = "heals"
    COMPUTING = "computes"
    REDUCING = "reduces"
    VOTING = "waits for the votes of its group"
    SERVING = "serves its state"
    OVER = "is over"


class Link(Protocol):
    """A worker's connection to the server of its node (`simulation.ft.cluster.LocalPort`)."""

    is_open: bool

    def receive(self, message: Message) -> None:
        """Pass a message of the worker to the server."""


class Shared(Protocol):
    """What workers use of the objects of a schedule (`simulation.ft.cluster.Env`)."""

    seed: int
    catches_up: bool
    world: World
    scenario: Scenario
    monitor: Monitor
    components: Any

    def meeting(self, place: QuorumResult, group_rank: int) -> Meeting:
        """Return the process group of a quorum over the workers of one rank."""


def digest(*parts: object) -> int:
    """Return a hash that is the same in every process, as `hash` is not for text."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=7).digest())


@dataclass
class Placement:
    """What the workers of a group share that were started together.

    Attributes:
        name: Of the group and of this start.
        size: Number of workers.
        step_s: Mean duration of a step.
        ends_at: The script ends once this step is committed; None if it does not.
        yes: By quorum and step, the ranks that have voted to commit.
        commits: By quorum and step, the step and version of the state that a rank has committed.
    """

    name: str
    size: int
    step_s: float
    ends_at: int | None = None
    yes: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    commits: dict[tuple[int, int], tuple[int, str]] = field(default_factory=dict)
    arrived: dict[int, list[Worker]] = field(default_factory=dict)

    def join_collective(self, worker: Worker, number: int) -> None:
        """Add a worker to the collective of the group in a step; the last one completes it."""
        arrived = self.arrived.setdefault(number, [])
        arrived.append(worker)
        if len(arrived) < self.size:
            return
        del self.arrived[number]
        places = {(w.steps.quorum_id, w.steps.quorum_step) for w in arrived}
        worker.monitor.check(len(places) == 1, "ranks of a group part", self.name, places)
        for w in arrived:
            w.collective_done()


class Worker:
    """One worker of a group, until it dies.

    Attributes:
        uplink_since: Returns since when its group has been connected to the present keeper.
        die: Ends it, because of an error.
    """

    link: Link

    def __init__(
        self, env: Shared, placement: Placement, rank: int, group: Any, server_process: Process
    ) -> None:
        self.name = placement.name if placement.size == 1 else f"{placement.name}/{rank}"
        self.rank = rank
        self.group = group
        self.process = Process()
        self.monitor = env.monitor
        self.placement = placement
        self.steps = env.components.steps(is_single=placement.size == 1)
        self.state = State(0, f"fresh {self.name}", digest(env.seed, self.name))
        self.doing = Doing.CONNECTING
        self.waits_since = math.inf
        self.stopped_since: float | None = None
        """Since when a signal has stopped it."""
        self.commits = 0
        self.saves = env.seed % 4 != 0
        """Whether its script polls after each step whether to save."""
        self.saved: State | None = None
        """The state that it saved as the last member that could."""
        self.place: QuorumResult | None = None
        self.fails_next = False
        self.has_paused = False
        """Whether it was slow: its own wait may have ended meanwhile."""
        self._env = env
        self._world = env.world
        self._server_process = server_process
        self._meeting: Meeting | None = None
        self._is_failed = False
        self._failures = 0
        self.failed_heals = 0
        """Heals in a row that have failed."""
        self._num_requests = 0
        self._num_steps = 0
        self._error: str | None = None
        """Why this step of a group of several workers cannot be committed."""
        self._healed: State | None = None
        self._was_corrupted = False
        self._snapshot = self.state
        self._contributors: tuple[str, ...] = ()
        self._fetching: set[str] = set()
        """The peers that fetch this worker's state."""
        self.is_partial = False
        """It catches up: its parameters are of no step yet, and ``state`` names that of others."""
        self._parts_left = 0
        self.given: dict[tuple[int, int], State] = {}
        """Its states in the last steps, by quorum and step: what peers take over in parts."""

    @property
    def is_single(self) -> bool:
        """Whether it is the only worker of its group."""
        return self.placement.size == 1

    @property
    def ends_next(self) -> bool:
        """Whether its script ends once the present step is committed, or has ended."""
        return self.placement.ends_at is not None

    def connect(self) -> None:
        """Connect to the server, after its imports."""
        self._send(Hello(self.rank, self.placement.size, 1))
        self._world.after(_WELCOME_S, self.process, self._check_welcome)

    def _check_welcome(self) -> None:
        if self.doing is Doing.CONNECTING:
            self._die("its server does not answer")

    def server_lost(self) -> None:
        """The server has closed the connection: what waits for it ends with an error."""
        if self.doing in (
            Doing.CONNECTING, Doing.SETTLING, Doing.WAITING, Doing.REQUESTING, Doing.VOTING,
        ):  # fmt: skip
            self._die("its server is lost")
            return
        at, why = self.steps.quorum_id, "its server is lost"
        if not self.is_single and self.steps.mark_aborted(at, why):
            self.leave_meeting()
            if self.doing in (Doing.CONFIGURING, Doing.HEALING, Doing.REDUCING):
                self.failed(at, self.steps.quorum_step, why)

    def _die(self, why: str) -> None:
        self._world.log_event(self.name, "ends", why)
        self.group.worker_died(self)

    # ---- a step ---------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Start a step: `Manager.start_quorum`."""
        self._num_steps += 1
        self._error = None
        self.steps.start_step(self._world.now)
        if self.steps.is_undecided and not self._is_failed:
            self._wait(Doing.WAITING)
        else:
            self._decide()

    def _wait(self, doing: Doing) -> None:
        self.doing, self.waits_since = doing, self._world.now
        since = self.waits_since

        def waits() -> bool:
            is_connected = self.group.up_since <= since
            return self.process.alive and self.waits_since == since and is_connected

        self.monitor.worker_waits(self.name, waits)

    def _decide(self) -> None:
        steps = self.steps
        self.waits_since = math.inf
        steps.settle_step(steps.quorum_step)
        if self._is_failed or steps.must_request or steps.is_undecided:
            self._request_quorum()
            return
        if not self.is_single:
            self._error = steps.abort_reason
        self._compute()

    def _request_quorum(self) -> None:
        if not self.link.is_open:
            self._die("its server is lost")
            return
        self.doing = Doing.REQUESTING
        self._num_requests += 1
        state, steps = self.state, self.steps
        scenario = self._env.scenario
        is_wild = scenario.kind is Kind.ALL
        is_calm = self._world.now >= scenario.calm_after_s
        may_shrink = is_wild and not is_calm and scenario.rules.min_replicas == 1
        shrink_only = may_shrink and self._world.rng.random() < 0.05
        if self.is_partial:
            state = replace(state, step=-1, state_version=f"parts {self.name} {self._num_steps}")
        timeout_s = scenario.request_timeout_s
        if scenario.kind is Kind.LASTING and not self._env.components.waits_in_runs:
            timeout_s = timeout_s or 60.0
        failed_heals = self.failed_heals if self._env.components.counts_failed_heals else 0
        request = QuorumRequest(
            steps.quorum_step, state.step, state.state_version, steps.quorum_id, self._failures,
            1, shrink_only, self.name, (self.name,),
            number=self._num_requests, is_saved=steps.is_saved, catch_up=self._env.catches_up,
            timeout_s=timeout_s, heal_failures=failed_heals,
        )  # fmt: skip
        self._send(request)
        if timeout_s:
            self._world.after(timeout_s, self.process, self._time_out, self._num_requests)
        if is_wild and (self.is_single or not is_calm) and self._world.rng.random() < 0.2:
            timeout_s = 4.0 * self._world.rng.random()
            self._world.after(timeout_s, self.process, self._time_out, self._num_requests)

    def _time_out(self, number: int) -> None:
        """Request again; or raise an error, in a group of several workers."""
        if self.doing is not Doing.REQUESTING or number != self._num_requests:
            return
        if self._env.scenario.kind is Kind.LASTING:
            is_sound = self.commits > 0 and not self.has_paused  # a newcomer has a limit of its own
            self.monitor.check(not is_sound, "a sound worker gives up waiting", self.name)
        self._send(CancelRequest())
        if self.is_single:
            self._request_quorum()
        else:
            self._die("no quorum in time")

    def _enter_quorum(self, results: QuorumResults) -> None:
        (place,) = results.ranks
        if self.doing is not Doing.REQUESTING or results.number != self._num_requests:
            self._send(QuorumAborted(place.quorum_id, "a worker had given up waiting for it"))
            return
        self.steps.enter_quorum(place.quorum_id)
        progress = self._env.components.progress(self.state.step, 0, self.state.state_version)
        if not self.is_single and not progress.is_part_of(place):
            self._die("the ranks of its group have different states")
            return
        if self.is_partial and not place.heals:
            self._send(QuorumAborted(place.quorum_id, "a member's state is damaged"))
            self._die("it has parts of a state that no other has")
            return
        goes_on = self._was_corrupted and not place.heals and place.cohort_size > 1
        self.monitor.check(not goes_on, "a corrupted state goes on", self.name, place)
        self._was_corrupted = self._was_corrupted and place.heals
        self.place, self.doing = place, Doing.CONFIGURING
        self._snapshot, self._healed = replace(self.state, state_version=place.state_version), None
        self.leave_meeting()
        self._meeting = self._env.meeting(place, self.rank)
        self._fetching = {f"{place.quorum_id} {rank}" for rank in place.first_source_of}
        if place.catch_up:
            self._fetching.clear()
        self._meeting.join(place.replica_rank, self)

    def configured(self, quorum_id: int) -> None:
        """All members have joined the process group."""
        if quorum_id != self.steps.quorum_id or self.doing is not Doing.CONFIGURING:
            return
        assert self.place is not None and self._meeting is not None
        if self.place.heals and self.place.catch_up:
            self._begin_catch_up(self.place)
            self._compute()
            return
        self.is_partial = self.is_partial and self.place.heals
        if not self.place.heals:
            self.state = replace(self.state, state_version=self.place.state_version)
            self._compute()
            return
        self.doing = Doing.HEALING
        rank = self.place.sources[0].replica_rank
        delay = self._env.scenario.heal_s * (0.5 + self._world.rng.random())
        self._world.after(delay, self.process, self._fetched, quorum_id, rank)

    def _fetched(self, quorum_id: int, rank: int) -> None:
        if quorum_id != self.steps.quorum_id or self.doing is not Doing.HEALING:
            return
        assert self.place is not None and self._meeting is not None
        source = self._meeting.members[rank]
        is_there = source.process.alive and not source.process.paused
        if not is_there or source.steps.quorum_id != quorum_id:
            self.failed(quorum_id, 0, "its source is lost")
            return
        if self.group.first.cannot_heal:
            self.failed_heals += 1
            self.monitor.heal_failed(self.name)
            self.failed(quorum_id, 0, "the state was lost on its way")
            return
        self.failed_heals = 0
        self.monitor.heals += 1
        self._healed = source.served(f"{quorum_id} {self.place.replica_rank}")
        if self._was_corrupted:
            self._was_corrupted = False
            others = [m.snapshot for m in self._meeting.members.values() if m is not self]
            self.monitor.healed_corrupted(self.name, self._healed, others)
        if self._all_contribute:
            self._apply_healed()
        self._compute()

    def _begin_catch_up(self, place: QuorumResult) -> None:
        """Name the state of the others, unless the parts that have come are of it already."""
        if (self.state.step, self.state.state_version) != (place.max_step, place.state_version):
            num = self.state.history % _MOST_PARTS + 1
            self.state = State(place.max_step, place.state_version, 0)
            self.is_partial, self._parts_left = True, num

    def _take_part(self, call: int) -> None:
        """Take over a part of the state as of the beginning of this step; request a switch."""
        assert self.place is not None and self._meeting is not None
        if self.is_partial and call > 0:
            source = self._meeting.members[self.place.sources[0].replica_rank]
            given = source.given.get((self.steps.quorum_id, call))
            if given is None or not source.process.alive:
                return
            self._parts_left -= 1
            if self._parts_left <= 0:
                same = (given.step, given.state_version) == (
                    self.state.step,
                    self.state.state_version,
                )
                self.monitor.check(same, "caught up with another state", self.name, given)
                self.state, self.is_partial, self._was_corrupted = given, False, False
                self.monitor.caught_up += 1
                self.monitor.state_reached(self.name, self.rank, self.state)
        if not self.is_partial:
            self._send(SwitchRequest(self.steps.quorum_id))

    @property
    def snapshot(self) -> State:
        """The state with which it has entered its quorum."""
        return self._snapshot

    def served(self, peer: str) -> State:
        """A peer has fetched the state; return it."""
        state = self._snapshot
        self._fetching.discard(peer)
        if self.doing is Doing.SERVING and not self._fetching:
            self._world.after(_BETWEEN_S, self.process, self._commit_served)
        return state

    def _compute(self) -> None:
        self.doing = Doing.COMPUTING
        took = self.placement.step_s * (0.7 + 0.6 * self._world.rng.random())
        if self.is_single:
            self._world.after(took, self.process, self._computed, self._num_steps)
        else:
            self._world.after(took, self.process, self._join_collective, self._num_steps)

    def _join_collective(self, number: int) -> None:
        if number == self._num_steps:
            self.placement.join_collective(self, number)

    def collective_done(self) -> None:
        """The collective of the group has completed."""
        self._world.after(LOCAL_S, self.process, self._computed, self._num_steps)

    def _computed(self, number: int) -> None:
        steps = self.steps
        if number != self._num_steps or self.doing is not Doing.COMPUTING:
            return
        self.doing = Doing.REDUCING
        at = steps.quorum_id, steps.quorum_step
        if self._error is not None:
            self._fail_step(self._error)
            return
        if self.fails_next or steps.abort_reason is not None:
            self.fails_next = False
            self.failed(*at, steps.abort_reason or "an error of its own")
            return
        assert self.place is not None and self._meeting is not None
        place, all_give = self.place, steps.quorum_step > 0 or self._all_contribute
        all_give = all_give and not place.catch_up
        self.given = {k: v for k, v in self.given.items() if k[0] == at[0] and k[1] >= at[1] - 2}
        self.given[at] = self.state
        divisor = place.replica_world_size if all_give else place.cohort_size
        gives = all_give or not place.heals
        state = self.state if gives else None
        self._meeting.reduce(place.replica_rank, steps.quorum_step, state, divisor)

    @property
    def _all_contribute(self) -> bool:
        """Whether all members contribute, because they heal before the forward pass."""
        assert self.place is not None
        return self._env.scenario.is_sync or self.place.max_step == 0

    # ---- its end --------------------------------------------------------------------------

    def reduced(self, quorum_id: int, call: int, contributors: tuple[str, ...]) -> None:
        """The collective has completed."""
        if not self._is_at(quorum_id, call):
            return
        self._apply_healed()
        if self.place is not None and self.place.heals and self.place.catch_up:
            self._take_part(call)
        self._contributors = contributors
        if self.is_single:
            self._serve_or_commit()
        else:
            self._vote(commit=True)

    def _serve_or_commit(self) -> None:
        if self._fetching and self.steps.abort_reason is None:
            self.doing = Doing.SERVING  # the state must not change while it is fetched
        else:
            self._commit()

    def _commit_served(self) -> None:
        if self.doing is Doing.SERVING:
            self._commit()

    def _vote(self, *, commit: bool) -> None:
        """Vote as `ManagerClient.vote` does."""
        if not self.link.is_open:
            self._die("its server is lost")
            return
        self.doing = Doing.VOTING
        at = self.steps.quorum_id, self.steps.quorum_step
        yes = self.placement.yes.setdefault(at, set())
        if commit:
            yes.add(self.rank)
        self._send(CommitVote(*at, commit))
        self._world.after(_VOTE_S, self.process, self._vote_no, self._num_steps)

    def _vote_no(self, number: int) -> None:
        if number == self._num_steps and self.doing is Doing.VOTING:
            self._send(CommitVote(self.steps.quorum_id, self.steps.quorum_step, commit=False))
            self._world.after(_FINAL_VOTE_S, self.process, self._end_vote, number)

    def _end_vote(self, number: int) -> None:
        if number == self._num_steps and self.doing is Doing.VOTING:
            self._die("its server does not decide")

    def _decided(self, decision: CommitDecision) -> None:
        at = self.steps.quorum_id, self.steps.quorum_step
        if self.doing is not Doing.VOTING or (decision.quorum_id, decision.quorum_step) != at:
            return
        if decision.commit:
            has_all = len(self.placement.yes[at]) == self.placement.size
            self.monitor.check(has_all, "a commit without the votes of all ranks", self.name, at)
            self._serve_or_commit()
            return
        why = self._error or "another rank could not commit"
        self._report(why)
        self._is_failed, self._failures = True, self._failures + 1
        if self._error != _NO_QUORUM and self.steps.quorum_step > 0:
            self.monitor.step_failed(self.name, why)  # one that enters a quorum may cost a step
        self._end_step()

    def _commit(self) -> None:
        num, state = len(self._contributors), self.state
        token = quorum.next_version(state.state_version, self.steps.quorum_id, num)
        history = digest(state.history, self._contributors)
        self.state = State(state.step + 1, token, history, state.flips)
        if not self.is_partial:
            self.monitor.state_reached(self.name, self.rank, self.state)
        at, made = (self.steps.quorum_id, self.steps.quorum_step), (self.state.step, token)
        known = self.placement.commits.setdefault(at, made)
        self.monitor.check(known == made, "two commits of a step", self.name, known, made)
        self.monitor.commits += 1
        self.commits += 1
        self._is_failed, self._failures = False, 0
        self._end_step()

    def _end_step(self) -> None:
        ends_at = self.placement.ends_at
        if ends_at is not None and self.state.step >= ends_at and not self._is_failed:
            self.doing = Doing.OVER
            self._send(Shutdown(self.steps.quorum_id, self.steps.quorum_step))
            self._world.after(0.05, self.process, self.leave_meeting)
            return
        if self.saves and self.steps.is_next_undecided:
            self._wait(Doing.SETTLING)
        else:
            self._settle()

    def _settle(self) -> None:
        """Answer `should_checkpoint` as the Manager does, and end the step."""
        self.waits_since = math.inf
        if self.saves:
            self.steps.settle_step(self.steps.quorum_step + 1)
            self.saved = self.state if self.steps.must_save else self.saved
        self.doing = Doing.OVER
        self._world.after(_BETWEEN_S, self.process, self.begin_step)

    def is_suspected(self, quorum_id: int, call: int, found: Mismatch, *, heals: bool) -> None:
        """The collective has completed, and the states of the others show that this is wrong."""
        if not self._is_at(quorum_id, call):
            return
        assert self.place is not None
        step = self.place.max_step + call
        self._send(StateMismatch(step, self.name, found.listed, heals))
        if not heals:
            return
        self._apply_healed()
        if self._env.components.marks_corrupted:
            version = f"corrupted {self.name} {self._world.num_events}"
            self.state = replace(self.state, state_version=version)
        self._was_corrupted = True
        self._report("its state is corrupted")
        self._fail_step("its state is corrupted")

    def failed(self, quorum_id: int, call: int, why: str) -> None:
        """Fail the step, because its quorum failed; before its start, request another quorum."""
        if quorum_id != self.steps.quorum_id:
            return
        if self.doing in (Doing.CONFIGURING, Doing.HEALING):
            self._report(why)
            if self.is_single:
                self._request_quorum()
            else:  # the other ranks may be ahead
                self._error = why
                self._compute()
        elif self._is_at(quorum_id, call):
            self._report(why)
            self._fail_step(why)

    def _fail_step(self, why: str) -> None:
        self._apply_healed()
        if not self.is_single:
            self._error = why
            self._vote(commit=False)
            return
        self._is_failed, self._failures = True, self._failures + 1
        self.monitor.step_failed(self.name, why)
        self._end_step()

    def _is_at(self, quorum_id: int, call: int) -> bool:
        here = (self.steps.quorum_id, self.steps.quorum_step)
        return here == (quorum_id, call) and self.doing is Doing.REDUCING

    def _report(self, why: str) -> None:
        if self.steps.mark_aborted(self.steps.quorum_id, why):
            self._send(QuorumAborted(self.steps.quorum_id, why))
        self.leave_meeting()

    def _fail_to_save(self) -> None:
        """Fail the step, which has no quorum, so that the script saves at its end."""
        self.steps.require_save()
        if self.is_single:
            self.doing, self._is_failed = Doing.OVER, True
            self._world.after(self.placement.step_s, self.process, self._end_step)
        else:
            self._error = _NO_QUORUM
            self._compute()

    def _apply_healed(self) -> None:
        if self._healed is None:
            return
        assert self.place is not None
        healed, announced = self._healed, (self.place.max_step, self.place.state_version)
        same = (healed.step, healed.state_version) == announced
        self.monitor.check(same, "healed to another state than announced", self.name)
        self.state, self._healed, self.is_partial = healed, None, False
        self.monitor.state_reached(self.name, self.rank, self.state)

    def leave_meeting(self) -> None:
        """Close the connections of the process group."""
        if self._meeting is not None and self.place is not None:
            rank = next((r for r, w in self._meeting.members.items() if w is self), None)
            if rank is not None:
                self._meeting.leave(rank)

    # ---- the link -------------------------------------------------------------------------

    def message_received(self, message: Message) -> None:
        """Handle a message of the server."""
        steps = self.steps
        match message:
            case Welcome():
                if self.doing is Doing.CONNECTING:
                    self.begin_step()
            case QuorumResults():
                self._enter_quorum(message)
            case LeaveGranted():
                self.doing = Doing.OVER
                self.leave_meeting()
            case CheckpointBeforeLeave():
                if self.doing is Doing.REQUESTING:
                    self._fail_to_save()
            case QuorumAborted():
                if steps.on_abort(message):
                    self._on_abort(message)
            case ProposeSwitch():
                reply = steps.on_proposal(message, self._world.now)
                if reply is not None:
                    self._send(reply)
            case ConfirmSwitch():
                steps.on_confirmation(message)
            case CommitDecision():
                steps.on_commit_decision(message)
                self._decided(message)
        if self.doing is Doing.WAITING and not steps.is_undecided:
            self._decide()
        if self.doing is Doing.SETTLING and not steps.is_next_undecided:
            self._settle()

    def _on_abort(self, aborted: QuorumAborted) -> None:
        self.leave_meeting()
        if self.doing is Doing.SERVING:
            self._commit()
        elif self.doing in (Doing.CONFIGURING, Doing.HEALING, Doing.REDUCING):
            self.failed(aborted.quorum_id, self.steps.quorum_step, aborted.reason)

    def _send(self, message: Message) -> None:
        self._world.log_event(self.name, "sends", message)
        self._world.after(LOCAL_S, self._server_process, self.link.receive, message)

    @property
    def next_state(self) -> State:
        """The state that it has at the end of the step."""
        return self._healed or self.state

    @property
    def is_full(self) -> bool:
        """Whether it takes part in the mean of its quorum's steps, as all others do."""
        return self.place is not None and not self.place.catch_up

    @property
    def is_settled(self) -> bool:
        """Whether it is in a quorum, and has received no abort of it."""
        return self.steps.quorum_id != NO_QUORUM and self.steps.abort_reason is None


_DETECT_S = 0.002

Given = tuple[Worker, "State | None", int]


class Meeting:
    """The process group of one quorum over the workers of one rank; collectives need all members.

    Only neighbours on the ring detect that a member closes its connections.
    """

    def __init__(self, placement: QuorumResult, env: Shared) -> None:
        self.quorum_id = placement.quorum_id
        self.size = placement.replica_world_size
        self._max_step = placement.max_step
        self._catch_up = placement.catch_up
        self.members: dict[int, Worker] = {}
        self.closed: set[int] = set()
        self._env = env
        self._world = env.world
        self._monitor = env.monitor
        self._given: dict[int, Given] = {}
        self._states: dict[int, State] = {}
        self._call = 0

    def join(self, rank: int, worker: Worker) -> None:
        """Add a member; the last one completes the configuration of all."""
        self.members[rank] = worker
        if len(self.members) == self.size and not self.closed:
            for member in self.members.values():
                self._world.after(self._delay(), member.process, member.configured, self.quorum_id)
        elif len(self.members) == self.size:  # some have left again
            why = "a peer has closed the connection"
            self._world.after(_DETECT_S, worker.process, worker.failed, self.quorum_id, 0, why)
        elif self._is_cut_off(rank):
            self._fail(rank)

    def reduce(self, rank: int, call: int, state: State | None, divisor: int) -> None:
        """Add a member's gradient of a state, or (None) zero, to a collective."""
        worker = self.members[rank]
        if not self._given:
            self._call = call
        self._monitor.check(call == self._call, "calls are mixed", worker.name, call, self._call)
        self._given[rank], self._states[rank] = (worker, state, divisor), worker.next_state
        if self._is_cut_off(rank):
            self._fail(rank)
        if len(self._given) == self.size:
            self._complete(call)

    def leave(self, rank: int) -> None:
        """A member closes its connections, or dies."""
        if rank in self.closed:
            return
        self.closed.add(rank)
        for neighbour in ((rank - 1) % self.size, (rank + 1) % self.size):
            if neighbour in self.members and neighbour not in self.closed:
                self._fail(neighbour)

    def _complete(self, call: int) -> None:
        given, self._given = self._given, {}
        states = [(w.name, state) for w, state, _ in given.values() if state is not None]
        self._monitor.reduced(call, states, {divisor for _, _, divisor in given.values()})
        names = tuple(sorted(name for name, _ in states))
        found = self._compare_states(call, self._states)
        suspects = found.suspects if found is not None else ()
        heals = found is not None and found.is_certain and self._env.scenario.heals_corrupted
        delays = {rank: self._delay() for rank in given}
        for rank, (worker, _, _) in given.items():
            if rank in suspects:  # once all have drawn the same conclusion
                assert found is not None
                last_s = max(delays.values()) + _DETECT_S
                args = self.quorum_id, call, found, heals
                self._world.after(last_s, worker.process, self._suspect, worker, *args)
            if rank not in suspects or not heals:
                last_s = max(delays.values()) + 2 * _DETECT_S if rank in suspects else delays[rank]
                self._world.after(last_s, worker.process, self._deliver, rank, call, names)

    @staticmethod
    def _suspect(worker: Worker, quorum_id: int, call: int, found: Mismatch, heals: bool) -> None:
        worker.is_suspected(quorum_id, call, found, heals=heals)

    def _compare_states(self, call: int, states: Mapping[int, State]) -> Mismatch | None:
        """Return what a check finds where states differ; not all steps have one."""
        step = self._max_step + call
        if step % _CHECK_EVERY or self.size == 1 or self._catch_up:
            return None
        digests = [(s.history, s.flips) for _, s in sorted(states.items())]
        if len(set(digests)) == 1:
            return None
        names = [self.members[rank].name for rank in sorted(states)]
        table = [
            detail_row(StateDigest(_PATHS, 0, tensors, 0), name)
            for name, tensors in zip(names, digests, strict=True)
        ]
        found: Mismatch = self._env.components.conclude(table, _PATHS)
        self._monitor.compared(step, names, states, found, self._env.scenario.heals_corrupted)
        return found

    def _deliver(self, rank: int, call: int, names: tuple[str, ...]) -> None:
        """Deliver the result, unless a neighbour has closed its connection before."""
        worker = self.members[rank]
        if self._is_cut_off(rank) and self._world.rng.random() < 0.5:
            worker.failed(self.quorum_id, call, "a peer has closed the connection")
        else:
            worker.reduced(self.quorum_id, call, names)

    def _is_cut_off(self, rank: int) -> bool:
        return not self.closed.isdisjoint(((rank - 1) % self.size, (rank + 1) % self.size))

    def _fail(self, rank: int) -> None:
        worker = self.members[rank]
        if rank in self._given or len(self.members) < self.size:
            self._world.after(_DETECT_S, worker.process, self._disconnect, rank)

    def _disconnect(self, rank: int) -> None:
        worker = self.members[rank]
        if rank in self._given:
            worker.failed(self.quorum_id, self._call, "a peer has closed the connection")
        elif len(self.members) < self.size:
            worker.failed(self.quorum_id, 0, "a peer did not join")

    def _delay(self) -> float:
        chance = self._world.rng.random()
        return 0.002 + (0.3 * self._world.rng.random() if chance < 0.05 else 0.002 * chance)


_PATHS: tuple[str, ...] = ("model.history", "model.weight")
