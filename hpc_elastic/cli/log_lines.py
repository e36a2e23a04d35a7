"""Lines of output as a person, or a script, sees them (pure).

    12:03:11.4 node3  r0 | epoch 18: loss 0.0010          standard output
    12:03:11.4 node3  r0 ! Traceback (most recent call last):      standard error
    12:03:12.0 node3 agent : ...                          the agent's log
    12:03:12.0 node3 slurm : ...                          what Slurm captured

On a terminal the day stands on a line of its own where it changes; elsewhere each line has it.
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
"""Of ranks; red is for errors."""


class Writer:
    """Writes lines with what they come from in front.

    Args:
        on_terminal: With colours, and the day apart.
        now: Unix seconds: today needs no line.
    """

    def __init__(self, *, on_terminal: bool, now: float) -> None:
        self._on_terminal = on_terminal
        self._day = f"{datetime.fromtimestamp(now):%Y-%m-%d}"
        self._host_width = self._who_width = 1
        self._second, self._date, self._clock = -1, "", ""
        self._labels: dict[int, tuple[LogSource, str]] = {}  # by identity, for hashing takes longer

    def make_room(self, sources: Iterable[LogSource]) -> None:
        """Make the columns wide enough for sources; they never become narrower."""
        for source in sources:
            self._host_width = max(self._host_width, len(_host(source)))
            self._who_width = max(self._who_width, len(_who(source)))
        self._labels.clear()

    def rows(self, lines: Iterable[LogLine]) -> Iterator[str]:
        """Yield each line as it is shown, without an end of line."""
        for line in lines:
            if int(line.time) != self._second:
                self._tell_time(line.time)
                if self._on_terminal and self._date != self._day:
                    self._day = self._date
                    yield click.style(f"-- {self._date} --", dim=True)
            yield self._row(line)

    def _tell_time(self, time_s: float) -> None:
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
        """Return what stands between the time and the text."""
        known = self._labels.get(id(source))
        if known is None or known[0] is not source:
            if max(len(_host(source)) - self._host_width, len(_who(source)) - self._who_width) > 0:
                self.make_room([source])
            known = self._labels[id(source)] = (source, self._new_label(source))
        return known[1]

    def _new_label(self, source: LogSource) -> str:
        host = _host(source).ljust(self._host_width)
        who = _who(source).rjust(self._who_width)
        mark = _MARKS.get(source.stream, _OTHER_MARK)
        if self._on_terminal:
            who = click.style(who, fg=_colour(source)) if source.is_worker else who
            mark = click.style(mark, fg="red", bold=True) if source.stream == "err" else mark
        return f"{host} {who} {mark}"


def as_json(line: LogLine) -> str:
    """Return a line as one JSON object; its keys are described by the command's help."""
    source = line.source
    fields = {
        "time": round(line.time, 3), "timed": line.timed, "host": source.host or None,
        "task": source.task, "attempt": source.attempt, "round": source.round,
        "rank": source.rank, "stream": source.stream,
        "text": cleaned(line.text, colours=False),
    }  # fmt: skip
    return json.dumps(fields)


def _host(source: LogSource) -> str:
    """Return the node's name without its domain; the task's, where no one node is it."""
    return source.host.partition(".")[0] or source.task


def _who(source: LogSource) -> str:
    return f"r{source.rank}" if source.is_worker else source.stream


def _colour(source: LogSource) -> str:
    """Return the colour of a rank; nodes that have the same ranks (``ft=true``) differ, too."""
    return _COLOURS[(zlib.crc32(source.host.encode()) + (source.rank or 0)) % len(_COLOURS)]
