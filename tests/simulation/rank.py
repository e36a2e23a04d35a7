"""One rank of a round: a worker that makes steps, asks whether to save, saves, and may stay.

It shares a page with its agent, as `hpc_elastic.worker.shared_page` describes it. Each access to
the page is one event here, and the agent looks at it a little later, so that all orders of the two
come up.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from hpc_elastic.worker.shared_page import WorkerStatus

if TYPE_CHECKING:
    from simulation.training import Member, Work

_SLOW_TO_LOOK = 0.1
"""So often a rank looks at the proposal some time after it has published its step."""
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
        "_rank", "_read", "_read_in", "boundary", "confirmed", "held", "hold_number", "number",
        "passed", "step", "waiting", "wanted",
    )  # fmt: skip

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.hold_number = self.number = self.step = self.confirmed = 0
        self.boundary: int | None = None
        self.passed: int | None = None
        self.held = self.waiting = self.wanted = 0
        self._read: WorkerStatus | None = None
        self._read_in = 0
        """The event in which it was read last: nothing is published in the course of one."""

    def hold(self, request: int) -> None:
        """Ask the worker to stay at its next boundary; 0 lets it go."""
        self.hold_number = request
        if self._rank.doing is Doing.STAYING:
            self._rank.wake()

    def propose(self, number: int, step: int) -> None:
        """Propose to save at a step."""
        self.number, self.step = number, step
        if self._rank.doing in (Doing.WAITING, Doing.STAYING):
            self._rank.wake()

    def confirm(self, number: int) -> None:
        """Say that all ranks will save at the step of a proposal."""
        self.confirmed = number
        if self._rank.doing is Doing.WAITING:
            self._rank.wake()

    def read(self) -> WorkerStatus:
        """Return what the worker last published."""
        event = self._rank.work.world.num_events
        if self._read is None or event != self._read_in:
            self._read_in = event
            self._read = WorkerStatus(
                None, None, None, None, None, self.boundary, self.held, self.passed, self.waiting,
                self.wanted, returned=self._rank.doing is Doing.DONE,
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
        """Whether it can not go on before others have made a step."""
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
        if not work.is_whole:  # a collective waits for whoever is cut off or paused
            work.world.after(work.training.step_s, None, self.step)
            return
        if self.at - work.steps >= work.training.ranks_apart:
            self.is_blocked = True
            return
        self.at += 1
        work.advanced()
        if not work.training.asks:
            self._passes(agreed=False)
            return
        self.page.passed = self.at
        if self.page.number and self.at <= self.page.step + 1:
            self.member.touch()
        self.doing = Doing.LOOKING
        rng = work.world.rng
        if rng.random() < _SLOW_TO_LOOK:
            work.world.after(_LATE_S * rng.random(), None, self._look)
        else:
            self._look()

    def wake(self) -> None:
        """The page that it waits for has changed."""
        world = self.work.world
        what = self._look if self.doing is Doing.WAITING else self._stay
        world.after(_WAKES_AFTER_S * world.rng.random(), None, what)

    def want(self) -> None:
        """Ask for a checkpoint of the whole group."""
        self.page.wanted += 1
        self.member.touch()

    def _look(self) -> None:
        """See whether its step is proposed."""
        page, work = self.page, self.work
        if work.over or self.doing not in (Doing.LOOKING, Doing.WAITING):
            return
        if not (page.number and page.step == self.at):
            self._passes(agreed=False)
            return
        page.waiting = page.number
        if page.confirmed == page.number:
            self._passes(agreed=True)
        elif self.doing is not Doing.WAITING:
            self.doing = Doing.WAITING
            self.waits_since = work.world.now
            work.waits(self)
            self.member.touch()

    def _passes(self, *, agreed: bool) -> None:
        work, training = self.work, self.work.training
        work.passed(self, agreed)
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
        """Stay at a checkpoint for as long as the agent asks for it, and proposes no later one."""
        if self.work.over or self.doing is not Doing.STAYING:
            return
        if self.page.hold_number and self.page.step <= self.at:
            self.page.held = self.page.hold_number
            self.member.touch()
        else:
            self.page.held = 0
            self.go_on()
