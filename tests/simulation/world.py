"""Virtual time: a heap of events, and processes that may be paused or dead when theirs come."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

TRACE_LINES = 40

Call = tuple[Callable[..., None], tuple[Any, ...]]


class Process:
    """Something that runs on a node: handles its events in order, unless it is stopped or dead."""

    __slots__ = ("_backlog", "alive", "paused")

    def __init__(self) -> None:
        self.alive = True
        self.paused = False
        self._backlog: list[Call] = []

    def call(self, handler: Callable[..., None], *args: Any) -> None:
        """Let the process handle an event: now, once it goes on, or never."""
        if self.paused:
            self._backlog.append((handler, args))
        elif self.alive:
            handler(*args)

    def resume(self, timers_last: bool) -> None:
        """Go on after a pause, with what has come meanwhile.

        Args:
            timers_last: Whether what the network brought is handled before timers that are due.
        """
        self.paused = False
        backlog, self._backlog = self._backlog, []
        if timers_last:
            backlog.sort(key=lambda call: not call[1])
        for handler, args in backlog:
            self.call(handler, *args)


class World:
    """The clock that nobody in the simulation sees, chance, and the record of what happened."""

    __slots__ = ("_heap", "_num", "now", "num_events", "rng", "trace")

    def __init__(self, seed: int, whole_trace: bool = False) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.num_events = 0
        self.trace: deque[tuple[float, str, str, object]] = deque(
            maxlen=None if whole_trace else TRACE_LINES
        )
        self._heap: list[
            tuple[float, int, Process | None, Callable[..., None], tuple[Any, ...]]
        ] = []
        self._num = 0

    def after(
        self, delay_s: float, process: Process | None, handler: Callable[..., None], *args: Any
    ) -> None:
        """Let something happen later, in a process or (None) by itself."""
        self._num += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._num, process, handler, args))

    def run(self, until: float) -> None:
        """Let time pass."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until:
            self.now, _, process, handler, args = pop(heap)
            self.num_events += 1
            if process is None:
                handler(*args)
            elif process.alive:
                process.call(handler, *args)
        self.now = until

    def note(self, who: str, what: str, detail: object = "") -> None:
        """Add a line to the trace; it is formatted only if somebody reads it."""
        self.trace.append((self.now, who, what, detail))
