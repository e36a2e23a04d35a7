"""``hpc-elastic events``: what happened to a run, in plain sentences."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpc_elastic.cli import options
from hpc_elastic.run.directory import RunDir
from hpc_elastic.run.events import Event, EventReader

if TYPE_CHECKING:
    from hpc_elastic.launcher.run_view import RunView
    from hpc_elastic.report.causes import TimelineEntry

_LOOK_AGAIN_S = 0.5
_SETTLED_S = 5.0
"""An episode is told once it is over, or has gone on for so long: later events belong to it."""


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
@click.option("--raw", is_flag=True, help="Print the events themselves, one JSON object a line.")
@click.option("--follow", "-f", is_flag=True, help="Go on until the run has ended, however.")
def events_command(run: Path, as_json: bool, raw: bool, follow: bool) -> int:
    """Tell what happened to a run: one line for each thing, its cause first.

    How the group formed, grew and shrank, and why; who was preempted, died or failed; which step
    was saved, how many steps were lost, and after how many seconds training went on. Times are
    local. Nothing needs to be running: all is told from the files in the run directory.

    --json prints a list of objects; with --follow, one object a line, as they come. With --follow a
    change that goes on for long, because no node is free, say, is told twice: as far as it has
    come, and when it is over. The exit code is 1 then if the run has not succeeded.
    """
    if as_json and raw:
        raise click.UsageError("--raw prints JSON already: give --json or --raw, not both")
    RunDir(run).load()
    if raw:
        return _raw(run, follow=follow)
    return _follow(run, as_json=as_json) if follow else _tell(run, as_json=as_json)


def _tell(run: Path, *, as_json: bool) -> int:
    from hpc_elastic.report.attempts import EventIndex
    from hpc_elastic.report.sentences import lines
    from hpc_elastic.report.timeline import build_timeline
    from hpc_elastic.run.event_schema import valid_events

    found = build_timeline(EventIndex(valid_events(EventReader(RunDir(run).event_logs).new())))
    if as_json:
        print(json.dumps([_as_json(episode) for episode in found], indent=2))
    elif not found:
        click.echo("no task of this run has started yet", err=True)
    for text in () if as_json else lines(found):
        print(text)
    return 0


def _as_json(episode: TimelineEntry) -> dict[str, object]:
    from hpc_elastic.report.sentences import sentence

    return {"sentence": sentence(episode), **episode.to_json()}


# ---- as it goes ---------------------------------------------------------------------------


def _raw(run: Path, *, follow: bool) -> int:
    def show(events: Iterable[Event]) -> None:
        for event in events:
            print(json.dumps(event), flush=follow)

    if follow:
        return _tell_end(_read(run, show))
    show(EventReader(RunDir(run).event_logs).new())
    return 0


def _follow(run: Path, *, as_json: bool) -> int:
    told = _Told(as_json=as_json)
    events: list[Event] = []

    def show(new: list[Event]) -> None:
        from hpc_elastic.run.event_schema import valid_events

        events.extend(valid_events(new))
        if new or told.waits:
            told.tell(events, time.time())

    end = _read(run, show)
    told.tell(events, float("inf"))
    return _tell_end(end)


def _read(run: Path, show: Callable[[list[Event]], None]) -> RunView:
    """Show what there is, and what comes until the run has ended; return how it has."""
    from hpc_elastic.launcher.run_view import EndDetector

    reader, detector = EventReader(RunDir(run).event_logs), EndDetector(RunDir(run), warn=_say)
    while True:
        ended = detector.poll()  # first: events that come after it are shown too
        show(reader.new())
        if ended is not None:
            return ended
        time.sleep(_LOOK_AGAIN_S)


def _tell_end(view: RunView) -> int:
    """Print how a run ended on standard error; return the exit code."""
    _say(view.describe())
    return view.ended.exit_code if view.ended is not None else 1


def _say(text: str) -> None:
    click.echo(f"hpc-elastic: {text}", err=True)


def _over_at(episode: TimelineEntry) -> float:
    """Return when it was over, or, of one that goes on, when it began."""
    begins_the_pause = episode.kind != "resumed"
    return episode.time + (episode.cost.pause_s or 0.0 if begins_the_pause else 0.0)


class _Told:
    """What was printed already."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._sentences: set[tuple[float, str]] = set()
        self._day = ""
        self.waits = False
        """Whether something has happened that is not told yet."""

    def tell(self, events: list[Event], now: float) -> None:
        """Print what is new, and will not change any more."""
        from hpc_elastic.report.attempts import EventIndex
        from hpc_elastic.report.timeline import build_timeline

        found = build_timeline(EventIndex(events))
        settled = list(takewhile(lambda episode: now - _over_at(episode) >= _SETTLED_S, found))
        self.waits = len(settled) < len(found)
        for episode in settled:
            self._print(episode)

    def _print(self, episode: TimelineEntry) -> None:
        from hpc_elastic.report.sentences import day_of, lines, sentence

        key = (episode.time, sentence(episode))
        if key in self._sentences:
            return
        self._sentences.add(key)
        if self._as_json:
            print(json.dumps(_as_json(episode)), flush=True)
            return
        for text in lines([episode], self._day):
            print(text, flush=True)
        self._day = day_of(episode)
