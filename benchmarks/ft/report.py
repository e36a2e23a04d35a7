"""What is to be measured; rows of results, and the table that they make."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from evidence.result import Cell, Column, Figure, Table, Target, figure

from ft.libraries import OURS, PEER

SPEC = ".3g"


@dataclass(frozen=True)
class Settings:
    worlds: tuple[int, ...] = (2, 3, 4)
    repeats: int = 5
    quick: bool = False
    libraries: tuple[str, ...] = (OURS, PEER)


@dataclass
class Row:
    """One measurement of both libraries.

    Not a number among the samples: it never came about. ``limit``: ours is to be at most this (at
    least, if ``more_is_better``); ``of_peer``: at most this share of the peer's.
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
        """Ours by the peer's, of medians; None where one of them is lost in the noise."""
        ours, peer = _known(self.ours), _known(self.peer)
        if not ours or not peer or _is_noise(peer) or statistics.median(ours) < 0:
            return None
        return statistics.median(ours) / statistics.median(peer)

    @property
    def targets(self) -> list[Target]:
        """What is aimed at, and what came of it; () for somebody who measured ours alone."""
        what, ours, peer = f"{self.part}: {self.what}", _known(self.ours), _known(self.peer)
        value = statistics.median(ours) if ours else None
        why = "" if ours else "no sample counts"
        found = []
        if self.limit is not None:
            bound = self.limit
            found.append(Target(what, bound, value, self.unit, self.more_is_better, why))
        if self.of_peer is not None and peer:
            share = "torchft's" if self.of_peer == 1.0 else f"{self.of_peer:.3g} of torchft's"
            bound = self.of_peer * statistics.median(peer)
            if _is_noise(peer):
                value, why = None, "torchft's own is lost in the noise"
            more = self.more_is_better
            found.append(Target(f"{what}, {share}", bound, value, self.unit, more, why))
        return found


def _known(samples: Sequence[float]) -> list[float]:
    return [s for s in samples if not math.isnan(s)]


def _is_noise(samples: Sequence[float]) -> bool:
    """Tell whether what was measured may be nothing at all; it is a difference of two times."""
    return min(samples) <= 0


def cell(samples: Sequence[float]) -> Cell:
    """Return a median, its range and, if they differ, how many never came to an end."""
    known = _known(samples)
    told = figure(known)
    if len(known) == len(samples):
        return told
    never = f"{len(samples) - len(known)} of {len(samples)} never"
    return f"{told.text(SPEC)}, {never}" if isinstance(told, Figure) else never


def table(rows: Sequence[Row]) -> Table:
    names = ("part", "what", "unit", "ours", "torchft", "ours / torchft", "repeats")
    return Table("", tuple(Column(name, SPEC) for name in names), tuple(map(_cells, rows)))


def _cells(row: Row) -> tuple[Cell, ...]:
    what = f"{row.what} ({row.note})" if row.note else row.what
    ratio: Cell = "" if row.ratio is None else Figure(row.ratio)
    return (
        row.part, what, row.unit, cell(row.ours), cell(row.peer), ratio,
        str(len(row.ours) or len(row.peer)),
    )  # fmt: skip
