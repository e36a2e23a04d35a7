"""Watches one node's workers for steps that do not come, and looks into them when it is asked.

What is a hang is decided by the leader (`rendezvous.hang`), who asks all nodes; with ``ft=true``,
where a replica is alone, by its own agent. When to suspect one stands in `hangwatch`. Looking into
workers (`looks`) takes a second or two, on a thread of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from hpc_elastic.agent import stacks
from hpc_elastic.agent.hangwatch import (
    Frame,
    StepClock,
    is_at_work,
    is_in_quorum,
    main_thread,
    moves,
    place,
    waits_in,
)
from hpc_elastic.agent.looks import Looks, look_at
from hpc_elastic.agent.observer import load_of
from hpc_elastic.agent.report import Place, WorkerFiles
from hpc_elastic.progress import Page, Progress
from hpc_elastic.rendezvous.hang import PATIENCE, RankState, failures_of, judge, note_of
from hpc_elastic.rendezvous.heard import Proposal
from hpc_elastic.rendezvous.record import Agent

_log = logging.getLogger(__name__)

_WRITTEN_WITHIN_S = 2.0
_BUSY_SHARE = 0.5
"""A main thread that wants a CPU for more of the time than that computes."""
_STOPPED = "T"
_DEBUGGED = "t"

Message = dict[str, Any]


class Leader(Protocol):
    """The part of `rendezvous.session.Session` that is used here."""

    @property
    def proposal(self) -> Proposal | None:
        """The step that all ranks may have to save at; None if there is none."""

    @property
    def stacks(self) -> int:
        """Not 0: the leader asks what the workers are at; the question's number."""

    def stalled(self, stalled_s: float, limit_s: float) -> None:
        """Report that workers have made no step for longer than the limit."""

    def answer_stacks(self, number: int, ranks: list[Message]) -> None:
        """Answer what the workers of this node are at."""

    def failed(self, failures: list[Message]) -> None:
        """Report failed workers."""


@dataclass(frozen=True)
class Watched:
    """One worker of this node.

    Attributes:
        local_rank: Its rank here.
        page: Its control page.
        files: Its logs.
        dump: Where it writes its stacks.
    """

    local_rank: int
    page: Page
    files: WorkerFiles
    dump: Path


@dataclass(frozen=True)
class Alone:
    """What an agent whose workers are a replica of their own does with a hang.

    Attributes:
        me: The agent.
        note: Writes an event.
    """

    me: Agent
    note: Callable[..., None]


class HangWatch:
    """The watch over the workers of one round.

    Args:
        leader: The session.
        workers: The node's.
        after_s: The setting `launcher.agent.hang_after_s`.
        place: Where they run.
        alone: Not None: this agent judges by itself.
    """

    def __init__(
        self,
        leader: Leader,
        workers: Sequence[Watched],
        *,
        after_s: float | None,
        place: Place,
        alone: Alone | None = None,
    ) -> None:
        now = time.monotonic()
        self._leader = leader
        self._workers = workers
        self._place = place
        self._alone = alone
        self._clocks = [StepClock(after_s, now) for _ in workers]
        self._answered = 0
        self._looking: threading.Thread | None = None
        self._writing: threading.Thread | None = None

    def look(self, pids: Mapping[int, int], now: float, *, done: bool = False) -> None:
        """Take note of what the workers have published; called several times a second.

        Args:
            pids: Their processes by local rank; one that has returned may still be there.
            now: Monotonic seconds.
            done: Whether all of them have returned; the leader may ask all the same.
        """
        proposal = self._leader.proposal
        for worker, clock in zip(self._workers, self._clocks, strict=True):
            published = worker.page.read()
            clock.look(published, now, awaited=_awaits(published, proposal))
        if self._looking is not None and self._looking.is_alive():
            return
        number, due = self._leader.stacks, [c for c in self._clocks if c.is_due(now)]
        if number != self._answered and number:
            self._answered = number
            self._start(lambda: self._answer(number, pids), now)
        elif due and not done:
            self._suspect(due[0], pids, now)

    def _suspect(self, clock: StepClock, pids: Mapping[int, int], now: float) -> None:
        stalled_s, limit_s = clock.stalled_s(now), clock.limit_s or 0.0
        _log.warning("no step for %.0f s (limit %.0f s)", stalled_s, limit_s)
        if self._alone is not None:
            alone = self._alone
            self._start(lambda: self._judge(alone, pids, stalled_s, limit_s), now)
            return
        self._leader.stalled(stalled_s, limit_s)
        self._asked(now)

    def _start(self, work: Callable[[], None], now: float) -> None:
        self._asked(now)
        self._looking = threading.Thread(target=work, name="stacks", daemon=True)
        self._looking.start()

    def _asked(self, now: float) -> None:
        for clock in self._clocks:
            clock.asked(now)

    # ---- the thread that looks --------------------------------------------------------------

    def _answer(self, number: int, pids: Mapping[int, int]) -> None:
        self._leader.answer_stacks(number, [_message(s) for s in self._look_into(pids)])

    def _judge(
        self, alone: Alone, pids: Mapping[int, int], stalled_s: float, limit_s: float
    ) -> None:
        found = [(alone.me, state) for state in self._look_into(pids)]
        finding = judge(found, patient=stalled_s < PATIENCE * limit_s)
        if finding is None:
            return
        note, round_ = note_of(finding, stalled_s), self._workers[0].files.round
        alone.note(note.kind, **note.fields)
        failed = [_message(f) for _, f in failures_of(finding, stalled_s, round_)]
        self._leader.failed(failed)

    def _look_into(self, pids: Mapping[int, int]) -> list[RankState]:
        looks = [Looks(pids.get(w.local_rank), w.page, w.dump) for w in self._workers]
        since, loads = time.monotonic(), {pid: load_of(pid) for pid in pids.values()}
        look_at(looks)
        wanted_s = _BUSY_SHARE * (time.monotonic() - since)
        computing = {
            pid
            for pid, load_s in loads.items()
            if _wants_cpu(load_s, load_of(pid), wanted_s) and not stacks.has_gpu(pid)
        }
        found = [
            self._state(worker, look, clock, computes=look.pid in computing)
            for worker, look, clock in zip(self._workers, looks, self._clocks, strict=True)
        ]
        self._write(found, looks)
        return found

    def _state(
        self, worker: Watched, looks: Looks, clock: StepClock, *, computes: bool
    ) -> RankState:
        seen = Seen(
            letter=None if looks.pid is None else stacks.process_state(looks.pid),
            dumps=[main_thread(text) for text in list(looks.texts)],
            published=worker.page.read(),
            computes=computes,
            alive=looks.was_busy or clock.is_alive(time.monotonic()),
            alone=self._alone is not None,
        )
        state, dumps = seen.state, seen.dumps
        waits = waits_in(dumps[-1]) if dumps and state in ("stands", "moves") else None
        return RankState(worker.files.rank, worker.local_rank, state, seen.place, waits,
                         str(worker.files.stack))  # fmt: skip

    def _write(self, found: Sequence[RankState], looks: Sequence[Looks]) -> None:
        """Write the stacks down; wait a little only, for the file system may be what hangs."""
        if self._writing is not None and self._writing.is_alive():
            _log.warning("the stacks are not written: those of the time before still are not")
            return
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        texts = [
            f"{now} rank {state.rank} on {self._place.host}, process {look.pid}: {state.state}, "
            f"{state.where}\n{''.join(look.texts[-1:])}\n"
            for state, look in zip(found, looks, strict=True)
        ]
        self._writing = threading.Thread(
            target=self._append, args=(texts,), name="stack files", daemon=True
        )
        self._writing.start()
        self._writing.join(_WRITTEN_WITHIN_S)

    def _append(self, texts: Sequence[str]) -> None:
        for worker, text in zip(self._workers, texts, strict=True):
            try:
                with worker.files.stack.open("a") as f:
                    f.write(text)
            except OSError as e:
                _log.warning("%s: not written: %s", worker.files.stack, e)


@dataclass(frozen=True)
class Seen:
    """What was seen of a worker.

    Attributes:
        letter: Linux's, of its process; None: it is gone.
        dumps: What its main thread did, one look after the other.
        published: What it has published.
        computes: Whether its main thread wants a CPU nearly always, and has no GPU: one that waits
            for its GPU spins.
        alive: Whether it was busy meanwhile, or see `StepClock.is_alive`.
        alone: Whether it is a replica, which is at work as long as it waits for others.
    """

    letter: str | None
    dumps: Sequence[tuple[Frame, ...]]
    published: Progress
    computes: bool = False
    alive: bool = False
    alone: bool = False

    @property
    def state(self) -> str:
        """What a rank is at (see `RankState`)."""
        if self.letter in (None, "Z"):
            return "done"
        if self.letter == _STOPPED:
            return "stopped"
        waits = self.alone and self.dumps and is_in_quorum(self.dumps[-1])
        if self.published.busy or self.published.held or self.alive or waits:
            return "busy"
        if self.letter == _DEBUGGED:
            return "moves"
        if not self.dumps:
            return "silent"
        works = self.computes or moves(self.dumps) or is_at_work(self.dumps[-1])
        return "moves" if works else "stands"

    @property
    def place(self) -> str:
        """Where it is, for people (see `RankState`)."""
        match self.state:
            case "stopped":
                return "stopped by a signal (SIGSTOP, or the like)"
            case "silent":
                return f"out of reach: its process is in state {self.letter}, and shows no stack"
            case "done":
                return "done"
            case "busy" if not self.dumps:
                return "work that is no step"
        return place(self.dumps[-1] if self.dumps else ())


def _wants_cpu(before_s: float | None, after_s: float | None, wanted_s: float) -> bool:
    return before_s is not None and after_s is not None and after_s - before_s > wanted_s


def _awaits(worker: Progress, proposal: Proposal | None) -> bool:
    """Tell whether a worker waits for its leader's word on the step that it is at."""
    return proposal is not None and not proposal.confirmed and worker.passed == proposal.step


def _message(item: Any) -> Message:
    fields = asdict(item)
    fields.pop("time")
    return {**fields, "age_s": 0.0}


def kill_stopped(pids: Sequence[int]) -> None:
    """Kill workers that are stopped by a signal: no other would end them in time (agent)."""
    for pid in pids:
        if stacks.process_state(pid) == _STOPPED:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
