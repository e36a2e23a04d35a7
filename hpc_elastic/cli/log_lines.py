"""Lines of output for terminals and scripts (pure).

    12:03:11.4 node3  r0 | epoch 18: loss 0.0010          standard output
    12:03:11.4 node3  r0 ! Traceback (most recent call last):      standard error
    12:03:12.0 node3 agent : ...                          the agent's log
    12:03:12.0 node3 slurm : ...                          output captured by Slurm

On a terminal a new day is a line of its own; elsewhere each line has its date.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from datetime import datetime

import click

from hpc_elastic.report.log_files import LogLine, LogSource, cleaned

_MARKS = {"out": "|", "err": "!"}
_OTHER_MARK = ":"
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green")
"""Colours of ranks; red is for errors."""


class Writer:
    """Formats lines with their time and source.

    Args:
        on_terminal: With colours, and the day on a line of its own.
        now: Unix seconds; the day of `now` has no line.
    """

    def __init__(self, *, on_terminal: bool, now: float) -> None:
        self._on_terminal = on_terminal
        self._day = f"{datetime.fromtimestamp(now):%Y-%m-%d}"
        self._host_width = self._origin_width = 1
        self._second, self._date, self._clock = -1, "", ""
        self._labels: dict[int, tuple[LogSource, str]] = {}  # by identity: hashing takes longer

    def make_room(self, sources: Iterable[LogSource]) -> None:
        """Widen the columns for sources; they never become narrower."""
        for source in sources:
            self._widen(source)

    def _widen(self, source: LogSource) -> None:
        widths = self._host_width, self._origin_width
        self._host_width = max(self._host_width, len(_host(source)))
        self._origin_width = max(self._origin_width, len(_origin(source)))
        if widths != (self._host_width, self._origin_width):
            self._labels.clear()

    def rows(self, lines: Iterable[LogLine]) -> Iterator[str]:
        """Yield the rows of lines, without ends of lines."""
        for line in lines:
            if int(line.time) != self._second:
                self._set_time(line.time)
                if self._on_terminal and self._date != self._day:
                    self._day = self._date
                    yield click.style(f"-- {self._date} --", dim=True)
            yield self._row(line)

    def _set_time(self, time_s: float) -> None:
        at = datetime.fromtimestamp(time_s)
        self._second, self._date, self._clock = int(time_s), f"{at:%Y-%m-%d}", f"{at:%H:%M:%S}"

    def _row(self, line: LogLine) -> str:
        label = self._label(line.source)
        text = cleaned(line.text, colours=self._on_terminal)
        clock = f"{self._clock}.{int(line.time * 10) % 10}"
        if self._on_terminal:
            return f"{click.style(clock, dim=True)} {label} {text}"
        return f"{self._date} {clock} {label} {text}"

    def _label(self, source: LogSource) -> str:
        """Return the node, the rank and the mark of a source."""
        known = self._labels.get(id(source))
        if known is None or known[0] is not source:
            self._widen(source)
            known = self._labels[id(source)] = (source, self._new_label(source))
        return known[1]

    def _new_label(self, source: LogSource) -> str:
        host = _host(source).ljust(self._host_width)
        origin = _origin(source).rjust(self._origin_width)
        mark = _MARKS.get(source.stream, _OTHER_MARK)
        if self._on_terminal:
            origin = click.style(origin, fg=_colour(source)) if source.is_worker else origin
            mark = click.style(mark, fg="red", bold=True) if source.stream == "err" else mark
        return f"{host} {origin} {mark}"


def as_json(line: LogLine) -> str:
    """Return a line as one JSON object; the help of the command describes the keys."""
    source = line.source
    fields = {
        "time": round(line.time, 3), "timed": line.timed, "host": source.host or None,
        "task": source.task, "attempt": source.attempt, "round": source.round,
        "rank": source.rank, "stream": source.stream,
        "text": cleaned(line.text, colours=False),
    }  # fmt: skip
    return json.dumps(fields)


def _host(source: LogSource) -> str:
    """Return the name of the node without its domain; of the task if it has no single node."""
    return source.host.partition(".")[0] or source.task


def _origin(source: LogSource) -> str:
    return f"r{source.rank}" if source.is_worker else source.stream


def _colour(source: LogSource) -> str:
    """Return the colour of a rank; it depends on the node, whose ranks may repeat (``ft=true``)."""
    return _COLOURS[(zlib.crc32(source.host.encode()) + (source.rank or 0)) % len(_COLOURS)]
