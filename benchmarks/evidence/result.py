"""The result of one benchmark, as data (pure).

A result has tables of figures, targets that are met or missed, the peers that were measured in the
same run, and what its figures do not show. `show` prints it, `page` writes it into RESULTS.md;
`as_json` and `from_json` are inverse.

    Result
    ├── about: About       title, what is measured, what that does not show
    ├── tables: Table*     columns, and rows of cells: a text, or a Figure
    ├── targets: Target*   what was aimed at, and what came of it
    ├── peers: Peer*       with their versions, or why they were not measured
    └── notes              what else is to be known of these figures
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

THOUSAND = 1000
"""From here on numbers are whole."""
SEVERAL = 2.0
"""From so many times the bound on, times are told instead of per cent."""


@dataclass(frozen=True)
class Figure:
    """What was measured once or several times; None where it is not known."""

    median: float
    lowest: float | None = None
    highest: float | None = None
    num: int | None = None

    def text(self, spec: str) -> str:
        """Return the median, and the range if there is one; ``spec`` is such as ``.2f``."""
        middle = format(self.median, spec)
        if self.num == 1 or self.lowest is None or self.highest is None:
            return middle
        return f"{middle} ({self.lowest:{spec}} to {self.highest:{spec}})"


Cell = Figure | str


def figure(samples: Sequence[float]) -> Cell:
    """Return the figure of some samples; the empty text if there are none."""
    if not samples:
        return ""
    return Figure(statistics.median(samples), min(samples), max(samples), len(samples))


@dataclass(frozen=True)
class Column:
    """A column of a table, and how its figures are formatted."""

    name: str
    spec: str = ".3g"


@dataclass(frozen=True)
class Table:
    """Rows of cells, as many as columns or fewer; the first column names what the row is of."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def texts(self) -> list[list[str]]:
        """Return all rows as texts, each as long as there are columns."""
        return [self._texts(row) for row in self.rows]

    def is_figures(self, number: int) -> bool:
        """Tell whether a column has figures, which stand to the right."""
        cells = [row[number] for row in self.rows if len(row) > number]
        return any(isinstance(cell, Figure) for cell in cells)

    def _texts(self, row: Sequence[Cell]) -> list[str]:
        padded = [*row, *[""] * (len(self.columns) - len(row))]
        return [
            cell if isinstance(cell, str) else cell.text(column.spec)
            for cell, column in zip(padded, self.columns, strict=True)
        ]


@dataclass(frozen=True)
class Target:
    """What was aimed at.

    The value is to be at most the bound, or at least, if ``more_is_better``. It is None if it could
    not be measured (``why``); ``failed``: because what was to be measured did not come about, so
    that it is missed.
    """

    what: str
    bound: float
    value: float | None
    unit: str = ""
    more_is_better: bool = False
    why: str = ""
    failed: bool = False

    @property
    def met(self) -> bool | None:
        """Whether it is met; None: nobody knows."""
        if self.value is None:
            return False if self.failed else None
        return self.value >= self.bound if self.more_is_better else self.value <= self.bound

    @property
    def aim(self) -> str:
        side = "at least" if self.more_is_better else "at most"
        return f"{side} {self.bound:.4g} {self.unit}".rstrip()

    @property
    def measured(self) -> str:
        return "" if self.value is None else f"{_number(self.value)} {self.unit}".rstrip()

    @property
    def verdict(self) -> str:
        if self.value is None:
            word = "missed" if self.failed else "not known"
            return f"{word}: {self.why}" if self.why else word
        if self.met:
            return f"met, {self._distance()} to spare"
        return f"missed by {self._distance()}"

    def _distance(self) -> str:
        assert self.value is not None
        away = abs(self.value - self.bound)
        if not self.bound or self.value <= 0:
            return f"{away:.3g} {self.unit}".rstrip()
        if self.value > SEVERAL * self.bound:
            return f"a factor of {_number(self.value / self.bound)}"
        return f"{100 * away / abs(self.bound):.0f} %"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= THOUSAND else f"{value:.3g}"


@dataclass(frozen=True)
class Peer:
    """Somebody else who does the same work.

    The version is None where it was not measured: ``why`` tells the reason, or else how it was.
    """

    name: str
    version: str | None = None
    why: str = ""

    @property
    def text(self) -> str:
        if self.version is None:
            return f"{self.name}: not measured, {self.why}"
        return f"{self.name} {self.version}" + (f" ({self.why})" if self.why else "")


@dataclass(frozen=True)
class About:
    """Title, method and limits of a benchmark, which do not depend on its result."""

    title: str
    measured: str
    does_not_show: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """All that came of one benchmark; ``repeats`` hold unless a row says otherwise."""

    about: About
    tables: tuple[Table, ...]
    targets: tuple[Target, ...] = ()
    peers: tuple[Peer, ...] = ()
    notes: tuple[str, ...] = ()
    repeats: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return everything, with what follows from it for those who read no Python."""
        targets = [{**asdict(t), "met": t.met, "verdict": t.verdict} for t in self.targets]
        return {**asdict(self), "targets": targets}

    @classmethod
    def from_json(cls, raw: object) -> Result:
        """Return what `as_json` was given; ValueError: it is no result."""
        return msgspec.convert(raw, cls)


def exponent(points: Mapping[float, float]) -> float:
    """Return b of y = a * x**b, by least squares of log y over log x; infinite y do not count."""
    logs = [(math.log(x), math.log(y)) for x, y in points.items() if y < math.inf]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope
