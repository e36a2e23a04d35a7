"""Rows of results, and the table that they make."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
from rich.table import Table

MOST_STOLEN = 0.05
"""If the host took more of the cores than that, the measurement does not say much."""


@dataclass
class Row:
    """One measurement of both libraries.

    Attributes:
        part: Which part of the benchmark.
        what: What was measured.
        unit: Of the samples.
        ours, peer: Samples; the peer's may be none.
        limit: Ours is to be at most this (at least, if ``more_is_better``), if not None.
        of_peer: Ours is to be at most this share of the peer's, if not None.
        note: What else is to be known.
    """

    part: str
    what: str
    unit: str
    ours: list[float]
    peer: list[float] = field(default_factory=list)
    limit: float | None = None
    of_peer: float | None = None
    more_is_better: bool = False
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours by the peer's, of medians."""
        if not self.ours or not self.peer:
            return None
        peer = statistics.median(self.peer)
        return statistics.median(self.ours) / peer if peer else None

    @property
    def target(self) -> str:
        """The target in words."""
        sign = ">=" if self.more_is_better else "<="
        words = [] if self.limit is None else [f"{sign} {self.limit:g} {self.unit}"]
        words += [] if self.of_peer is None else [f"{sign} {self.of_peer:g} of torchft's"]
        return ", ".join(words)

    @property
    def met(self) -> bool | None:
        """Whether the targets are met; None: there is none, or it was not measured."""
        if not self.ours:
            return None
        sign = -1 if self.more_is_better else 1
        found = []
        if self.limit is not None:
            found.append(sign * statistics.median(self.ours) <= sign * self.limit)
        if self.of_peer is not None and self.peer:
            bound = self.of_peer * statistics.median(self.peer)
            found.append(sign * statistics.median(self.ours) <= sign * bound)
        return all(found) if found else None

    def as_json(self) -> dict[str, Any]:
        """Return everything, with what follows from it."""
        return {**asdict(self), "ratio": self.ratio, "target": self.target, "met": self.met}


def cell(samples: Sequence[float]) -> str:
    """Return a median, its range and how many there were."""
    if not samples:
        return ""
    middle = statistics.median(samples)
    if len(samples) == 1:
        return f"{middle:.3g}"
    return f"{middle:.3g} [dim]({min(samples):.3g}-{max(samples):.3g}, {len(samples)})[/dim]"


def table(rows: Sequence[Row]) -> Table:
    """Return the table of ratios."""
    made = Table("", "", "unit", "ours", "torchft", "ratio", "target", "met")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        met = {True: "[green]yes[/green]", False: "[red]NO[/red]", None: ""}[row.met]
        what = f"{row.what} [dim]{row.note}[/dim]" if row.note else row.what
        cells = (row.part, what, row.unit, cell(row.ours), cell(row.peer), ratio, row.target, met)
        made.add_row(*cells)
    return made


class Steal:
    """How much of the cores the host takes away."""

    def __init__(self) -> None:
        self._last = psutil.cpu_times()

    def share(self) -> float:
        """Return the share that was taken since the last call."""
        before, self._last = self._last, psutil.cpu_times()
        passed = sum(self._last) - sum(before)
        stolen: float = self._last.steal - before.steal
        return stolen / max(passed, 1e-3)
