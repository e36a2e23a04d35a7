"""Which looks at the group are worth a line of progress.jsonl, and at what pace it trains (pure).

A line is written when the group has changed, after one of how far it was before; and else every
`SHORTEST_S`, in a run that has lasted for longer than `DENSE_S` every 2000th part of its age. So a
run of a day has about 6,000 lines, and one of a year 18,000 (some 4 MB), besides those of its
changes, which the event log has as well. Nothing that was written is ever changed: whoever leads
next goes on below.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

SHORTEST_S = 5.0
DENSE_S = 10_000.0
"""So long after its start a run has a line every `SHORTEST_S`."""

_PACE_S = 30.0
"""The pace is taken over so long."""
_KEPT = ("step", "total_steps", "samples", "loss", "nodes", "world_size", "blocked_s", "phase",
         "round", "epoch", "checkpoint")  # fmt: skip
_GROUP = ("phase", "round", "epoch", "nodes", "world_size")

Message = dict[str, Any]


def spacing_s(age_s: float) -> float:
    """Return the seconds between two lines of a run of this age."""
    return SHORTEST_S * max(1.0, age_s / DENSE_S)


def line_of(status: Mapping[str, Any]) -> Message:
    """Return what is kept of a status, but for its time."""
    return {name: status.get(name) for name in (*_KEPT, "steps_per_s", "samples_per_s")}


class Pace:
    """How much a second of something that is counted, over the last half minute."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, count: int | None, now: float) -> None:
        """Take note of the count as it is now; one that goes back begins anew."""
        if count is None or (self._seen and count < self._seen[-1][1]):
            self._seen.clear()
        if count is not None:
            self._seen.append((now, count))
        while len(self._seen) > 2 and now - self._seen[1][0] >= _PACE_S:
            self._seen.popleft()

    @property
    def rate(self) -> float | None:
        """How much a second; None before there is anything to compare."""
        if len(self._seen) < 2:
            return None
        (begin, first), (end, last) = self._seen[0], self._seen[-1]
        return round((last - first) / (end - begin), 4) if end > begin else None


class Series:
    """The progress of a run, as one leader writes it down."""

    def __init__(self) -> None:
        self._steps, self._samples = Pace(), Pace()
        self._group: list[Any] | None = None
        self._last: Message | None = None
        """The last look, which was not worth a line."""
        self._written = 0.0

    def look(self, status: Mapping[str, Any], now: float, started: float) -> list[Message]:
        """Take note of the group as it is now.

        Args:
            status: What status.json shows.
            now: Unix seconds. Leaders have clocks of their own: whoever reads sorts the lines.
            started: When the run was first led.

        Returns:
            The lines to write, none if none is due.
        """
        group = [status.get(name) for name in _GROUP]
        changed = group != self._group
        if changed:
            self._steps, self._samples = Pace(), Pace()
        self._steps.note(status.get("step"), now)
        self._samples.note(status.get("samples"), now)
        line = {"time": round(now, 3), **line_of({**status, **self.rates})}
        before, self._last = self._last, line
        if not changed and abs(now - self._written) < spacing_s(now - started):
            return []
        self._group, self._written, self._last = group, now, None
        return [before, line] if changed and before is not None else [line]

    @property
    def rates(self) -> Message:
        """Steps and samples a second, None where they are not known."""
        return {"steps_per_s": self._steps.rate, "samples_per_s": self._samples.rate}
