"""A round's workers: their ranks' steps, which depend on each other, checkpoints, failures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hpc_elastic.rendezvous.log_entry import Agent, LogEntry
from simulation.network import Host, Network
from simulation.rank import Doing, Rank
from simulation.scenario import Training
from simulation.world import Process, World

if TYPE_CHECKING:
    from simulation.invariants import Monitor

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
    """The workers of all members of one round; nobody in the simulation sees it whole."""

    __slots__ = (
        "_monitor", "_network", "_saved", "complete_since", "members", "over", "ranks", "record",
        "start", "training", "world",
    )  # fmt: skip

    def __init__(
        self, record: LogEntry, world: World, network: Network, training: Training, monitor: Monitor
    ) -> None:
        self.record = record
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

    # ---- what agents do -----------------------------------------------------------------

    def enter(self, member: Member) -> Rank:
        """A member's workers have started."""
        self.members[member.me] = member
        first = self.record.members[0] == member.me
        rank = self.ranks[member.me] = Rank(self, member, first)
        if len(self.members) == len(self.record.members) and not self.over:
            self.complete_since = self.world.now
            for each in self.ranks.values():
                each.go_on()
        rng = self.world.rng
        if rng.random() < self.training.failure_rate:
            self.world.after(6 * rng.random(), member.process, self._fail, member)
        if first:
            self._want_later(rank)
        return rank

    def leave(self, member: Member, victims: bool) -> None:
        """A member's workers are ended; the others lose a peer and may (``victims``) fail of it."""
        was_over, self.over = self.over, True
        if not victims or was_over:
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
        self._monitor.waits(self, rank)

    def passed(self, rank: Rank, agreed: bool) -> None:
        """A rank goes on from a step, or saves there because all do (``agreed``)."""
        self._monitor.passed(self, rank, agreed)

    def returned(self, rank: Rank) -> None:
        """The function of a rank has returned."""
        self._monitor.returned(rank.member.me, self.record.number)

    def saved(self, rank: Rank) -> None:
        """A rank has saved its part of the checkpoint of the step that it is at."""
        num = self._saved[rank.at] = self._saved.get(rank.at, 0) + 1
        if num == len(self.record.members):
            self._monitor.checkpoint = max(self._monitor.checkpoint, rank.at)
