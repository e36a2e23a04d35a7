"""What a run makes of the node-time that it holds (pure)."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from harvest.slots import Slot


class Span(NamedTuple):
    """A time in which the same nodes train; ``trained_s`` are the node-seconds that remain."""

    begin_s: float
    end_s: float
    nodes: int
    trained_s: float


@dataclass
class Account:
    """The training of one run; times are node-seconds.

    ``trained_s`` are of steps that remain; for ``overtime_s`` nodes were held after another job
    needed them. ``num_queries`` are commands to Slurm about the states of its tasks.
    """

    spans: list[Span] = field(default_factory=list)
    trained_s: float = 0.0
    overtime_s: float = 0.0
    num_rounds: int = 0
    num_requeued: int = 0
    num_queries: int = 0
    _since_s: float = 0.0
    _nodes: int = 0
    _debt_s: float = 0.0
    _held_up_until_s: float = 0.0

    def add(self, begin_s: float, end_s: float, nodes: int, trained_s: float) -> None:
        if end_s > begin_s:
            self.spans.append(Span(begin_s, end_s, nodes, trained_s))
            self.trained_s += trained_s

    def change(self, by: int, now: float) -> None:
        """Nodes begin or end to train beside others, which go on."""
        trained_s = self._nodes * (now - self._since_s) - self._debt_s
        self._debt_s = max(0.0, -trained_s)
        self.add(self._since_s, now, self._nodes, max(0.0, trained_s))
        self._since_s, self._nodes = now, self._nodes + by

    def hold_up(self, for_s: float, now: float) -> None:
        """All nodes that train stand still for a while, also because of several things at once."""
        until_s = max(self._held_up_until_s, now + for_s)
        self._debt_s += self._nodes * (until_s - max(self._held_up_until_s, now))
        self._held_up_until_s = until_s

    def release(self, slot: Slot, now: float) -> None:
        self.overtime_s += max(0.0, now - slot.end_s)

    def held(self, slots: Iterable[Slot], until_s: float) -> float:
        within = (min(slot.end_s, until_s) - slot.begin_s for slot in before(slots, until_s))
        return sum(within) + self.overtime_s

    def done_at(self, enough_s: float) -> float | None:
        """Return when this number of node-seconds is trained; None if it is not."""
        for span in self.spans:
            if span.trained_s >= enough_s:
                return span.begin_s + (span.end_s - span.begin_s) * enough_s / span.trained_s
            enough_s -= span.trained_s
        return None


def before(slots: Iterable[Slot], until_s: float) -> list[Slot]:
    return [slot for slot in slots if slot.begin_s < until_s]
