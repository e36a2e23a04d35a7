"""Replica groups in virtual time: a node, its server, the life of its worker, and process groups.

A worker goes through its steps as the Manager does, over the real `ft.manager_client.QuorumSteps`.
"""

from __future__ import annotations

import math
import random
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
from hpc_elastic.rendezvous.log_entry import Agent
from hpc_elastic.rendezvous.term import Gate
from simulation.ft.invariants import Kind, Monitor, Scenario, State
from simulation.scenario import SLOWEST_FILES_S
from simulation.storage import SharedFiles, SharedMonitor, Storage
from simulation.world import CLIENT, Connection, Host, Network, Process, World


@dataclass(frozen=True)
class Components:
    """The protocol's classes, and what its adapters must take care of: a test can plant a bug."""

    keeper: type[LighthouseState] = LighthouseState
    steps: type[QuorumSteps] = QuorumSteps
    gate: type[Gate] = Gate
    """Through which passes what a keeper's leader does."""
    fenced_files: bool = True
    """Whether a rename out of a folder fails that another leader has renamed."""
    terms_rise: bool = True
    """Whether each keeper has a higher term than the one before."""
    says_here: bool = True
    """Whether groups send a new keeper the quorum that they are in."""


SOUND = Components()
"""The product."""


class Keeper(Protocol):
    """A keeper of the quorum, as groups connect to it (`simulation.ft.lighthouse`)."""

    def accept(self, server: Server) -> Connection:
        """Let a group connect."""


class Keepers(Protocol):
    """The keeper of the moment, and the elections of the next ones."""

    def reachable_from(self, group: Group) -> Keeper | None:
        """Return the keeper, if there is one and nothing is in the way."""

    def host_died(self, group: Group, silently: bool) -> None:
        """A node is dead; the keeper may have been on it."""

    def silent(self, group: Group, server: Server | None = None) -> None:
        """A group was out of reach for as long as a keeper waits."""


class Env:
    """What all groups of one schedule share.

    Args:
        seed: The schedule's.
        world: Time and chance.
        scenario: The schedule's parameters.
        components: The classes under test.
        monitor: What must hold.
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
            meeting = self._meetings[place.quorum_id] = Meeting(place, self.world, self.monitor)
        return meeting

    def group(self, name: str) -> Group:
        """Return the group of this name."""
        return next(g for g in self.groups if g.name == name)

    def is_named_alive(self, name: str, since: float = math.inf) -> bool:
        """Return whether the node lives that a notice names; ``since`` is not used."""
        del since
        return any(g.name == name and g.up and not g.is_over for g in self.groups)


@dataclass(frozen=True)
class AskedToLeave:
    """A leader sends a node's agent a notice."""


@dataclass(frozen=True)
class Noticed:
    """The agent confirms it."""


_LOCAL_S = 0.0003
_RECONNECT_S = 0.05
_STOPPED_S = 0.6


class Server:
    """One life of a group's server: outlives workers, and keepers."""

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
        self._ask: QuorumRequest | None = None
        self._workers_number = 0
        self._num_asks = 0
        self._lost: str | None = None
        self._is_done = False

    @property
    def host(self) -> Host:
        """The node that it is on."""
        return self._group

    # ---- the keeper -----------------------------------------------------------------------

    def connect(self) -> None:
        """Look for a keeper, until there is one."""
        keeper = self._group.env.keepers.reachable_from(self._group)
        if keeper is None:
            self._world.after(_RECONNECT_S, self.process, self.connect)
            return
        self.connection = keeper.accept(self)
        self.up_since = self._world.now
        place = self._place
        if place is not None and self._group.env.components.says_here:
            self._send(
                ReplicaStatus(
                    place.quorum_id,
                    place.replica_rank,
                    place.replica_world_size,
                    0,
                    self._is_aborted,
                )
            )
        else:
            self._send(ReplicaStatus(NO_QUORUM, 0, 0, 0, is_aborted=False))
        self._tell_again()

    def _tell_again(self) -> None:
        if self._lost is not None:
            self._send(WorkersLost(self._lost))
        if self.notice_at is not None:
            self._send(LeaveNotice(self.notice_at - self._world.now))
        if self._is_done:
            self._send(Shutdown())
        if self._ask is not None:
            self._send(self._ask)

    def lost(self, connection: Connection) -> None:
        """The connection has ended."""
        if connection is self.connection:
            self.connection, self.up_since = None, math.inf
            self._world.after(_RECONNECT_S, self.process, self.connect)

    def received(self, connection: Connection, message: Any) -> None:
        """A message of the keeper arrives."""
        if connection is not self.connection:
            return
        if isinstance(message, AskedToLeave):
            self._asked_to_leave()
        elif isinstance(message, QuorumResults):
            self._placed(message)
        elif isinstance(message, QuorumAborted):
            self._break(message)
        else:
            if isinstance(message, LeaveGranted):
                self._ask, self.has_left = None, True
                self._group.leave_granted()
            elif isinstance(message, CheckpointBeforeLeave):
                self._ask = None
            self._to_worker(message)

    def _asked_to_leave(self) -> None:
        env = self._group.env
        env.shared.monitor.notice_received((self._group.name,), self._world.now)
        if self.connection is not None:
            self.connection.send(CLIENT, Noticed())
        if self.notice_at is None:
            self._group.announce()

    def _placed(self, placements: QuorumResults) -> None:
        (place,) = placements.ranks
        if self._place is not None and place.quorum_id == self._place.quorum_id:
            return  # it has requested again before the answer came
        if self._ask is None:
            self._send(QuorumAborted(place.quorum_id, "given up"))
            return
        if placements.number != self._ask.number:
            return  # the keeper breaks that quorum when the later request arrives
        self._ask = None
        self._place, self._is_aborted = place, False
        self._to_worker(QuorumResults((place,), self._workers_number))

    def _break(self, aborted: QuorumAborted) -> None:
        place = self._place
        if place is not None and aborted.quorum_id == place.quorum_id and not self._is_aborted:
            self._is_aborted = True
            self._to_worker(aborted)

    def _send(self, message: Message) -> None:
        if self.connection is not None:
            self.connection.send(CLIENT, message)

    # ---- the worker -----------------------------------------------------------------------

    def expect(self) -> None:
        """Another worker is started."""
        self._place, self._ask, self._lost = None, None, None
        self._is_aborted = self._is_done = False

    def worker_sent(self, worker: Worker, message: Message) -> None:
        """A message of the worker arrives."""
        if worker is not self._group.worker or not worker.process.alive:
            return
        match message:
            case QuorumRequest():
                self._num_asks += 1
                self._workers_number = message.number
                self._ask, self._lost = replace(message, number=self._num_asks), None
                self._send(self._ask)
            case CancelRequest():
                self._ask = None
                self._send(message)
            case QuorumAborted():
                self._report(message)
            case SwitchVote():
                self._send(message)
            case Shutdown():
                self._is_done = True
                self._send(message)

    def _report(self, aborted: QuorumAborted) -> None:
        place = self._place
        if place is not None and place.quorum_id == aborted.quorum_id and not self._is_aborted:
            self._is_aborted = True
            self._send(aborted)

    def lose(self, why: str) -> None:
        """The worker is dead or stopped."""
        if self._is_done or self.has_left:
            return
        self._lost = why
        self._send(WorkersLost(why))
        if self._place is not None:
            self._break(QuorumAborted(self._place.quorum_id, why))

    def goes_on(self) -> None:
        """The worker was stopped, and is not any more."""
        if self._ask is not None and self._lost is not None:
            self._lost = None
            self._send(self._ask)

    def give_notice(self, left_s: float) -> None:
        """The node is to be left."""
        self.notice_at = self._world.now + left_s
        self._send(LeaveNotice(left_s))

    def _to_worker(self, message: Message) -> None:
        worker = self._group.worker
        if worker is not None:
            self._world.after(_LOCAL_S, worker.process, worker.message_received, message)


class Group(Host):
    """A node of the array, and what runs there."""

    def __init__(self, env: Env, slot: int) -> None:
        super().__init__(slot)
        self.env = env
        self.name = f"r{slot}"
        self.server: Server | None = None
        self.worker: Worker | None = None
        self.is_over = False
        """It does not come back."""
        self.step_s = env.scenario.step_s * env.world.rng.choice((1.0, 1.0, 1.0, 3.0))
        self.num_boots = 0
        self._lives = 0

    @property
    def up_since(self) -> float:
        """Since when it has been connected to a keeper."""
        return math.inf if self.server is None else self.server.up_since

    @property
    def takes_part(self) -> bool:
        """Whether its worker lives, and is not stopped, or done."""
        worker, server = self.worker, self.server
        if worker is None or server is None or server.has_left or self.is_over:
            return False
        return self.up and worker.process.alive and not worker.process.paused

    @property
    def is_done(self) -> bool:
        """Whether its worker ends, or has ended, in peace."""
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
        """Start a worker; it imports for a while."""
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
        """The worker dies; the server sees it."""
        worker, server = self.worker, self.server
        if worker is None or server is None or not worker.process.alive:
            return
        worker.process.alive = False
        worker.died()
        self.env.world.after(0.005, server.process, server.lose, "its worker is dead")

    def crash(self, silently: bool) -> None:
        """The node dies."""
        worker, server = self.worker, self.server
        if not self.up or server is None:
            return
        self.up = False
        if worker is not None and worker.process.alive:
            worker.process.alive = False
            if not silently:
                worker.died()
        server.process.alive = False
        self.env.network.crashed(server.process, silently, lambda: False)
        self.env.keepers.host_died(self, silently)
        if silently:
            self.env.world.after(5.0, None, self.env.keepers.silent, self, server)

    def pause_worker(self, stopped: bool) -> None:
        """The worker is stopped, or holds the interpreter's lock, which others cannot detect."""
        worker, server = self.worker, self.server
        if worker is None or server is None or not worker.process.alive:
            return
        worker.process.paused = True
        if stopped:
            self.env.world.after(_STOPPED_S, server.process, self._see_stopped, worker)

    def _see_stopped(self, worker: Worker) -> None:
        if worker is self.worker and worker.process.alive and worker.process.paused:
            assert self.server is not None
            self.server.lose("its worker is stopped")

    def resume_worker(self) -> None:
        """The worker goes on."""
        worker, server = self.worker, self.server
        if worker is None or server is None or not worker.process.paused:
            return
        worker.process.resume(timers_last=self.env.world.rng.random() < 0.5)
        self.env.world.after(0.1, server.process, server.goes_on)

    # ---- its end --------------------------------------------------------------------------

    def announce(self) -> None:
        """Its node is to be left, in good time."""
        assert self.server is not None
        left_s = 30 * self.env.scenario.step_s + self.env.scenario.bound_s
        self.server.give_notice(left_s)
        self.env.world.after(left_s, None, self.leave)

    def leave_granted(self) -> None:
        """The keeper has let the group go."""
        self.env.world.after(0.05, None, self.leave)

    def dismissed(self) -> None:
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
        """Its node is left, for good."""
        self.is_over = True
        self.crash(silently=False)

    def from_worker(self, worker: Worker, message: Message) -> None:
        """The worker writes to its socket."""
        self.env.world.log_event(worker.name, "says", message)
        server = self.server
        if server is not None:
            self.env.world.after(_LOCAL_S, server.process, server.worker_sent, worker, message)


# ---- A training process: its steps and its link (`ft.manager_client`), as the Manager has them


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


class Worker:
    """One life of a group's worker."""

    def __init__(self, group: Group, number: int) -> None:
        self.name = f"{group.name}.{number}"
        self.process = Process()
        self.steps = group.env.components.steps(is_single=True)
        self.state = State(0, f"fresh {self.name}", hash((group.env.seed, self.name)))
        self.doing = Doing.COMPUTING
        self.waits_since = math.inf
        self.commits = 0
        self.saves = group.env.seed % 4 != 0
        """Its script asks after each step whether to save."""
        self.saved: State | None = None
        """As the last that may."""
        self.place: QuorumResult | None = None
        self.fails_next = False
        self.ends_next = False
        self._group = group
        self._env = group.env
        self._world = group.env.world
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

    def begin_step(self) -> None:
        """Begin a step: `Manager.start_quorum`."""
        self.steps.start_step(self._world.now)
        if self.steps.is_undecided and not self._is_failed:
            self._wait(Doing.WAITING)
        else:
            self._decide()

    def _wait(self, doing: Doing) -> None:
        self.doing, self.waits_since = doing, self._world.now
        since = self.waits_since

        def waits() -> bool:
            return self.process.alive and self.waits_since == since and self.is_reachable(since)

        self._env.monitor.waits(self.name, waits)

    def _decide(self) -> None:
        steps = self.steps
        self.waits_since = math.inf
        steps.settle_step(steps.quorum_step)
        if self._is_failed or steps.must_request or steps.is_undecided:
            self._request_quorum()
        else:
            self._compute()

    def _request_quorum(self) -> None:
        self.doing = Doing.ASKING
        self._asks += 1
        state, steps = self.state, self.steps
        scenario = self._env.scenario
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
            give_up_s = 4.0 * self._world.rng.random()
            self._world.after(give_up_s, self.process, self._give_up, self._asks)

    def _give_up(self, asks: int) -> None:
        if self.doing is Doing.ASKING and asks == self._asks:
            self._send(CancelRequest())
            self._request_quorum()

    def _placed(self, results: QuorumResults) -> None:
        (place,) = results.ranks
        if self.doing is not Doing.ASKING or results.number != self._asks:
            self._send(QuorumAborted(place.quorum_id, "a worker had given up waiting for it"))
            return
        self.steps.enter_quorum(place.quorum_id)
        self.place, self.doing = place, Doing.CONFIGURING
        self._snapshot, self._healed = self.state, None
        self._leave_meeting()
        self._meeting = self._env.meeting(place)
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
        delay = self._env.scenario.heal_s * (0.5 + self._world.rng.random())
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
        self._env.monitor.heals += 1
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
        return self._env.scenario.is_sync or self.place.max_step == 0

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
        self._env.monitor.has(self.name, self.state)
        self._env.monitor.commits += 1
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
        """The end of a step: the Manager's answer to `should_checkpoint`."""
        self.waits_since = math.inf
        if self.saves:
            self.steps.settle_step(self.steps.quorum_step + 1)
            self.saved = self.state if self.steps.must_save else self.saved
        self.doing = Doing.OVER
        self._world.after(_BETWEEN_S, self.process, self.begin_step)

    def failed(self, quorum_id: int, call: int, why: str) -> None:
        """Something of this quorum failed: the step, if it has begun; else it asks again."""
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
        self._env.monitor.check(same, "healed to another state than announced", self.name)
        self.state, self._healed = self._healed, None
        self._env.monitor.has(self.name, self.state)

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

    def message_received(self, message: Message) -> None:
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


# ---- The process group of one quorum: collectives that need all members, connections that break


_LOOK_S = 0.002

Given = tuple["Worker", "State | None", int]


class Meeting:
    """Members meet, by rank, and reduce at one call after the other.

    Only neighbours on the ring see that a member closes its connections: the others wait on.
    """

    def __init__(self, placement: QuorumResult, world: World, monitor: Monitor) -> None:
        self.quorum_id = placement.quorum_id
        self.size = placement.replica_world_size
        self.members: dict[int, Worker] = {}
        self.gone: set[int] = set()
        self._world = world
        self._monitor = monitor
        self._given: dict[int, Given] = {}
        self._call = 0

    def join(self, rank: int, worker: Worker) -> None:
        """A member wants to be configured; all are, once the last one comes."""
        self.members[rank] = worker
        if len(self.members) == self.size and not self.gone:
            for member in self.members.values():
                self._world.after(self._delay(), member.process, member.configured, self.quorum_id)
        elif self._is_cut_off(rank):
            self._fail(rank)

    def reduce(self, rank: int, call: int, state: State | None, divisor: int) -> None:
        """A member comes to a collective, with a gradient of its state or (None) with zero."""
        worker = self.members[rank]
        if not self._given:
            self._call = call
        self._monitor.check(call == self._call, "calls are mixed", worker.name, call, self._call)
        self._given[rank] = (worker, state, divisor)
        if self._is_cut_off(rank):
            self._fail(rank)
        if len(self._given) == self.size:
            self._complete(call)

    def leave(self, rank: int) -> None:
        """A member closes its connections, or dies."""
        if rank in self.gone:
            return
        self.gone.add(rank)
        for neighbour in ((rank - 1) % self.size, (rank + 1) % self.size):
            if neighbour in self.members and neighbour not in self.gone:
                self._fail(neighbour)

    def _complete(self, call: int) -> None:
        given, self._given = self._given, {}
        states = [(w.name, state) for w, state, _ in given.values() if state is not None]
        self._monitor.reduced(call, states, {divisor for _, _, divisor in given.values()})
        names = tuple(sorted(name for name, _ in states))
        for rank, (worker, _, _) in given.items():
            self._world.after(self._delay(), worker.process, self._deliver, rank, call, names)

    def _deliver(self, rank: int, call: int, names: tuple[str, ...]) -> None:
        """The last bytes come, unless who sends them has closed its connection before."""
        worker = self.members[rank]
        if self._is_cut_off(rank) and self._world.rng.random() < 0.5:
            worker.failed(self.quorum_id, call, "a peer has closed the connection")
        else:
            worker.reduced(self.quorum_id, call, names)

    def _is_cut_off(self, rank: int) -> bool:
        return not self.gone.isdisjoint(((rank - 1) % self.size, (rank + 1) % self.size))

    def _fail(self, rank: int) -> None:
        worker = self.members[rank]
        if rank in self._given or len(self.members) < self.size:
            self._world.after(_LOOK_S, worker.process, self._cut, rank)

    def _cut(self, rank: int) -> None:
        worker = self.members[rank]
        if rank in self._given:
            worker.failed(self.quorum_id, self._call, "a peer has closed the connection")
        elif len(self.members) < self.size:
            worker.failed(self.quorum_id, 0, "a peer did not come")

    def _delay(self) -> float:
        chance = self._world.rng.random()
        return 0.002 + (0.3 * self._world.rng.random() if chance < 0.05 else 0.002 * chance)
