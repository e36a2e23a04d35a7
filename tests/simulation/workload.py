"""The workers of a round, which make steps, save and fail in virtual time.

A rank shares a page with its agent, see `hpc_elastic.worker.shared_page`. Each access to the page
is one event, and the agent polls it a little later, so that all orders of the two occur.
"""

from __future__ import annotations

from enum import Enum
from functools import partial
from typing import Protocol

from hpc_elastic.rendezvous.log_entry import Agent, LogEntry
from hpc_elastic.worker.shared_page import CheckpointRequest, WorkerStatus
from simulation.invariants import Monitor, RankAt
from simulation.scenario import Training
from simulation.world import Host, Network, Process, World

_LATE_READS = 0.1
"""Share of steps at which a rank reads the request some time after it has published its step."""
_LATE_S = 0.05
_WAKES_AFTER_S = 0.004
_STALL_S = 4.0
"""Time between two reports of a rank that makes no step."""


class Doing(Enum):
    """The state of a rank."""

    STEPPING = "makes a step"
    POLLING = "has completed a step, and not read the request yet"
    WAITING = "waits at a proposed step"
    SAVING = "saves"
    STAYING = "stays at a checkpoint"
    DONE = "has returned"


class Page:
    """The shared page, as the agent uses it (`hpc_elastic.agent.worker_channel`)."""

    __slots__ = (
        "_rank", "_read", "_read_in", "agreed", "boundary", "confirmed", "passed", "paused",
        "pauses", "released", "request", "waiting", "wanted",
    )  # fmt: skip

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.request: CheckpointRequest | None = None
        self.confirmed = self.released = 0
        self.pauses = False
        self.agreed: int | None = None
        self.boundary: int | None = None
        self.passed: int | None = None
        self.paused = self.waiting = self.wanted = 0
        self._read: WorkerStatus | None = None
        self._read_in = 0
        """The event in which the page was read last; no page changes during an event."""

    def request_checkpoint(self, request: CheckpointRequest | None) -> None:
        """Replace the worker's checkpoint request."""
        self.request = request
        if request is not None and request.confirmed:
            self.confirmed, self.pauses = request.number, request.pause
        if request is not None and request.released:
            self.released = request.number
        if self._rank.doing in (Doing.WAITING, Doing.STAYING):
            self._rank.wake()

    def pause_request(self, step: int) -> int:
        """Return the number of the request to stay at a checkpoint; 0 if there is none."""
        request = self.request
        if request is None or request.number <= self.released:
            return 0
        if self.confirmed != request.number or not self.pauses:
            return 0
        is_here = request.step is None or request.step <= (self.agreed or 0) <= step
        return request.number if is_here else 0

    def read(self) -> WorkerStatus:
        """Return the worker's last status."""
        event = self._rank.work.world.num_events
        if self._read is None or event != self._read_in:
            self._read_in = event
            self._read = WorkerStatus(
                None, None, None, None, None, self.boundary, self.paused, self.passed, self.waiting,
                self.agreed, self.wanted, returned=self._rank.doing is Doing.DONE,
            )  # fmt: skip
        return self._read


class Rank:
    """The worker of one member."""

    __slots__ = (
        "_first", "_stalled_at", "at", "doing", "is_blocked", "member", "page", "waits_since",
        "work",
    )  # fmt: skip

    def __init__(self, work: Work, member: Member, first: bool) -> None:
        self.member = member
        self.at = work.start
        """The last step that it has completed."""
        self.doing = Doing.STEPPING
        self.is_blocked = False
        """Whether it must wait for the steps of other ranks."""
        self.waits_since = 0.0
        self.page = Page(self)
        self.work = work
        self._first = first
        self._stalled_at = work.world.now

    def start_step(self) -> None:
        """Start the next step, or return after the last one."""
        self.doing, work = Doing.STEPPING, self.work
        training = work.training
        if training.total_steps is not None and self.at >= training.total_steps:
            self.doing = Doing.DONE
            work.monitor.returned(self.member.me, work.entry.index)
            work.world.after(0.01, self.member.process, self.member.ended, work, 0)
            return
        jitter = 0.7 + 0.6 * work.world.rng.random()
        work.world.after(training.step_s * jitter, None, self.complete_step)

    def complete_step(self) -> None:
        """Complete a step, unless other ranks hold it up."""
        work = self.work
        if work.over:
            return
        if not work.is_whole:  # a collective waits for members that are cut off or paused
            work.world.after(work.training.step_s, None, self.complete_step)
            if work.is_severed and work.world.now - self._stalled_at > _STALL_S:
                self._stalled_at = work.world.now
                self.member.stalled(work)
            return
        if self.at - work.steps >= work.training.ranks_apart:
            self.is_blocked = True
            return
        self.at += 1
        for rank in work.ranks.values():
            if rank.is_blocked:
                rank.is_blocked = False
                work.world.after(0.001, None, rank.complete_step)
        if not work.training.polls or self.at % work.training.poll_every:
            self._pass_step(agreed=False)
            return
        self.page.passed = self.at
        if self.page.request is not None:
            self.member.touch()
        self.doing = Doing.POLLING
        rng = work.world.rng
        if rng.random() < _LATE_READS:
            work.world.after(_LATE_S * rng.random(), None, self._check_page)
        else:
            self._check_page()

    def wake(self) -> None:
        """Schedule a read of the page, which has changed while the rank waits."""
        world = self.work.world
        what = self._check_page if self.doing is Doing.WAITING else self._stay
        world.after(_WAKES_AFTER_S * world.rng.random(), None, what)

    def _check_page(self) -> None:
        """Read the page: save, wait, or go on, depending on the request."""
        page, work = self.page, self.work
        if work.over or self.doing not in (Doing.POLLING, Doing.WAITING):
            return
        polled = range(max(1, self.at - work.training.poll_every + 1), self.at + 1)
        request, entry = page.request, work.entry.index
        if request is None or request.step not in polled:
            work.monitor.step_passed(entry, self.member.me, polled, None)
            self._pass_step(agreed=False)
            return
        page.waiting = request.number
        if page.confirmed == request.number:
            page.agreed = self.at
            work.monitor.step_passed(entry, self.member.me, polled, page.pauses)
            self._pass_step(agreed=True)
        elif self.doing is not Doing.WAITING:
            self.doing = Doing.WAITING
            self.waits_since = since = work.world.now

            def waits() -> bool:
                return not work.over and self.doing is Doing.WAITING and self.waits_since == since

            work.monitor.rank_waits(self.member.me, self.at, waits)
            self.member.touch()

    def _pass_step(self, *, agreed: bool) -> None:
        work, training = self.work, self.work.training
        if agreed or self.at % training.boundary_every == 0:
            self.doing = Doing.SAVING
            rng = work.world.rng
            work.world.after(training.save_s * rng.random(), None, self._saved)
        else:
            self.start_step()

    def _saved(self) -> None:
        work = self.work
        if work.over:
            return
        work.saved(self)
        by = work.training.announced_by
        if by == "none" or (by == "first" and not self._first):
            self.start_step()
            return
        self.page.boundary = self.at
        self.member.touch()
        self.doing = Doing.STAYING
        self._stay()

    def _stay(self) -> None:
        """Stay at a checkpoint while the agent requests it."""
        if self.work.over or self.doing is not Doing.STAYING:
            return
        self.page.paused = self.page.pause_request(self.at)
        if self.page.paused:
            self.member.touch()
        else:
            self.start_step()


_EXITS = "exits with code 0"
_FAILURES = ("out of luck", _EXITS, "CUDA error: uncorrectable ECC error encountered")


class Member(Protocol):
    """An agent, as its workers use it."""

    me: Agent
    process: Process
    over: bool
    """Whether it has left the run."""

    @property
    def host(self) -> Host:
        """The agent's node."""

    def touch(self) -> None:
        """Schedule a poll of the worker's page, which has changed."""

    def worker_failed(self, work: Work, message: str, *, itself: bool) -> None:
        """A worker of the node has failed, by ``itself`` or because of a lost peer."""

    def stalled(self, work: Work) -> None:
        """The node's worker has made no step for a while."""

    def ended(self, work: Work, exit_code: int) -> None:
        """The node's worker has exited by itself, without an error."""


class Work:
    """The workers of all members of one round; no simulated node sees it whole."""

    __slots__ = (
        "_network", "_saved", "entry", "has_started", "members", "monitor", "over", "ranks",
        "start", "training", "world",
    )  # fmt: skip

    def __init__(
        self, entry: LogEntry, world: World, network: Network, training: Training, monitor: Monitor
    ) -> None:
        self.entry = entry
        self.start = monitor.checkpoint
        self.members: dict[Agent, Member] = {}
        self.ranks: dict[Agent, Rank] = {}
        self.over = False
        """Whether a worker has ended, so that no further step completes."""
        self.has_started = False
        """Whether the workers of all members have started."""
        self.world = world
        self.training = training
        self.monitor = monitor
        self._network = network
        self._saved: dict[int, int] = {}

    @property
    def steps(self) -> int:
        """The last step that all members have made."""
        return min((rank.at for rank in self.ranks.values()), default=self.start)

    @property
    def is_whole(self) -> bool:
        """Whether all members are at work, alive, and reach each other."""
        if self.over or not self.has_started:
            return False
        hosts = [m.host for m in self.members.values()]
        alive = all(m.process.alive and not m.process.paused for m in self.members.values())
        return alive and not self._network.is_any_cut(hosts)

    @property
    def is_severed(self) -> bool:
        """Whether the network between some members is severed for good."""
        return not self._network.is_complete(m.host.slot for m in self.members.values())

    def ranks_at(self) -> list[RankAt]:
        """Return the position and the request of each rank."""
        waiting = (Doing.POLLING, Doing.WAITING)
        return [
            RankAt(r.member.me, r.page.passed or 0, r.doing in waiting, r.page.request)
            for r in self.ranks.values()
        ]

    def staying_members(self) -> list[Agent]:
        """Return the members that live, and have not left the run."""
        return [m.me for m in self.members.values() if m.process.alive and not m.over]

    def enter(self, member: Member) -> Rank:
        """Add the worker of a member, which has started."""
        self.members[member.me] = member
        first = self.entry.members[0] == member.me
        rank = self.ranks[member.me] = Rank(self, member, first)
        if len(self.members) == len(self.entry.members) and not self.over:
            self.has_started = True
            for each in self.ranks.values():
                each.start_step()
        rng = self.world.rng
        if rng.random() < self.training.failure_rate:
            self.world.after(6 * rng.random(), member.process, self._fail_worker, member)
        if first:
            self._schedule_request(rank)
        return rank

    def leave(self, member: Member, secondary_failures: bool) -> None:
        """Stop a member's workers; those of others lose a peer, and may fail because of that."""
        was_over, self.over = self.over, True
        if not secondary_failures or was_over:
            return
        for other in self.members.values():
            if other is not member and self.world.rng.random() < 0.5:
                delay = 0.05 + 0.3 * self.world.rng.random()
                fail = partial(other.worker_failed, itself=False)
                self.world.after(delay, other.process, fail, self, "Connection reset by peer")

    def _fail_worker(self, member: Member) -> None:
        if self.over or self.world.now >= self.training.fails_until_s:
            return
        what = self.world.rng.choice(_FAILURES)
        if what == _EXITS:
            member.ended(self, 0)
        else:
            member.worker_failed(self, what, itself=True)

    def _schedule_request(self, rank: Rank) -> None:
        """Let a rank request a checkpoint of the group again and again."""
        if self.training.request_every_s is not None:
            pause = self.training.request_every_s * (0.5 + self.world.rng.random())
            self.world.after(pause, None, self._request_checkpoint, rank)

    def _request_checkpoint(self, rank: Rank) -> None:
        if self.over:
            return
        if self.training.polls and rank.doing is not Doing.DONE and rank.at > self.start:
            rank.page.wanted += 1
            rank.member.touch()
        self._schedule_request(rank)

    def saved(self, rank: Rank) -> None:
        """A rank has saved its part of the checkpoint of its step."""
        num = self._saved[rank.at] = self._saved.get(rank.at, 0) + 1
        if num == len(self.entry.members):
            self.monitor.checkpoint = max(self.monitor.checkpoint, rank.at)
