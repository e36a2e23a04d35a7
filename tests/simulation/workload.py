"""Workload: the workers of a round, which make steps, save and fail in virtual time.

A rank shares a page with its agent, as `hpc_elastic.worker.shared_page` describes it. Each access
to the page is one event here, and the agent looks at it a little later, so that all orders of the
two come up.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from hpc_elastic.rendezvous.log_entry import Agent, LogEntry
from hpc_elastic.worker.shared_page import CheckpointRequest, WorkerStatus
from simulation.invariants import Monitor, RankAt
from simulation.scenario import Training
from simulation.world import Host, Network, Process, World

_SLOW_TO_LOOK = 0.1
"""So often a rank reads the request some time after it has published its step."""
_LATE_S = 0.05
_WAKES_AFTER_S = 0.004


class Doing(Enum):
    """What a rank does."""

    STEPPING = "makes a step"
    LOOKING = "has come to a step, and not looked yet"
    WAITING = "waits at a proposed step"
    SAVING = "saves"
    STAYING = "stays at a checkpoint"
    DONE = "has returned"


class Page:
    """The control page, as the agent's side uses it (`hpc_elastic.agent.worker_channel`)."""

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
        """The event in which it was read last: nothing is published in the course of one."""

    def request_checkpoint(self, request: CheckpointRequest | None) -> None:
        """Replace the worker's checkpoint request."""
        self.request = request
        if request is not None and request.confirmed:
            self.confirmed, self.pauses = request.number, request.pause
        if request is not None and request.released:
            self.released = request.number
        if self._rank.doing in (Doing.WAITING, Doing.STAYING):
            self._rank.wake()

    def awaits_at(self, steps: range) -> CheckpointRequest | None:
        """The request that a worker which polls the last of these steps acts on, or waits for."""
        request = self.request
        return request if request is not None and request.step in steps else None

    def pause_request(self, step: int) -> int:
        """The number of the request to stay at a checkpoint; 0: none."""
        request = self.request
        if request is None or request.number <= self.released:
            return 0
        if self.confirmed != request.number or not self.pauses:
            return 0
        is_here = request.step is None or request.step <= (self.agreed or 0) <= step
        return request.number if is_here else 0

    def read(self) -> WorkerStatus:
        """Return what the worker last published."""
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

    __slots__ = ("_first", "at", "doing", "is_blocked", "member", "page", "waits_since", "work")

    def __init__(self, work: Work, member: Member, first: bool) -> None:
        self.member = member
        self.at = work.start
        """The last step that it has come to."""
        self.doing = Doing.STEPPING
        self.is_blocked = False
        """Whether it cannot go on before others have made a step."""
        self.waits_since = 0.0
        self.page = Page(self)
        self.work = work
        self._first = first

    def go_on(self) -> None:
        """Begin the next step."""
        self.doing = Doing.STEPPING
        training = self.work.training
        if training.total_steps is not None and self.at >= training.total_steps:
            self.doing = Doing.DONE
            self.work.returned(self)
            self.work.world.after(0.01, self.member.process, self.member.ended, self.work, 0)
            return
        jitter = 0.7 + 0.6 * self.work.world.rng.random()
        self.work.world.after(training.step_s * jitter, None, self.step)

    def step(self) -> None:
        """Complete a step, if the others let it."""
        work = self.work
        if work.over:
            return
        if not work.is_whole:  # a collective waits for members that are cut off or paused
            work.world.after(work.training.step_s, None, self.step)
            return
        if self.at - work.steps >= work.training.ranks_apart:
            self.is_blocked = True
            return
        self.at += 1
        work.advanced()
        if not work.training.asks or self.at % work.training.poll_every:
            self._passes(agreed=False)
            return
        self.page.passed = self.at
        if self.page.request is not None:
            self.member.touch()
        self.doing = Doing.LOOKING
        rng = work.world.rng
        if rng.random() < _SLOW_TO_LOOK:
            work.world.after(_LATE_S * rng.random(), None, self._check_page)
        else:
            self._check_page()

    def wake(self) -> None:
        """The page that it waits for has changed."""
        world = self.work.world
        what = self._check_page if self.doing is Doing.WAITING else self._stay
        world.after(_WAKES_AFTER_S * world.rng.random(), None, what)

    def want(self) -> None:
        """Ask for a checkpoint of the whole group."""
        self.page.wanted += 1
        self.member.touch()

    def _check_page(self) -> None:
        """See whether a checkpoint is requested at its step."""
        page, work = self.page, self.work
        if work.over or self.doing not in (Doing.LOOKING, Doing.WAITING):
            return
        request = page.awaits_at(work.polled(self))
        if request is None:
            work.passed(self, None)
            self._passes(agreed=False)
            return
        page.waiting = request.number
        if page.confirmed == request.number:
            page.agreed = self.at
            work.passed(self, page.pauses)
            self._passes(agreed=True)
        elif self.doing is not Doing.WAITING:
            self.doing = Doing.WAITING
            self.waits_since = work.world.now
            work.waits(self)
            self.member.touch()

    def _passes(self, *, agreed: bool) -> None:
        work, training = self.work, self.work.training
        if agreed or self.at % training.boundary_every == 0:
            self.doing = Doing.SAVING
            rng = work.world.rng
            work.world.after(training.save_s * rng.random(), None, self._saved)
        else:
            self.go_on()

    def _saved(self) -> None:
        work = self.work
        if work.over:
            return
        work.saved(self)
        by = work.training.announced_by
        if by == "nobody" or (by == "first" and not self._first):
            self.go_on()
            return
        self.page.boundary = self.at
        self.member.touch()
        self.doing = Doing.STAYING
        self._stay()

    def _stay(self) -> None:
        """Stay at a checkpoint for as long as the agent asks for it."""
        if self.work.over or self.doing is not Doing.STAYING:
            return
        self.page.paused = self.page.pause_request(self.at)
        if self.page.paused:
            self.member.touch()
        else:
            self.go_on()


# ---- A round's workers: their ranks' steps, which depend on each other, checkpoints, failures


_EXITS = "exits with code 0"
_OUT_OF_LUCK = ("out of luck", _EXITS, "CUDA error: uncorrectable ECC error encountered")


class Member(Protocol):
    """An agent, as the workers of its round know it."""

    me: Agent
    process: Process
    over: bool
    """Whether it has left the run."""

    @property
    def host(self) -> Host:
        """The node that it is on."""

    def touch(self) -> None:
        """Something has changed on a worker's page: the agent will look at it soon."""

    def worker_failed(self, work: Work, message: str, *, itself: bool) -> None:
        """A worker of the node has failed, by ``itself`` or of a lost peer."""

    def ended(self, work: Work, exit_code: int) -> None:
        """The node's worker has ended by itself, and not with an error."""


class Work:
    """The workers of all members of one round; no simulated node sees it whole."""

    __slots__ = (
        "_monitor",
        "_network",
        "_saved",
        "complete_since",
        "entry",
        "members",
        "over",
        "ranks",
        "start",
        "training",
        "world",
    )  # fmt: skip

    def __init__(
        self, entry: LogEntry, world: World, network: Network, training: Training, monitor: Monitor
    ) -> None:
        self.entry = entry
        self.start = monitor.checkpoint
        self.members: dict[Agent, Member] = {}
        self.ranks: dict[Agent, Rank] = {}
        self.over = False
        """Whether some worker has ended: no further step will be complete."""
        self.complete_since: float | None = None
        self.world = world
        self.training = training
        self._network = network
        self._monitor = monitor
        self._saved: dict[int, int] = {}

    @property
    def steps(self) -> int:
        """The last step that all members have made."""
        return min((rank.at for rank in self.ranks.values()), default=self.start)

    @property
    def is_whole(self) -> bool:
        """Whether all members are at work, alive, and reach each other."""
        if self.over or self.complete_since is None:
            return False
        hosts = [m.host for m in self.members.values()]
        alive = all(m.process.alive and not m.process.paused for m in self.members.values())
        return alive and not self._network.is_any_cut(hosts)

    def ranks_at(self) -> list[RankAt]:
        """Return where all ranks stand, and what is requested of them."""
        waiting = (Doing.LOOKING, Doing.WAITING)
        return [
            RankAt(r.member.me, r.page.passed or 0, r.doing in waiting, r.page.request)
            for r in self.ranks.values()
        ]

    def staying_members(self) -> list[Agent]:
        """Return the members that live, and have not left the run."""
        return [m.me for m in self.members.values() if m.process.alive and not m.over]

    # ---- what agents do -----------------------------------------------------------------

    def enter(self, member: Member) -> Rank:
        """A member's workers have started."""
        self.members[member.me] = member
        first = self.entry.members[0] == member.me
        rank = self.ranks[member.me] = Rank(self, member, first)
        if len(self.members) == len(self.entry.members) and not self.over:
            self.complete_since = self.world.now
            for each in self.ranks.values():
                each.go_on()
        rng = self.world.rng
        if rng.random() < self.training.failure_rate:
            self.world.after(6 * rng.random(), member.process, self._fail, member)
        if first:
            self._want_later(rank)
        return rank

    def leave(self, member: Member, secondary_failures: bool) -> None:
        """A member's workers end; those of others lose a peer, and may fail of it."""
        was_over, self.over = self.over, True
        if not secondary_failures or was_over:
            return
        for other in self.members.values():
            if other is not member and self.world.rng.random() < 0.5:
                self.world.after(0.05 + 0.3 * self.world.rng.random(), other.process,
                                 self._is_victim, other)  # fmt: skip

    def _is_victim(self, member: Member) -> None:
        member.worker_failed(self, "Connection reset by peer", itself=False)

    def _fail(self, member: Member) -> None:
        if self.over or self.world.now >= self.training.fails_until_s:
            return
        what = self.world.rng.choice(_OUT_OF_LUCK)
        if what == _EXITS:
            member.ended(self, 0)
        else:
            member.worker_failed(self, what, itself=True)

    def _want_later(self, rank: Rank) -> None:
        if self.training.wants_every_s is not None:
            pause = self.training.wants_every_s * (0.5 + self.world.rng.random())
            self.world.after(pause, None, self._want, rank)

    def _want(self, rank: Rank) -> None:
        if self.over:
            return
        if self.training.asks and rank.doing is not Doing.DONE and rank.at > self.start:
            rank.want()
        self._want_later(rank)

    # ---- what ranks do ------------------------------------------------------------------

    def advanced(self) -> None:
        """A rank has made a step: others may go on."""
        for rank in self.ranks.values():
            if rank.is_blocked:
                rank.is_blocked = False
                self.world.after(0.001, None, rank.step)

    def waits(self, rank: Rank) -> None:
        """A rank has begun to wait at a proposed step."""
        since = rank.waits_since

        def waits() -> bool:
            return not self.over and rank.doing is Doing.WAITING and rank.waits_since == since

        self._monitor.waits(rank.member.me, rank.at, waits)

    def passed(self, rank: Rank, pauses: bool | None) -> None:
        """A rank has polled a step: whether it stays at a checkpoint there; None: it continues."""
        self._monitor.passed(self.entry.index, rank.member.me, self.polled(rank), pauses)

    def polled(self, rank: Rank) -> range:
        """The steps that a rank has made since it polled before."""
        return range(max(1, rank.at - self.training.poll_every + 1), rank.at + 1)

    def returned(self, rank: Rank) -> None:
        """The function of a rank has returned."""
        self._monitor.returned(rank.member.me, self.entry.index)

    def saved(self, rank: Rank) -> None:
        """A rank has saved its part of the checkpoint of the step that it is at."""
        num = self._saved[rank.at] = self._saved.get(rank.at, 0) + 1
        if num == len(self.entry.members):
            self._monitor.checkpoint = max(self._monitor.checkpoint, rank.at)
