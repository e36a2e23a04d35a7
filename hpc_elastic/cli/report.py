"""What happened to a run: ``report`` shows it as a page, ``events`` in sentences."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_elastic.cli import options
from hpc_elastic.errors import RunDirectoryError

if TYPE_CHECKING:
    from hpc_elastic.report.progress_log import Point
    from hpc_elastic.report.report import Report
    from hpc_elastic.report.run_view import RunView
    from hpc_elastic.report.timeline import TimelineEntry
    from hpc_elastic.run.directory import RunDir
    from hpc_elastic.run.events import Event, EventReader

_FORMATS = ("html", "png", "json")
_STANDARD_OUTPUT = "-"

_HELP = """
\b
Content:
  node time by use, and the goodput
  when each node joined and left, and why
  over time, with faults and checkpoints: step, loss, throughput, the script's metrics, GPU use
  each fault with its cost: lost steps, time without a step, node time
  failures of workers, with their tracebacks and the last lines of their logs
  what happened, in sentences; hints where node time is wasted
  checkpoints, and the configuration without its secrets (***)

\b
Formats:
  html  one file without links to others; it follows the light or dark mode of the browser
  png   the figures and charts as a picture
  json  all values; docs/reference/report.md describes the keys

The charts, and png, need `pip install 'hpc_elastic[report]'`. The file holds the configuration, and
only you can read it; `chmod a+r` makes it readable to others.

With --live, pages are served on 127.0.0.1 of this machine until Ctrl-C: a list of runs, the report
of each, kept up to date, and its logs, followed and searched. RUN is also the directory of a sweep,
whose new runs are added. From another machine, forward the port with the printed ssh command, and
open the printed URL there. It holds a token: without it all requests are refused, also those of
other users of this machine. The pages are read-only unless --control is given; nothing is read
while none is open. Needs `pip install 'hpc_elastic[watch]'`.

\b
--json prints one object about the written file, and needs -o FILE. (--format json is the report
as JSON.)
  run_id, run   the run's id and directory
  file          path of the report
  format        "html", "png" or "json"
  num_bytes     size of the file
With --live: url (with the token), port (of 127.0.0.1), forward (the ssh command)

\b
Examples:
  hpc-elastic report last -o report.html
  hpc-elastic report runs/7 -o report.png
  hpc-elastic report last --format json | jq '.changes[] | select(.fault)'
  hpc-elastic report --live last
  hpc-elastic report --live multirun/2030-01-31/12-00-00
  hpc-elastic report --live --all --port 9000
"""


@click.command(epilog=_HELP)
@click.argument("runs", type=options.SweepName(), nargs=-1, metavar="RUN...")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="FILE", help="File to write; - is standard output, the default of json.",
)  # fmt: skip
@click.option(
    "--format", "form", type=click.Choice(_FORMATS),
    help="Default: by the suffix of FILE, else html.",
)  # fmt: skip
@click.option("--live", is_flag=True, help="Show runs in a browser, as they are now.")
@click.option(
    "-a", "--all", "everything", is_flag=True, help="With --live: all runs of `hpc-elastic list`."
)
@click.option(
    "--control", is_flag=True,
    help="With --live: let the pages cancel and resume runs, and take nodes from them.",
)  # fmt: skip
@click.option(
    "--port", type=click.IntRange(1, 65535), metavar="PORT",
    help="With --live: port of 127.0.0.1. [default: 8672, or the next that is free]",
)  # fmt: skip
@options.as_json
def report_command(
    runs: tuple[Path, ...],
    output: Path | None,
    form: str | None,
    live: bool,
    as_json: bool,
    **pages: Any,
) -> int:
    """Write a report of a run: use of its time, nodes, training, faults and checkpoints.

    The command reads the run directory, and queries Slurm once. The run may be running, have ended,
    or never have started. The exit code does not depend on how the run ended. With --live, the
    reports of one or more runs are shown in a browser, as they are now.
    """
    if live:
        if output is not None or form is not None:
            raise click.UsageError("--live writes no file: leave -o and --format out")
        return _serve(runs, as_json=as_json, **pages)
    if any(pages.values()):
        raise click.UsageError("--all, --control and --port need --live")
    if len(runs) != 1:
        raise click.UsageError("give one RUN; --live shows several")
    run = options.find_run(str(runs[0]))
    suffix = "" if output is None else output.suffix.lower().lstrip(".")
    if form is None and suffix not in ("", "htm", *_FORMATS):
        formats = ", ".join(_FORMATS)
        raise click.UsageError(f"{output}: formats are {formats}; give such a suffix, or --format")
    form = form or (suffix if suffix in _FORMATS else "html")
    to_file = output is not None and str(output) != _STANDARD_OUTPUT
    if (output is None and form != "json") or (as_json and not to_file):
        raise click.UsageError(f"-o FILE is missing, such as -o report.{form}")
    from hpc_elastic.report.details import report_of
    from hpc_elastic.report.run_view import read_view

    report = report_of(read_view(run))
    text = render(report, form)
    if output is None or not to_file:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
        return 0
    _write(output, text)
    if as_json:
        printed = {
            "run_id": report.about.run_id, "run": str(run),
            "file": str(output.absolute()), "format": form, "num_bytes": len(text),
        }  # fmt: skip
        options.print_json(printed)
    else:
        print(f"wrote {output}: {len(text) / 1e6:.1f} MB", file=sys.stderr)
    return 0


def _serve(runs: Sequence[Path], **settings: Any) -> int:
    """Serve the live pages, which are a distribution of their own, until Ctrl-C."""
    try:
        from hpc_elastic_watch.serve import serve_pages
    except ImportError as e:
        remedy = "pip install 'hpc_elastic[watch]', or in a clone pip install "
        remedy += "./tools/hpc_elastic_watch"
        raise click.ClickException(f"--live needs hpc_elastic_watch ({e}): {remedy}") from e
    serve_pages(runs, **settings)
    return 0


def render(report: Report, form: str) -> bytes:
    """Return a report in a format; raise ReportLibraryError without the library of png."""
    if form == "json":
        return report.encoded() + b"\n"
    from hpc_elastic.report import page

    values = report.to_json()
    return page.png(values) if form == "png" else page.html(values).encode(errors="replace")


def _write(output: Path, content: bytes) -> None:
    """Replace a file atomically by one that only its owner can read; write into a device."""
    from hpc_elastic.shared_files import write_atomic

    try:
        if output.exists() and not output.is_file():
            output.write_bytes(content)
            return
        write_atomic(output, content, mode=0o600)
    except OSError as e:
        raise RunDirectoryError(f"{output} cannot be written ({e}): give another file") from e


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

    def print_raw(events: Iterable[Event]) -> None:
        for event in events:
            print(json.dumps(event), flush=follow)

    if raw and follow:
        return options.print_end(_read(files, reader, print_raw))
    if raw:
        print_raw(reader.new())
        return 0
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

        def is_settled(entry: TimelineEntry) -> bool:
            pause_s = entry.cost.pause_s if entry.kind != "resumed" else None
            return now - (entry.time + (pause_s or 0.0)) >= _SETTLED_S

        found = build_timeline(EventIndex(events, self._points()))
        settled = list(takewhile(is_settled, found))
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
