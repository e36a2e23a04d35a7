"""``hpc-elastic logs``: the output of all workers of a run, in order of time.

    12:03:11.4 node3  r0 | epoch 18: loss 0.0010          standard output
    12:03:11.4 node3  r0 ! Traceback (most recent call last):      standard error
    12:03:12.0 node3 agent : ...                          the agent's log
    12:03:12.0 node3 slurm : ...                          output captured by Slurm

On a terminal a new day is a line of its own; elsewhere each line has its date.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpc_elastic._util import cleaned
from hpc_elastic.cli import options
from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.slurm.nodelist import expand, expand_indices

if TYPE_CHECKING:
    from hpc_elastic.report import log_files
    from hpc_elastic.report.log_files import LogLine, LogSource
    from hpc_elastic.report.run_view import RunView
    from hpc_elastic.run.directory import RunDir

_FIRST_LINES = 10
"""Lines that --follow begins with, as ``tail -f``."""
_POLL_S = 0.2
_LAST_LINES_S = 2.0
"""Following ends when nothing was written for so long after the end of the run, ..."""
_LAST_LINES_AT_MOST_S = 15.0
"""... or after this time."""
_COLOURLESS = ("dumb", "unknown")
"""Values of ``TERM`` without colours."""

_EXAMPLES = """\b
Examples:
  hpc-elastic logs last                           all workers' output so far
  hpc-elastic logs last --follow                  the last lines, and what is added
  hpc-elastic logs runs/7 --rank 0 --tail 20      the last 20 lines of rank 0
  hpc-elastic logs last --rank 0-3 --grep loss    lines of four ranks that match
  hpc-elastic logs last --node node[2-3] --agent  two nodes, with their agents' logs
  hpc-elastic logs last --since 10m               the last ten minutes
  hpc-elastic logs last --json | jq -r .text      for scripts
"""


_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_CLOCK = re.compile(r"\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?")

_TIMES = "10m (ago; s, m, h, d), 12:03, 12:03:11, 2030-01-31, '2030-01-31 12:03', @<Unix seconds>"


def parse_time(text: str, now: float) -> float:
    """Return the Unix seconds of a point in the past (pure, apart from the time zone).

    The text has one of `_TIMES`, else ValueError is raised; a time of day is the last one before
    now.
    """
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return now - float(ago[1]) * _UNIT_S[ago[2]]
    if text.startswith("@"):
        return float(text[1:])
    if not _CLOCK.fullmatch(text):
        return datetime.fromisoformat(text).timestamp()
    today = datetime.fromtimestamp(now)
    then = datetime.fromisoformat(f"{today:%Y-%m-%d}T{text.zfill(len(text) + (text[1] == ':'))}")
    return (then if then <= today else then - timedelta(days=1)).timestamp()


def _since(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    try:
        return None if value is None else parse_time(value.strip(), time.time())
    except ValueError as e:
        raise click.BadParameter(f"{value!r} is not a time; give one of: {_TIMES}") from e


def _ranks(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> frozenset[int]:
    try:
        return frozenset(rank for value in values for rank in expand_indices(value)[0])
    except ValueError as e:
        raise click.BadParameter(f"{e}; give a rank, or ranks such as 0-3,8") from e


def _hosts(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> frozenset[str]:
    try:
        return frozenset(host for value in values for host in expand(value))
    except ValueError as e:
        raise click.BadParameter(f"{e}; give a node, or nodes such as node[1-3]") from e


def _pattern(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> re.Pattern[str] | None:
    try:
        return None if value is None else re.compile(value)
    except re.error as e:
        remedy = "it is a Python regular expression: write \\( \\[ \\* \\. for the character itself"
        raise click.BadParameter(f"{value!r}: {e}; {remedy}") from e


@click.command(epilog=_EXAMPLES)
@options.run
@click.option(
    "--rank", "ranks", multiple=True, callback=_ranks, metavar="R",
    help="Only this global rank, or ranks (0-3,8). Can be repeated.",
)  # fmt: skip
@click.option(
    "--node", "nodes", multiple=True, callback=_hosts, metavar="N",
    help="Only this node, or nodes (node[1-3]). Can be repeated.",
)  # fmt: skip
@click.option(
    "--attempt", type=click.IntRange(0), metavar="K",
    help="Only this attempt of each task; 0 is the one before any requeue.",
)  # fmt: skip
@click.option(
    "--round", "round_", type=click.IntRange(1), metavar="N",
    help="Only this round; each change of the group begins a new one.",
)  # fmt: skip
@click.option(
    "-f", "--follow", is_flag=True,
    help="Follow the output until the run has ended, also over restarts and new nodes. "
    f"Begins with the last {_FIRST_LINES} lines, unless --tail or --since is given.",
)  # fmt: skip
@click.option(
    "--grep", "pattern", callback=_pattern, metavar="RE",
    help="Only lines that match this regular expression; (?i) ignores case.",
)  # fmt: skip
@click.option("-n", "--tail", type=click.IntRange(0), metavar="N", help="Only the last N lines.")
@click.option("--since", callback=_since, metavar="T", help=f"Only lines written since: {_TIMES}.")
@click.option(
    "--agent/--no-agent", "agents", default=False, show_default=True,
    help="Add the logs of the agents, and the captured output of the tasks.",
)  # fmt: skip
@options.as_json
def logs_command(
    run: Path,
    *,
    ranks: frozenset[int],
    nodes: frozenset[str],
    attempt: int | None,
    round_: int | None,
    follow: bool,
    pattern: re.Pattern[str] | None,
    tail: int | None,
    since: float | None,
    agents: bool,
    as_json: bool,
) -> int:
    """Print the output of a run's workers on all nodes, in order of time.

    Each line begins with its time, node and rank; then `|` for standard output, `!` for standard
    error, `:` for agents and tasks. The time is that of the arrival of the line, to a tenth of a
    second; the script needs no changes. Of a line that was redrawn, such as a progress bar, the
    last form is shown.

    With --json each line is an object: time (Unix seconds), timed (false if only the date of the
    file is known), host, task, attempt, round, rank (null for agents), stream (out, err, agent,
    slurm or local), text.

    With --follow the command ends with the run, also with one that was cancelled or has lost its
    tasks, and prints how the run ended.

    The exit code is 1 if there is no output; with --follow, if the run has not succeeded.
    """
    from hpc_elastic.report import log_files
    from hpc_elastic.report.run_view import read_view
    from hpc_elastic.run.directory import RunDir

    def is_wanted(line: LogLine) -> bool:
        if since is not None and line.time < since:
            return False
        return pattern is None or bool(pattern.search(cleaned(line.text, colours=False)))

    if follow and tail is None and since is None:
        tail = _FIRST_LINES
    selection = log_files.Selection(ranks, nodes, attempt, round_, agents)
    query, out, files = Query(selection, is_wanted, since, tail), _Output(as_json), RunDir(run)
    discovery = log_files.Discovery(files)
    if follow:
        return options.print_end(_follow(files, query, out, discovery))
    sources = discovery.sources()
    chosen = [source for source in sources if selection.selects(source)]
    if any(source.is_worker for source in sources):
        log_files.require_there(selection, sources)
    elif not chosen:
        remedy = "--agent shows the logs of the agents" if sources else ""
        what = f"{run} has no output of workers yet; {read_view(run).describe()}"
        what += f"; {remedy}" if remedy else ""
        raise RunDirectoryError(what, remedy=remedy or "repeat the command once a task has started")
    out.write_so_far(chosen, query, {})
    if not out.num_lines:
        remedy = "repeat the command later, or leave options out; `events` shows what happened"
        what = f"no output; {read_view(run).describe()}"
        raise log_files.NothingSelectedError(what, remedy=remedy)
    return 0


@dataclass(frozen=True)
class Query:
    """The output that is shown; None selects all lines."""

    selection: log_files.Selection
    keep: log_files.Keep
    since: float | None
    tail: int | None

    def lines(self, chosen: Sequence[LogSource], until: Mapping[Path, int]) -> Iterator[LogLine]:
        """Yield the lines of files, each up to a byte."""
        from hpc_elastic.report import log_files

        since = self.since
        if self.tail is not None:
            yield from log_files.tail(chosen, self.tail, self.keep, since=since, until=until)
            return
        begins = [(log_files.begin_of(source, since), source) for source in chosen]
        streams = (
            (begin, log_files.lines(s, log_files.start_of(s, since), until.get(s.path)))
            for begin, s in begins
            if begin is not None
        )
        yield from filter(self.keep, log_files.merge(streams))


class _Output:
    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        on_terminal = sys.stdout.isatty() and not as_json
        is_colourless = os.environ.get("TERM", "").lower() in _COLOURLESS  # as rich decides it
        self._is_plain = on_terminal and (is_colourless or bool(os.environ.get("NO_COLOR")))
        self.writer = Writer(on_terminal=on_terminal, now=time.time())
        self.num_lines = 0

    def write_so_far(
        self, chosen: Sequence[LogSource], query: Query, until: Mapping[Path, int]
    ) -> None:
        self.writer.make_room(chosen)
        self.write(query.lines(chosen, until))

    def write(self, lines: Iterable[LogLine]) -> None:
        for line in lines:
            self.num_lines += 1
            rows = [json_of(line)] if self._as_json else self.writer.rows([line])
            if self._is_plain:
                rows = map(click.unstyle, rows)
            sys.stdout.writelines(f"{row}\n" for row in rows)
        sys.stdout.flush()


def _follow(run: RunDir, query: Query, out: _Output, discovery: log_files.Discovery) -> RunView:
    """Print the present output and what is added, until the run has ended; return its view."""
    from hpc_elastic.launcher.follow import READ_S, RunFollower
    from hpc_elastic.report import log_files
    from hpc_elastic.report.run_view import read_view
    from hpc_elastic.shared_files import is_there

    end = RunFollower([run.path], read_s=READ_S, warn=options.print_message)
    ended, ended_at = None, 0.0
    follower = log_files.Follower(discovery, query.selection, query.keep)
    sources = discovery.sources()
    chosen = [source for source in sources if query.selection.selects(source)]
    until = follower.skip(chosen)
    out.write_so_far(chosen, query, until)
    if not is_there(run.result):  # print which selected output does not exist yet
        try:
            if any(source.is_worker for source in sources):
                log_files.require_there(query.selection, sources)
            else:
                options.print_message(f"waiting for output; {read_view(run.path).describe()}")
        except log_files.NothingSelectedError as e:
            options.print_message(f"{e}; waiting")
    while True:
        now = time.monotonic()
        quiet_s, over_s = now - max(ended_at, follower.last_news), now - ended_at
        if ended and (quiet_s > _LAST_LINES_S or over_s > _LAST_LINES_AT_MOST_S):
            break
        out.write(follower.poll())
        (view,) = end.poll()
        if ended is None and view.ended is not None:
            ended, ended_at = view, time.monotonic()
        time.sleep(_POLL_S)
    out.write(follower.finish())
    return ended


# ---- lines for terminals and scripts (pure)


_MARKS = {"out": "|", "err": "!"}
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green")
"""Colours of ranks; red is for errors."""


class Writer:
    """Formats lines with their time and source.

    A terminal gets colours, and the day on a line of its own, except for the day of ``now``.
    """

    def __init__(self, *, on_terminal: bool, now: float) -> None:
        self._on_terminal = on_terminal
        self._day = f"{datetime.fromtimestamp(now):%Y-%m-%d}"
        self._host_width = self._origin_width = 1
        self._second, self._date, self._clock = -1, "", ""
        self._labels: dict[int, tuple[LogSource, str]] = {}  # by identity: hashing takes longer

    def make_room(self, sources: Iterable[LogSource]) -> None:
        """Widen the columns for sources; they never become narrower."""
        widths = self._host_width, self._origin_width
        for source in sources:
            self._host_width = max(self._host_width, len(_host(source)))
            self._origin_width = max(self._origin_width, len(_origin(source)))
        if widths != (self._host_width, self._origin_width):
            self._labels.clear()

    def rows(self, lines: Iterable[LogLine]) -> Iterator[str]:
        """Yield the rows of lines, without ends of lines."""
        for line in lines:
            if int(line.time) != self._second:
                at = datetime.fromtimestamp(line.time)
                self._second = int(line.time)
                self._date, self._clock = f"{at:%Y-%m-%d}", f"{at:%H:%M:%S}"
                if self._on_terminal and self._date != self._day:
                    self._day = self._date
                    yield click.style(f"-- {self._date} --", dim=True)
            yield self._row(line)

    def _row(self, line: LogLine) -> str:
        source = line.source
        known = self._labels.get(id(source))
        if known is None or known[0] is not source:
            self.make_room([source])
            known = self._labels[id(source)] = (source, self._label(source))
        text = cleaned(line.text, colours=self._on_terminal)
        clock = f"{self._clock}.{int(line.time * 10) % 10}"
        if self._on_terminal:
            return f"{click.style(clock, dim=True)} {known[1]} {text}"
        return f"{self._date} {clock} {known[1]} {text}"

    def _label(self, source: LogSource) -> str:
        host = _host(source).ljust(self._host_width)
        origin = _origin(source).rjust(self._origin_width)
        mark = _MARKS.get(source.stream, ":")
        if self._on_terminal:
            if source.is_worker:  # the nodes of ft=true have the same ranks
                colour = zlib.crc32(source.host.encode()) + (source.rank or 0)
                origin = click.style(origin, fg=_COLOURS[colour % len(_COLOURS)])
            mark = click.style(mark, fg="red", bold=True) if source.stream == "err" else mark
        return f"{host} {origin} {mark}"


def json_of(line: LogLine) -> str:
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
    return cleaned(source.host.partition(".")[0] or source.task, colours=False)


def _origin(source: LogSource) -> str:
    return f"r{source.rank}" if source.is_worker else source.stream
