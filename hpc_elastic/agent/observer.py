"""What one node tells of its workers: to the leader with each heartbeat, and as metrics.

The load of a worker is the time that its main thread ran, or was ready to and found no CPU free
(proc(5), schedstat), a step. It is what this rank itself takes of a step: one that waits for others
in a collective sleeps. Nothing of that is measured where a rank waits for something else (a disk, a
data loader, a GPU: the CPU thread spins there, on slow ranks and on fast ones alike).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_elastic.agent.metrics import Sample, Tally, now_s
from hpc_elastic.control import ControlPage
from hpc_elastic.progress import Progress

_FEWEST_STEPS = 3
_SHORTEST_S = 4.0

Message = dict[str, Any]


@dataclass(frozen=True)
class Crew:
    """The workers of a round.

    Attributes:
        pages: Their control pages, by global rank, in order.
        pids: Returns their processes by local rank.
    """

    pages: Mapping[int, ControlPage]
    pids: Callable[[], Mapping[int, int]]


class Loads:
    """How much of a step each worker itself takes, over one window after the other."""

    def __init__(self) -> None:
        self.number = 0
        """Of the last window."""
        self.last: list[tuple[int, float, float]] = []
        """(rank, seconds of load a step, seconds a step)"""
        self._start: dict[int, tuple[int, float, float]] = {}
        """By rank: step, load and time at which the window began."""

    def look(self, found: Mapping[int, tuple[int | None, float | None]], now: float) -> None:
        """Take note of (step, seconds of load so far) of each rank."""
        known = {r: (s, b, now) for r, (s, b) in found.items() if s is not None and b is not None}
        if known.keys() != self._start.keys() or any(
            known[r][0] < self._start[r][0] for r in known
        ):
            self._start = known
            return
        window = [_a_step(rank, self._start[rank], end) for rank, end in known.items()]
        made = [w for w in window if w is not None]
        if made and len(made) == len(window):
            self.number += 1
            self.last, self._start = made, known


def _a_step(
    rank: int, start: tuple[int, float, float], end: tuple[int, float, float]
) -> tuple[int, float, float] | None:
    num_steps, load_s, took_s = (b - a for a, b in zip(start, end, strict=True))
    if num_steps < _FEWEST_STEPS or took_s < _SHORTEST_S:
        return None
    return rank, load_s / num_steps, took_s / num_steps


def load_of(pid: int) -> float | None:
    """Return the seconds that a process's main thread ran or wanted to; None: not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        ran, waited, *_ = Path(f"/proc/{pid}/schedstat").read_text().split()
        return (int(ran) + int(waited)) / 1e9
    return None


class Observer:
    """What one task knows of its workers, over all rounds.

    Args:
        rest: Returns what is not the workers': a `Sample` with those fields filled in.
    """

    def __init__(self, rest: Callable[[], Sample]) -> None:
        self._rest = rest
        self._tally = Tally(now_s())
        self._loads = Loads()
        self._crew: Crew | None = None
        self._lock = threading.Lock()

    def watch(self, crew: Crew) -> None:
        """The workers of another round are started (agent's thread)."""
        with self._lock:
            self._crew, self._loads = crew, Loads()
            self._tally.new_round()

    def progress(self) -> Message:
        """Return what a heartbeat carries: of the first worker, and the loads of all."""
        crew = self._crew
        if crew is None or not crew.pages:
            return {}
        first = crew.pages[min(crew.pages)].read()
        told = {
            "step": first.step, "total": first.total_steps, "loss": first.loss,
            "samples": first.samples, "blocked_s": round(first.blocked_s, 3),
        }  # fmt: skip
        loads = self._loads
        return {**told, "loads": [loads.number, loads.last]} if loads.number else told

    def look(self) -> Sample:
        """Return what is known now, and measure the loads."""
        now = now_s()
        with self._lock:
            crew = self._crew
            if crew is None or not crew.pages:
                return replace(self._rest(), up_seconds=self._tally.up_s(now))
            published = {rank: page.read() for rank, page in crew.pages.items()}
            self._loads.look(_loads_of(published, crew.pids()), now)
            sample = self._tally.look(published[min(published)], now)
            for page in crew.pages.values():
                page.tell_goodput(sample.goodput_ratio or 0.0)
        rest = self._rest()
        known = {k: v for k, v in vars(rest).items() if v is not None}
        return replace(sample, **known)


def _loads_of(
    published: Mapping[int, Progress], pids: Mapping[int, int]
) -> dict[int, tuple[int | None, float | None]]:
    first = min(published)
    loads = {r: load_of(pids[r - first]) if r - first in pids else None for r in published}
    return {rank: (worker.step, loads[rank]) for rank, worker in published.items()}
