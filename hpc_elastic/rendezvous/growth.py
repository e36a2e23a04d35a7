"""Whether a node that came late is worth the restart of the group (pure).

A group of n nodes with r seconds of work left that takes k more in has r * n / (n + k) left at
best; it saves r * k / (n + k) seconds, and pays one restart. `weigh` compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Outlook:
    """What a leader knows of the rest of the run; seconds, None where nothing is known."""

    remaining_s: float | None = None
    """Until the training is done, at the present pace."""
    restart_cost_s: float | None = None
    """From the stop of a group to the first step of the next one, as last measured."""


@dataclass(frozen=True)
class Decision:
    """Whether to admit, how many, and the reason as a sentence for the log."""

    admit: int
    why: str


def weigh(
    members: int, newcomers_time_left_s: Sequence[float | None], outlook: Outlook
) -> Decision:
    """Decide how many of the nodes that wait are worth a restart.

    Args:
        members: Nodes that train now, at least 1.
        newcomers_time_left_s: Per node that waits, its wall time left; None where it has no end.
        outlook: What is known of the rest of the run.
    """
    cost = outlook.restart_cost_s
    if cost is None:
        return Decision(len(newcomers_time_left_s), "no restart was measured yet")
    staying = [left for left in newcomers_time_left_s if left is None or left > 2 * cost]
    if not staying:
        return Decision(0, f"their wall time ends before a restart of {cost:.1f} s is repaid")
    ends = [end for end in (outlook.remaining_s, *staying) if end is not None]
    if not ends:
        return Decision(len(staying), f"no end is in sight, and a restart costs {cost:.1f} s")
    saved = min(ends) * len(staying) / (members + len(staying))
    what = (
        f"{len(staying)} more nodes save about {saved:.0f} s of {min(ends):.0f} s, "
        f"a restart costs {cost:.1f} s"
    )
    return Decision(len(staying) if saved > cost else 0, what)


@dataclass
class Estimate:
    """Keeps the outlook up to date from what the leader sees; times are its monotonic seconds."""

    broken_at: float | None = None
    closed_at: float | None = None
    first: tuple[float, int] | None = None
    """When the round's first step was seen, and which it was."""
    last: tuple[float, int] | None = None
    total: int | None = None
    stop_s: float = 0.0
    cost_s: float | None = None

    def broke(self, now: float) -> None:
        """A round was broken."""
        self.broken_at = now

    def closed(self, now: float) -> None:
        """A round was closed."""
        self.stop_s = 0.0 if self.broken_at is None else now - self.broken_at
        self.closed_at, self.broken_at = now, None
        self.first = self.last = None

    def stepped(self, step: int | None, total: int | None, now: float) -> None:
        """A worker of the round reported a step."""
        if step is None or self.closed_at is None:
            return
        self.total = total
        if self.first is None:
            self.first = (now, step)
            self.cost_s = self.stop_s + now - self.closed_at
        self.last = (now, step)

    @property
    def outlook(self) -> Outlook:
        """What is known now."""
        return Outlook(self._remaining_s(), self.cost_s)

    def _remaining_s(self) -> float | None:
        if self.first is None or self.last is None or self.total is None:
            return None
        steps, seconds = self.last[1] - self.first[1], self.last[0] - self.first[0]
        if steps <= 0 or seconds <= 0:
            return None
        return max(0, self.total - self.last[1]) * seconds / steps
