"""``hpc-elastic events``: what happened to a run, in sentences."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpc_elastic.cli import options

if TYPE_CHECKING:
    from hpc_elastic.report.progress_log import Point
    from hpc_elastic.report.run_view import RunView
    from hpc_elastic.report.timeline import TimelineEntry
    from hpc_elastic.run.directory import RunDir
    from hpc_elastic.run.events import Event, EventReader

_POLL_S, _PAUSE = 0.5, 4.0
"""Interval of reads; the longer one, as a multiple of the time that a read of a long run takes."""
_SETTLED_S = 5.0
"""Age of an entry, after its end, from which later events no longer change it."""


@click.command(
    epilog="\b\nExamples:\n"
    "  hpc-elastic events last\n"
    "  hpc-elastic events runs/7 --follow\n"
    "  hpc-elastic events last --json | jq '.[] | select(.cost.lost_steps > 0)'\n"
    '  hpc-elastic events last --raw | grep \'"kind": "preemption_notice"\'\n'
    "\ndocs/reference/events.md describes the keys of --json, and the lines of --raw."
)
@options.run
@options.as_json
@click.option("--raw", is_flag=True, help="Print the events, one JSON object per line.")
@click.option("--follow", "-f", is_flag=True, help="Follow the events until the run has ended.")
def events_command(run: Path, as_json: bool, raw: bool, follow: bool) -> int:
    """Show what happened to a run, one line for each change, its cause first.

    The lines show how the group formed, grew and shrank, and why; which node was preempted, died or
    failed; which step was saved, how many steps were lost, and after how many seconds training
    continued. Times are local. The command reads the run directory only: the run may have ended.

    --json prints a list of objects; with --follow one object per line. With --follow a change that
    takes long, such as a wait for a free node, is printed twice: while it lasts, and when it is
    over. The exit code of --follow is 1 if the run has not succeeded.
    """
    if as_json and raw:
        raise click.UsageError("--raw prints JSON already: give --json or --raw, not both")
    from hpc_elastic.run.directory import RunDir
    from hpc_elastic.run.events import EventReader

    files = RunDir(run)
    files.load()
    reader = EventReader(files.event_logs)
    if raw:
        return _raw(files, reader, follow=follow)
    return (_follow if follow else _print_all)(files, reader, as_json=as_json)


def _print_all(run: RunDir, reader: EventReader, *, as_json: bool) -> int:
    from hpc_elastic.report.attempts import EventIndex
    from hpc_elastic.report.progress_log import read_points
    from hpc_elastic.report.sentences import lines
    from hpc_elastic.report.timeline import build_timeline
    from hpc_elastic.run.events import valid_events

    events = valid_events(reader.new())
    if reader.doubt:
        options.print_message(reader.doubt)
    found = build_timeline(EventIndex(events, read_points(run.progress)))
    if as_json:
        options.print_json([_as_json(entry) for entry in found])
    elif not found:
        click.echo("no task of this run has started yet", err=True)
    for text in () if as_json else lines(found):
        print(text)
    return 0


def _as_json(entry: TimelineEntry) -> dict[str, object]:
    from hpc_elastic.report.sentences import sentence

    return {"sentence": sentence(entry), **entry.to_json()}


# ---- following


def _raw(run: RunDir, reader: EventReader, *, follow: bool) -> int:
    def show(events: Iterable[Event]) -> None:
        for event in events:
            print(json.dumps(event), flush=follow)

    if follow:
        return options.print_end(_read(run, reader, show))
    show(reader.new())
    return 0


def _follow(run: RunDir, reader: EventReader, *, as_json: bool) -> int:
    from hpc_elastic.report.progress_log import read_points
    from hpc_elastic.run.events import valid_events

    printer = TimelinePrinter(partial(read_points, run.progress), as_json=as_json)
    events: list[Event] = []

    def show(new: list[Event]) -> None:
        events.extend(valid_events(new))
        if new or printer.has_unprinted:
            printer.print(events, time.time())

    end = _read(run, reader, show)
    printer.print(events, float("inf"))
    return options.print_end(end)


def _read(run: RunDir, reader: EventReader, show: Callable[[list[Event]], None]) -> RunView:
    """Show the events until the run has ended; return its last view."""
    from hpc_elastic.launcher.follow import READ_S, RunFollower

    follower = RunFollower([run.path], read_s=READ_S, warn=options.print_message)
    while True:
        (view,) = follower.poll()  # before the events, so that none is missed
        began = time.monotonic()
        show(reader.new())
        if view.ended is not None:
            return view
        time.sleep(max(_POLL_S, _PAUSE * (time.monotonic() - began)))


def _over_at(entry: TimelineEntry) -> float:
    """Return when a change was over; when it began, if it lasts."""
    begins_the_pause = entry.kind != "resumed"
    return entry.time + (entry.cost.pause_s or 0.0 if begins_the_pause else 0.0)


class TimelinePrinter:
    """Prints the entries of a timeline, each once."""

    def __init__(self, points: Callable[[], Sequence[Point]] = tuple, *, as_json: bool) -> None:
        self._points = points
        self._as_json = as_json
        self._sentences: set[tuple[float, str]] = set()
        self._day = ""
        self.has_unprinted = False
        """Whether an entry is not printed yet."""

    def print(self, events: list[Event], now: float) -> None:
        """Print the new entries that will not change any more."""
        from hpc_elastic.report.attempts import EventIndex
        from hpc_elastic.report.sentences import day_of, lines, sentence
        from hpc_elastic.report.timeline import build_timeline

        found = build_timeline(EventIndex(events, self._points()))
        settled = list(takewhile(lambda entry: now - _over_at(entry) >= _SETTLED_S, found))
        self.has_unprinted = len(settled) < len(found)
        for entry in settled:
            key = (entry.time, sentence(entry))
            if key in self._sentences:
                continue
            self._sentences.add(key)
            if self._as_json:
                print(json.dumps(_as_json(entry)), flush=True)
                continue
            for text in lines([entry], self._day):
                print(text, flush=True)
            self._day = day_of(entry)
