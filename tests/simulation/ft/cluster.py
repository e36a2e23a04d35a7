"""Replica groups in virtual time: a node, its server, its workers, and process groups.

A worker makes its steps as the Manager does, with the real `ft.manager_client.QuorumSteps`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

from hpc_elastic.ft import quorum
from hpc_elastic.ft.lighthouse_state import LighthouseState
from hpc_elastic.ft.manager_client import QuorumSteps
from hpc_elastic.ft.messages import (
    NO_QUORUM,
    CancelRequest,
    CheckpointBeforeLeave,
    ConfirmSwitch,
    LeaveGranted,
    LeaveNotice,
    Message,
    ProposeSwitch,
    QuorumAborted,
    QuorumRequest,
    QuorumResult,
    QuorumResults,
    ReplicaStatus,
    Shutdown,
    SwitchVote,
    WorkersLost,
)
from hpc_elastic.ft.state_check import find_corrupted
from hpc_elastic.rendezvous.log_entry import Agent
from hpc_elastic.rendezvous.term import Gate
from simulation.ft.invariants import Kind, Monitor, Scenario, State
from simulation.scenario import SLOWEST_FILES_S
from simulation.storage import SharedFiles, SharedMonitor, Storage
from simulation.world import CLIENT, Connection, Host, Network, Process, World


@dataclass(frozen=True)
class Components:
    """The classes and rules of the protocol, which a test replaces to plant a bug."""

    keeper: type[LighthouseState] = LighthouseState
    steps: type[QuorumSteps] = QuorumSteps
    gate: type[Gate] = Gate
    """Passes the effects of a keeper's leader."""
    fenced_files: bool = True
    """Whether a rename out of a folder fails that another leader has renamed."""
    terms_rise: bool = True
    """Whether each keeper has a higher term than the one before."""
    reports_status: bool = True
    """Whether groups report their quorum to a new keeper."""
    find_corrupted: Callable[[Sequence[Sequence[int]]], tuple[tuple[int, ...], bool]] = (
        find_corrupted
    )
    """Draws the conclusion from the digests of all members."""


SOUND = Components()
"""The product."""


class Keeper(Protocol):
    """A keeper of the quorum, as groups use it (`simulation.ft.lighthouse`)."""

    def accept(self, server: Server) -> Connection:
        """Connect a group."""


class Keepers(Protocol):
    """The present keeper, and the elections of the next ones."""

    def reachable_from(self, group: Group) -> Keeper | None:
        """Return the keeper, or None if there is none or a partition separates it."""

    def host_died(self, group: Group, silently: bool) -> None:
        """A node is dead, and so is a keeper on it."""

    def timed_out(self, group: Group, server: Server | None = None) -> None:
        """A group was out of reach for the keeper's timeout."""


class Env:
    """The objects that all groups of one schedule share.

    Args:
        seed: The seed of the schedule.
        world: Clock and random generator.
        scenario: The schedule's parameters.
        components: The classes under test.
        monitor: Checks the invariants.
    """

    keepers: Keepers
    """Set before any group starts."""

    def __init__(
        self, seed: int, world: World, scenario: Scenario, components: Components, monitor: Monitor
    ) -> None:
        self.seed = seed
        self.world = world
        self.scenario = scenario
        self.components = components
        self.monitor = monitor
        self.network = Network(world, scenario.longest_delay_s)
        self.storage = Storage(world, random.Random(f"storage {seed}"), SLOWEST_FILES_S)
        shared_monitor = SharedMonitor(monitor.check, self.is_named_alive)
        self.shared = SharedFiles(self.storage, shared_monitor, components.fenced_files)
        self.groups = [Group(self, slot) for slot in range(scenario.num_groups)]
        self._meetings: dict[int, Meeting] = {}

    def meeting(self, place: QuorumResult) -> Meeting:
        """Return the process group of a quorum."""
        meeting = self._meetings.get(place.quorum_id)
        if meeting is None:
            find = self.components.find_corrupted
            meeting = Meeting(place, self.world, self.monitor, find)
            self._meetings[place.quorum_id] = meeting
        return meeting

    def group(self, name: str) -> Group:
        """Return the group of this name."""
        return next(g for g in self.groups if g.name == name)

    def is_named_alive(self, name: str, since: float = math.inf) -> bool:
        """Return whether a notice names a live node; ``since`` is not used."""
        del since
        return any(g.name == name and g.up and not g.is_over for g in self.groups)


@dataclass(frozen=True)
class NoticeSent:
    """The notice of a leader to a node's agent."""


@dataclass(frozen=True)
class NoticeConfirmed:
    """The agent's answer."""


_LOCAL_S = 0.0003
_RECONNECT_S = 0.05
_STOPPED_S = 0.6


class Server:
    """The server of a group for one boot of its node: it outlives workers and keepers."""

    def __init__(self, group: Group) -> None:
        self.process = Process()
        self.up_since = math.inf
        self.has_left = False
        self.connection: Connection | None = None
        self.notice_at: float | None = None
        self._group = group
        group.num_boots += 1
        self.agent = Agent(group.name, group.num_boots, group.slot, f"host{group.slot}", 1)
        self._world = group.env.world
        self._place: Any = None
        self._is_aborted = False
        self._request: QuorumRequest | None = None
        self._workers_number = 0
        self._num_requests = 0
        self._lost: str | None = None
        self._done: Shutdown | None = None

    @property
    def host(self) -> Host:
        """The group's node."""
        return self._group

    # ---- the keeper -----------------------------------------------------------------------

    def connect(self) -> None:
        """Connect to a keeper, as soon as there is one, and repeat all open messages."""
        keeper = self._group.env.keepers.reachable_from(self._group)
        if keeper is None:
            self._world.after(_RECONNECT_S, self.process, self.connect)
            return
        self.connection = keeper.accept(self)
        self.up_since = self._world.now
        place = self._place
        if place is not None and self._group.env.components.reports_status:
            rank, size = place.replica_rank, place.replica_world_size
            self._send(ReplicaStatus(place.quorum_id, rank, size, 0, self._is_aborted))
        else:
            self._send(ReplicaStatus(NO_QUORUM, 0, 0, 0, is_aborted=False))
        if self._lost is not None:
            self._send(WorkersLost(self._lost))
        if self.notice_at is not None:
            self._send(LeaveNotice(self.notice_at - self._world.now))
        if self._done is not None:
            self._send(self._done)
        if self._request is not None:
            self._send(self._request)

    def lost(self, connection: Connection) -> None:
        """The connection has ended."""
        if connection is self.connection:
            self.connection, self.up_since = None, math.inf
            self._world.after(_RECONNECT_S, self.process, self.connect)

    def received(self, connection: Connection, message: Any) -> None:
        """Handle a message of the keeper."""
        group = self._group
        if connection is not self.connection:
            return
        if isinstance(message, NoticeSent):
            group.env.shared.monitor.notice_received((group.name,), self._world.now)
            connection.send(CLIENT, NoticeConfirmed())
            if self.notice_at is None:
                group.give_notice(30 * group.env.scenario.step_s + group.env.scenario.bound_s)
        elif isinstance(message, QuorumResults):
            self._enter_quorum(message)
        elif isinstance(message, QuorumAborted):
            self._abort_quorum(message, self._to_worker)
        else:
            if isinstance(message, LeaveGranted):
                self._request, self.has_left = None, True
                self._world.after(0.05, None, group.leave)
            elif isinstance(message, CheckpointBeforeLeave):
                self._request = None
            self._to_worker(message)

    def _enter_quorum(self, results: QuorumResults) -> None:
        (place,) = results.ranks
        if self._place is not None and place.quorum_id == self._place.quorum_id:
            return  # the server repeated its request before the answer came
        if self._request is None:
            self._send(QuorumAborted(place.quorum_id, "given up"))
            return
        if results.number != self._request.number:
            return  # the keeper aborts that quorum when the later request arrives
        self._request = None
        self._place, self._is_aborted = place, False
        self._to_worker(QuorumResults((place,), self._workers_number))

    def _abort_quorum(self, aborted: QuorumAborted, forward: Callable[[Message], None]) -> None:
        """Forward the abort of the present quorum once."""
        place = self._place
        if place is not None and aborted.quorum_id == place.quorum_id and not self._is_aborted:
            self._is_aborted = aborted.after_step < 0
            forward(aborted)

    def _send(self, message: Message) -> None:
        if self.connection is not None:
            self.connection.send(CLIENT, message)

    # ---- the worker -----------------------------------------------------------------------

    def expect(self) -> None:
        """Reset the state of the last worker, because another starts."""
        self._place, self._request, self._lost = None, None, None
        self._is_aborted, self._done = False, None

    def worker_sent(self, worker: Worker, message: Message) -> None:
        """Handle a message of the worker."""
        if worker is not self._group.worker or not worker.process.alive:
            return
        match message:
            case QuorumRequest():
                self._num_requests += 1
                self._workers_number = message.number
                self._request, self._lost = replace(message, number=self._num_requests), None
                self._send(self._request)
            case CancelRequest():
                self._request = None
                self._send(message)
            case QuorumAborted():
                self._abort_quorum(message, self._send)
            case SwitchVote():
                self._send(message)
            case Shutdown():
                self._done = message
                self._send(message)

    def worker_lost(self, why: str) -> None:
        """The worker is dead or stopped."""
        if self._done is not None or self.has_left:
            return
        self._lost = why
        self._send(WorkersLost(why))
        if self._place is not None:
            self._abort_quorum(QuorumAborted(self._place.quorum_id, why), self._to_worker)

    def worker_resumed(self) -> None:
        """The worker continues after it was stopped."""
        if self._request is not None and self._lost is not None:
            self._lost = None
            self._send(self._request)

    def give_notice(self, left_s: float) -> None:
        """Announce that the group leaves within this time."""
        self.notice_at = self._world.now + left_s
        self._send(LeaveNotice(left_s))

    def _to_worker(self, message: Message) -> None:
        worker = self._group.worker
        if worker is not None:
            self._world.after(_LOCAL_S, worker.process, worker.message_received, message)


class Group(Host):
    """A node of the array, its server and its worker."""

    def __init__(self, env: Env, slot: int) -> None:
        super().__init__(slot)
        self.env = env
        self.name = f"r{slot}"
        self.server: Server | None = None
        self.worker: Worker | None = None
        self.is_over = False
        """Whether its node was left for good."""
        self.step_s = env.scenario.step_s * env.world.rng.choice((1.0, 1.0, 1.0, 3.0))
        self.num_boots = 0
        self._lives = 0

    @property
    def up_since(self) -> float:
        """When it connected to the present keeper; infinity if it is not connected."""
        return math.inf if self.server is None else self.server.up_since

    @property
    def takes_part(self) -> bool:
        """Whether its worker lives and is neither stopped nor done."""
        worker, server = self.worker, self.server
        if worker is None or server is None or server.has_left or self.is_over:
            return False
        return self.up and worker.process.alive and not worker.process.paused

    @property
    def is_done(self) -> bool:
        """Whether its worker ends, or has ended, without a failure."""
        return self.worker is not None and self.worker.process.alive and self.worker.ends_next

    # ---- a node ---------------------------------------------------------------------------

    def boot(self) -> None:
        """The node starts."""
        if self.up or self.is_over:
            return
        self.up = True
        self.server = Server(self)
        self.server.connect()
        self.start_worker()

    def start_worker(self) -> None:
        """Start a worker, unless one lives; its first step starts after its imports."""
        if self.server is None or not self.server.process.alive or self.server.has_left:
            return
        if self.worker is not None and self.worker.process.alive:
            return
        self._lives += 1
        self.server.expect()
        self.worker = worker = Worker(self, self._lives)
        self.env.world.log_event(self.name, "starts a worker")
        self.env.world.after(0.2 + self.env.world.rng.random(), worker.process, worker.begin_step)

    def kill_worker(self) -> None:
        """Kill the worker; the server detects that."""
        worker, server = self.worker, self.server
        if worker is None or server is None or not worker.process.alive:
            return
        worker.process.alive = False
        worker.leave_meeting()
        self.env.world.after(0.005, server.process, server.worker_lost, "its worker is dead")

    def crash(self, silently: bool) -> None:
        """The node dies."""
        worker, server = self.worker, self.server
        if not self.up or server is None:
            return
        self.up = False
        if worker is not None and worker.process.alive:
            worker.process.alive = False
            if not silently:
                worker.leave_meeting()
        server.process.alive = False
        self.env.network.crashed(server.process, silently, lambda: False)
        self.env.keepers.host_died(self, silently)
        if silently:
            self.env.world.after(5.0, None, self.env.keepers.timed_out, self, server)

    def pause_worker(self, stopped: bool) -> None:
        """Stop the worker, or let it hold the interpreter's lock, which others cannot detect."""
        worker, server = self.worker, self.server
        if worker is None or server is None or not worker.process.alive:
            return
        worker.process.paused = True
        if stopped:
            self.env.world.after(_STOPPED_S, server.process, self._detect_stop, worker)

    def _detect_stop(self, worker: Worker) -> None:
        if worker is self.worker and worker.process.alive and worker.process.paused:
            assert self.server is not None
            self.server.worker_lost("its worker is stopped")

    def resume_worker(self) -> None:
        """Let the worker continue."""
        worker, server = self.worker, self.server
        if worker is None or server is None or not worker.process.paused:
            return
        worker.process.resume(timers_last=self.env.world.rng.random() < 0.5)
        self.env.world.after(0.1, server.process, server.worker_resumed)

    # ---- its end --------------------------------------------------------------------------

    def give_notice(self, left_s: float) -> None:
        """Announce that the node is left within this time, at the latest at its end."""
        assert self.server is not None
        self.server.give_notice(left_s)
        self.env.world.after(left_s, None, self.leave)

    def leave_granted(self) -> None:
        """The keeper has granted the leave, and its message has not arrived yet."""
        others = [
            g.worker.state for g in self.env.groups
            if g is not self and g.takes_part and g.worker is not None
        ]  # fmt: skip
        if self.worker is not None:
            worker = self.worker
            saved = worker.saved if worker.saves else worker.state
            self.env.monitor.leave_granted(worker.name, worker.state, saved, others)

    def leave(self) -> None:
        """Leave the node for good."""
        self.is_over = True
        self.crash(silently=False)


# ---- A training process: its steps and its link (`ft.manager_client`), as the Manager has them


_BETWEEN_S = 0.0005
_CHECK_EVERY = 5
"""Steps between two comparisons of the states."""


class Doing(Enum):
    """The state of a worker in a step."""

    SETTLING = "waits at the end of the step before a proposed call"
    WAITING = "waits at a proposed call"
    REQUESTING = "requests a quorum"
    CONFIGURING = "configures"
    HEALING = "heals"
    COMPUTING = "computes"
    REDUCING = "reduces"
    SERVING = "serves its state"
    OVER = "is over"


class Worker:
    """One worker of a group, until it dies."""

    def __init__(self, group: Group, number: int) -> None:
        self.name = f"{group.name}.{number}"
        self.process = Process()
        self.steps = group.env.components.steps(is_single=True)
        self.state = State(0, f"fresh {self.name}", hash((group.env.seed, self.name)))
        self.doing = Doing.COMPUTING
        self.waits_since = math.inf
        self.commits = 0
        self.saves = group.env.seed % 4 != 0
        """Whether its script polls after each step whether to save."""
        self.saved: State | None = None
        """The state that it saved as the last member that could."""
        self.place: QuorumResult | None = None
        self.fails_next = False
        self.ends_next = False
        self._group = group
        self._env = group.env
        self._world = group.env.world
        self._meeting: Meeting | None = None
        self._is_failed = False
        self._failures = 0
        self._num_requests = 0
        self._healed: State | None = None
        self._snapshot = self.state
        self._contributors: tuple[str, ...] = ()
        self._fetching: set[str] = set()
        """The peers that fetch this worker's state."""

    # ---- a step ---------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Start a step: `Manager.start_quorum`."""
        self.steps.start_step(self._world.now)
        if self.steps.is_undecided and not self._is_failed:
            self._wait(Doing.WAITING)
        else:
            self._decide()

    def _wait(self, doing: Doing) -> None:
        self.doing, self.waits_since = doing, self._world.now
        since = self.waits_since

        def waits() -> bool:
            is_connected = self._group.up_since <= since
            return self.process.alive and self.waits_since == since and is_connected

        self._env.monitor.worker_waits(self.name, waits)

    def _decide(self) -> None:
        steps = self.steps
        self.waits_since = math.inf
        steps.settle_step(steps.quorum_step)
        if self._is_failed or steps.must_request or steps.is_undecided:
            self._request_quorum()
        else:
            self._compute()

    def _request_quorum(self) -> None:
        self.doing = Doing.REQUESTING
        self._num_requests += 1
        state, steps = self.state, self.steps
        scenario = self._env.scenario
        is_wild = scenario.kind is Kind.ALL
        is_calm = self._world.now >= scenario.calm_after_s
        may_shrink = is_wild and not is_calm and scenario.rules.min_replicas == 1
        shrink_only = may_shrink and self._world.rng.random() < 0.05
        request = QuorumRequest(
            steps.quorum_step, state.step, state.state_version, steps.quorum_id, self._failures,
            1, shrink_only, self.name, (self.name,),
            number=self._num_requests, is_saved=steps.is_saved,
        )  # fmt: skip
        self._send(request)
        if is_wild and self._world.rng.random() < 0.2:
            timeout_s = 4.0 * self._world.rng.random()
            self._world.after(timeout_s, self.process, self._retry_request, self._num_requests)

    def _retry_request(self, number: int) -> None:
        if self.doing is Doing.REQUESTING and number == self._num_requests:
            self._send(CancelRequest())
            self._request_quorum()

    def _enter_quorum(self, results: QuorumResults) -> None:
        (place,) = results.ranks
        if self.doing is not Doing.REQUESTING or results.number != self._num_requests:
            self._send(QuorumAborted(place.quorum_id, "a worker had given up waiting for it"))
            return
        self.steps.enter_quorum(place.quorum_id)
        self.place, self.doing = place, Doing.CONFIGURING
        self._snapshot, self._healed = self.state, None
        self.leave_meeting()
        self._meeting = self._env.meeting(place)
        self._fetching = {f"{place.quorum_id} {rank}" for rank in place.first_source_of}
        self._meeting.join(place.replica_rank, self)

    def configured(self, quorum_id: int) -> None:
        """All members have joined the process group."""
        if quorum_id != self.steps.quorum_id or self.doing is not Doing.CONFIGURING:
            return
        assert self.place is not None and self._meeting is not None
        if not self.place.heals:
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
        self._env.monitor.heals += 1
        self._healed = source.served(f"{quorum_id} {self.place.replica_rank}")
        if self._all_contribute:
            self._apply_healed()
        self._compute()

    def served(self, peer: str) -> State:
        """A peer has fetched the state; return it."""
        state = self._snapshot
        self._fetching.discard(peer)
        if self.doing is Doing.SERVING and not self._fetching:
            self._world.after(_BETWEEN_S, self.process, self._commit_served)
        return state

    def _compute(self) -> None:
        self.doing = Doing.COMPUTING
        took = self._group.step_s * (0.7 + 0.6 * self._world.rng.random())
        self._world.after(
            took, self.process, self._computed, self.steps.quorum_id, self.steps.quorum_step
        )

    def _computed(self, quorum_id: int, call: int) -> None:
        steps = self.steps
        is_current = (quorum_id, call) == (steps.quorum_id, steps.quorum_step)
        if not is_current or self.doing is not Doing.COMPUTING:
            return
        assert self.place is not None and self._meeting is not None
        self.doing = Doing.REDUCING
        if self.fails_next or steps.abort_reason is not None:
            self.fails_next = False
            self.failed(quorum_id, call, steps.abort_reason or "an error of its own")
            return
        place, all_give = self.place, call > 0 or self._all_contribute
        divisor = place.replica_world_size if all_give else place.cohort_size
        gives = all_give or not place.heals
        self._meeting.reduce(place.replica_rank, call, self.state if gives else None, divisor)

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
        self._contributors = contributors
        if self._fetching and self.steps.abort_reason is None:
            self.doing = Doing.SERVING  # the state must not change while it is fetched
        else:
            self._commit()

    def _commit_served(self) -> None:
        if self.doing is Doing.SERVING:
            self._commit()

    def _commit(self) -> None:
        num, state = len(self._contributors), self.state
        token = quorum.next_version(state.state_version, self.steps.quorum_id, num)
        history = hash((state.history, self._contributors))
        self.state = State(state.step + 1, token, history, state.flips)
        self._env.monitor.state_reached(self.name, self.state)
        self._env.monitor.commits += 1
        self.commits += 1
        self._is_failed, self._failures = False, 0
        self._end_step()

    def _end_step(self) -> None:
        if self.ends_next:
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

    def is_corrupted(self, quorum_id: int, call: int) -> None:
        """The collective has completed, and the states of the others show that this is wrong."""
        if self._is_at(quorum_id, call):
            self._apply_healed()
            version = f"corrupted {self.name} {self._world.num_events}"
            self.state = replace(self.state, state_version=version)
            self._report("its state is corrupted")
            self._is_failed, self._failures = True, self._failures + 1
            self._end_step()

    def failed(self, quorum_id: int, call: int, why: str) -> None:
        """Fail the step, because its quorum failed; before its start, request another quorum."""
        if quorum_id != self.steps.quorum_id:
            return
        if self.doing in (Doing.CONFIGURING, Doing.HEALING):
            self._report(why)
            self._request_quorum()
        elif self._is_at(quorum_id, call):
            self._report(why)
            self._apply_healed()
            self._is_failed, self._failures = True, self._failures + 1
            self._env.monitor.step_failed(self.name, why)
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
        self.doing, self._is_failed = Doing.OVER, True
        self._world.after(self._group.step_s, self.process, self._end_step)

    def _apply_healed(self) -> None:
        if self._healed is None:
            return
        assert self.place is not None
        healed, announced = self._healed, (self.place.max_step, self.place.state_version)
        same = (healed.step, healed.state_version) == announced
        self._env.monitor.check(same, "healed to another state than announced", self.name)
        self.state, self._healed = healed, None
        self._env.monitor.state_reached(self.name, self.state)

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
        server = self._group.server
        if server is not None:
            self._world.after(_LOCAL_S, server.process, server.worker_sent, self, message)

    @property
    def next_state(self) -> State:
        """The state that it has at the end of the step."""
        return self._healed or self.state

    @property
    def is_settled(self) -> bool:
        """Whether it is in a quorum, and has received no abort of it."""
        return self.steps.quorum_id != NO_QUORUM and self.steps.abort_reason is None


_DETECT_S = 0.002

Given = tuple["Worker", "State | None", int]


class Meeting:
    """The process group of one quorum, whose collectives need all members.

    Only neighbours on the ring detect that a member closes its connections.
    """

    def __init__(
        self,
        placement: QuorumResult,
        world: World,
        monitor: Monitor,
        find: Callable[[Sequence[Sequence[int]]], tuple[tuple[int, ...], bool]],
    ) -> None:
        self.quorum_id = placement.quorum_id
        self.size = placement.replica_world_size
        self._max_step = placement.max_step
        self._find_corrupted = find
        self.members: dict[int, Worker] = {}
        self.closed: set[int] = set()
        self._world = world
        self._monitor = monitor
        self._given: dict[int, Given] = {}
        self._states: dict[int, State] = {}
        self._call = 0

    def join(self, rank: int, worker: Worker) -> None:
        """Add a member; the last one completes the configuration of all."""
        self.members[rank] = worker
        if len(self.members) == self.size and not self.closed:
            for member in self.members.values():
                self._world.after(self._delay(), member.process, member.configured, self.quorum_id)
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
        corrupted = self._compare_states(call, self._states)
        delays = {rank: self._delay() for rank in given}
        for rank, (worker, _, _) in given.items():
            if rank in corrupted:  # once all have drawn the same conclusion
                last_s = max(delays.values()) + _DETECT_S
                at = self.quorum_id, call
                self._world.after(last_s, worker.process, worker.is_corrupted, *at)
            else:
                self._world.after(delays[rank], worker.process, self._deliver, rank, call, names)

    def _compare_states(self, call: int, states: Mapping[int, State]) -> Sequence[int]:
        """Return the members that a check finds corrupted; not all steps have one."""
        digests = [[hash((s.history, s.flips))] for _, s in sorted(states.items())]
        if (self._max_step + call) % _CHECK_EVERY or len({d[0] for d in digests}) == 1:
            return ()
        suspects, is_certain = self._find_corrupted(digests)
        found = suspects if is_certain else ()
        self._monitor.compared(self._max_step + call, states, found)
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
