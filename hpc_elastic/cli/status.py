"""``hpc-elastic status``: one run as it is now; and ``list``: the runs of this user."""

from __future__ import annotations

import contextlib
import json
import math
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hpc_elastic._console import console, plain_table
from hpc_elastic._util import counted, duration, node_time, sigterm_as_interrupt
from hpc_elastic.cli import options
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.report import KINDS
from hpc_elastic.run import index_of

if TYPE_CHECKING:
    from hpc_elastic.report.details import RunDetails, RunTask
    from hpc_elastic.report.run_view import Query
    from hpc_elastic.run.registry import KnownRun
    from hpc_elastic.site import ExpectedStart, StartTimes

_GAP_S = 60.0
"""Seconds between two queries about gaps. Many users have a watch open all day."""
_LINE_EVERY_S = 10.0
_AROUND_TASKS = 20
"""Lines of the page besides those of tasks."""

_STATUS_HELP = """
\b
What it shows:
  step        the last step, as the script reports it, or of the optimizer
  pace        over the last five minutes of the present group, and the expected end
  nodes       in the group now, and over time as a line of blocks
  waits       why its first task waits, while no group trains
  next node   when the next waiting task starts, by how long jobs really run; where too few have
              ended to learn that, when Slurm expects it, or a gap begins in which one with
              launcher.time_min fits; or why that is unknown
  slow        ranks whose own part of a step takes over 1.3 times that of the median
  restarts    restarts that failures of workers have spent, and how nodes have left
  given back  nodes that went back for jobs of others, and the time until the tasks had nodes again
  goodput     the share of new training steps in the time of all nodes
  node time   what it was spent on:
{kinds}

\b
With --json, one object (with --watch, one a line): run_id, run (the directory), launcher,
overrides, phase (not submitted, queued, starting, waiting, training, requeued, succeeded, failed,
cancelled, lost, unknown), time, updated, submitted, round, nodes, min_nodes, max_nodes, world_size,
group (time, nodes, world_size of each change), tasks (task, slot, state, reason, node, attempt,
ranks, time_left_s, starts_in_s, last_known: its last known state if Slurm does not answer),
why_waits (why its first task waits, while no group trains), next_node (of the next waiting task,
null if none waits: at, by Slurm's plan; not_before; why; learned, the quantiles p10, p50 and p90 of
its start; learned_from; shorter_s and shorter_at: a time limit with which it could start sooner),
step, total_steps, loss, samples, steps_per_s, samples_per_s, remaining_s,
checkpoint (step, time, kept, age_s),
restarts, max_restarts, departures (number of attempts that ended: preempted, requeued, time_limit,
cancelled, asked, node_lost, silence, nodes_requeued, agent_failed, end, ...), stragglers (rank,
host, ratio), warnings (what is wrong though the training goes on), goodput, node_seconds (by kind),
queue_seconds, given_back (jobs, nodes, node_s), ended (status, time, why, failure) and notes (what
could not be found out). Times are Unix seconds; unknown values are null.

\b
Examples:
  hpc-elastic status last
  hpc-elastic status runs/7 --watch
  hpc-elastic status last --json | jq .goodput
""".format(kinds="\n".join(f"    {kind:<11} {meaning}" for kind, meaning in KINDS.items()))


@click.command(epilog=_STATUS_HELP)
@options.run
@click.option("-w", "--watch", is_flag=True, help="Go on until the run has ended, or Ctrl-C.")
@click.option(
    "--every", "every_s", default=2.0, show_default=True, metavar="SECONDS",
    type=click.FloatRange(min=0.1), help="With --watch: interval of updates.",
)  # fmt: skip
@options.as_json
def status_command(run: Path, watch: bool, every_s: float, as_json: bool) -> int:
    """Show a run: its group, tasks, step, pace, checkpoints, and where its time went.

    The command reads the run directory, and queries Slurm once; it works on every node that has the
    directory, also after the end of the run. The exit code is 1 if RUN is no run; with --watch also
    if the run has not succeeded. `hpc-elastic wait` prints one line at a time instead, for all runs
    of a sweep.
    """
    from hpc_elastic.launcher.follow import LIST_SHOWN_S, RunFollower
    from hpc_elastic.report.details import read_details
    from hpc_elastic.report.run_view import read_view

    start, follower = NextStart(), RunFollower([run], list_s=LIST_SHOWN_S)

    def read() -> RunDetails:
        return start.added(read_details(follower.poll()[0] if watch else read_view(run)))

    details = read()
    if watch:
        return _watch(_until_end(details, read, every_s), as_json=as_json)
    if as_json:
        options.print_json(details.to_json())
    else:
        out = console()
        out.print(page(details, out.width))
    return 0


class NextStart:
    """Queries Slurm now and then for the next start of a waiting task."""

    def __init__(self) -> None:
        self._asked_at = -math.inf
        self._found: ExpectedStart | None = None

    def added(self, details: RunDetails) -> RunDetails:
        """Return the details with what is known beside Slurm's plan for a task that waits."""
        from hpc_elastic.slurm.job_state import WAITS_FOR_NODES

        view, expected, spec = details.view, details.next_node, details.view.spec
        reasons = {task.reason for task in (view.tasks or {}).values()}
        waits_for_nodes = not reasons.isdisjoint(WAITS_FOR_NODES)
        if expected is None or spec is None or not (waits_for_nodes or expected.at):
            return details
        if time.monotonic() - self._asked_at >= _GAP_S:
            from hpc_elastic.site import next_start

            self._asked_at, self._found = time.monotonic(), None
            with contextlib.suppress(HpcElasticError, OSError, ValueError):  # Slurm's plan remains
                self._found = next_start(spec, expected)
        if (found := self._found) is None:
            return details
        ats = [max(view.now, at) for at in (expected.at, found.at) if at is not None]
        return replace(details, next_node=replace(found, at=min(ats, default=None)))


def _until_end(
    details: RunDetails, read: Callable[[], RunDetails], every_s: float
) -> Iterator[RunDetails]:
    yield details
    while details.view.ended is None:
        time.sleep(every_s)
        details = read()
        yield details


def _watch(watched: Iterator[RunDetails], *, as_json: bool) -> int:
    out, ended = console(), None
    if out.is_terminal and not as_json:
        with sigterm_as_interrupt(), Live(console=out, auto_refresh=False) as live:
            for details in watched:
                most = max(3, out.height - _AROUND_TASKS)
                live.update(page(details, out.width, most_tasks=most), refresh=True)
                ended = details.view.ended
    shown: tuple[object, float] = (None, 0.0)
    for details in watched:
        if slow_values(details) != shown[0] or time.monotonic() - shown[1] >= _LINE_EVERY_S:
            shown = (slow_values(details), time.monotonic())
            text = json.dumps(details.to_json()) if as_json else line(details)
            stamp = "" if as_json else time.strftime("%H:%M:%S ")
            print(f"{stamp}{text}", flush=True)
        ended = details.view.ended
    return 1 if ended is None else ended.exit_code


# ---- the text: `page` for a terminal or a file, `line` for a watch in a file


PHASES = {
    **dict.fromkeys(("training", "succeeded"), "bold green"), "queued": "bold cyan",
    **dict.fromkeys(("failed", "lost", "cancelled"), "bold red"),
    **dict.fromkeys(("waiting", "starting", "requeued"), "bold yellow"),
}  # fmt: skip
_COLOURS = {
    "useful": "green", "replayed": "red", "checkpoint": "magenta", "restore": "cyan",
    "import": "blue", "rendezvous": "yellow", "start": "bright_black", "idle": "white",
}  # fmt: skip
_DEPARTURES = {
    "preempted": ("preemption", None), "time_limit": ("time limit", None),
    "requeued": ("task requeued", "tasks requeued"),
    "cancelled": ("task cancelled", "tasks cancelled"), "node_lost": ("node lost", "nodes lost"),
    "silence": ("node lost", "nodes lost"),
    "asked": ("node left on request", "nodes left on request"),
    "nodes_requeued": ("node requeued by the run", "nodes requeued by the run"),
    "agent_failed": ("agent failed", "agents failed"),
    "signal": ("task terminated", "tasks terminated"),
}  # fmt: skip
_LAST = {"end": "finished", "node_lost": "lost", "silence": "lost"}
"""How the last attempt ended of a task that the scheduler does not list any more."""
_MOST_TASKS = 40
_MOST_SLOW = 4
_WORTH_SHOWING_S = 1.0
_WORTH_NAMING = 0.0005
_LABEL_WIDTH = 10


def page(details: RunDetails, width: int, *, most_tasks: int = _MOST_TASKS) -> RenderableType:
    """Return the whole page; tasks beyond ``most_tasks`` are counted."""
    view = details.view
    title = Text.assemble((details.run_id, "bold"), "  ")
    title.append(f"● {view.phase}", PHASES.get(view.phase, "bold"))
    if view.submitted is not None:
        title.append(f"  submitted {duration(view.now - view.submitted)} ago", style="dim")
    where = Text(str(view.run.path), style="dim", overflow="fold")
    if details.label:
        where.append(f"\n{details.label}")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", min_width=_LABEL_WIDTH, no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in _rows(details, max(24, width - _LABEL_WIDTH - 4)):
        grid.add_row(label, text)
    tasks = [_tasks(details, most_tasks)] if details.tasks else []
    notes = [Text(f"! {note}", style="yellow") for note in details.notes]
    return Group(title, where, Text(), grid, Text(), *tasks, *notes)


def _rows(details: RunDetails, width: int) -> Iterator[tuple[str, RenderableType]]:
    view, status, pace = details.view, details.status, details.pace
    saved, spent = details.saved, details.account
    now, ended = view.now, view.ended
    if ended is not None:
        took = ended.time - view.submitted if view.submitted is not None else 0.0
        text = Text(f"{clock(ended.time, now)}, {duration(now - ended.time)} ago")
        text.append(f", {duration(took)} after it was submitted" if took > 0 else "")
        if ended.why:
            text.append(f"\n{ended.why}", style="red")
        if log := (ended.failure or {}).get("log"):
            text.append(f"\n{log}", style="dim")
        yield "ended", text
    if status is not None and status.step is not None:
        text = Text().append(f"{status.step:,}", style="bold")
        if status.total_steps:
            share = min(1.0, status.step / status.total_steps)
            done = round(share * 24)
            text.append(f" of {status.total_steps:,}  ")
            text.append("━" * done, style="green").append("╌" * (24 - done), style="dim")
            text.append(f" {share:.0%}")
        if status.loss is not None:
            text.append(f"   loss {status.loss:.4g}")
        yield "step", text
    if pace.steps_per_s is not None:
        parts = [f"{number(pace.steps_per_s)} steps/s"]
        if pace.samples_per_s is not None:
            parts.append(f"{number(pace.samples_per_s)} samples/s")
        if pace.remaining_s is not None:
            at = clock(now + pace.remaining_s, now)
            parts.append(f"done in about {duration(pace.remaining_s)} ({at})")
        yield "pace", Text(" · ".join(parts))
    if saved is not None:
        kept = f" ({saved.kept} kept)" if saved.kept else ""
        yield "checkpoint", Text(f"step {saved.step:,}, {duration(now - saved.time)} ago{kept}")
    elif status is not None and status.step is not None:
        yield "checkpoint", Text("none yet")
    if details.nodes is not None:
        yield "nodes", _nodes(details, details.nodes, width)
    if view.why_waits is not None:
        yield "waits", Text(view.why_waits, "yellow")
    if details.next_node is not None:
        yield "next node", _next_node(details.next_node, now)
    if slow := details.stragglers:
        shown = [
            f"rank {s.get('rank')} on {s.get('host')} ({s.get('ratio')} times the median)"
            for s in slow[:_MOST_SLOW]
        ]
        more = len(slow) - len(shown)
        yield "slow", Text(", ".join([*shown, *([f"and {more} more"] if more else [])]), "yellow")
    for warning in view.warnings:
        yield "warning", Text(warning, "yellow")
    restarts, allowed = view.restarts
    parts = [f"{restarts} of {allowed} spent"]
    departures = Counter[tuple[str, str | None]]()
    for why, words in _DEPARTURES.items():
        departures[words] += details.departures.get(why, 0)
    parts += [counted(num, *words) for words, num in departures.items() if num]
    if len(parts) > 1 or restarts or status is not None:
        yield "restarts", Text(" · ".join(parts))
    if spent.goodput is not None:
        text = Text().append(f"{spent.goodput:.1%}", style="bold")
        text.append(f" of {node_time(spent.node_s)}")
        if spent.queue_s >= _WORTH_SHOWING_S:
            text.append(f" (plus {node_time(spent.queue_s)} queued)", style="dim")
        yield "goodput", text
    elif spent.node_s:
        yield "goodput", Text("unknown: no step was reported yet", style="dim")
    if (given := spent.given_back).nodes:
        nodes, jobs = counted(given.nodes, "node", "nodes"), counted(given.jobs, "job", "jobs")
        yield "given back", Text(f"{nodes} for {jobs} of others, {node_time(given.node_s)}")
    if spent.node_s:
        yield "node time", _node_time_bar(spent.seconds, spent.node_s, width)


def _nodes(details: RunDetails, nodes: tuple[int, int, int], width: int) -> Text:
    now, fewest, most = nodes
    wanted = counted(most, "node") if fewest == most else f"{fewest}–{most} nodes"
    text = Text()
    if details.view.ended is None:
        text.append(f"{now} of {wanted}", style="bold" if now else "bold yellow")
        if now and details.status is not None:
            text.append(f", {counted(details.status.world_size, 'worker')}, round {details.round}")
    else:
        text.append(f"{wanted}, {counted(details.round, 'round')}")
    changes = [(size.time, float(size.nodes)) for size in details.account.sizes]
    room = min(60, width - len(text) - 4)
    if not changes or room < 8:
        return text
    end = details.view.now if details.view.ended is None else details.view.ended.time
    spark = sparkline(changes, changes[0][0], end, room, most)
    return text.append("  ").append(spark, style="cyan") if spark else text


def _next_node(expected: ExpectedStart, now: float) -> Text:
    text = _next_start(expected, now)
    if expected.shorter_s is not None and expected.shorter_at is not None:
        left_s = expected.shorter_at - now
        when = f"in {duration(left_s)}" if left_s >= 1.0 else "now"
        text.append(f"; with launcher.time={expected.shorter_s // 60:.0f} {when}")
    return text


def _next_start(expected: ExpectedStart, now: float) -> Text:
    if expected.learned is not None:
        return Text(f"{span(expected.learned, now)}, {expected.learned_from}")
    if expected.at is not None:
        left_s = expected.at - now
        when = f"in {duration(left_s)} ({clock(expected.at, now)})" if left_s > 0 else "now"
        why = f", {expected.learned_from}" if expected.learned_from else ""
        return Text(f"expected {when}{why}")
    if expected.not_before is not None:
        return Text(f"not before {clock(expected.not_before, now)}: {expected.why}")
    return Text(f"unknown: {expected.why}")


def _node_time_bar(spent: Mapping[str, float], total: float, width: int) -> RenderableType:
    bar, legend, at, used = Text(no_wrap=True), Text(), 0.0, 0
    for kind in KINDS:
        at += spent[kind]
        end = round(at / total * min(60, width))
        bar.append("█" * (end - len(bar)), style=_COLOURS[kind])
        if spent[kind] / total < _WORTH_NAMING:
            continue
        text = f"{kind} {spent[kind] / total:.1%}"
        needed = len(text) + len("■   ")
        gap = "" if not used else "\n" if used + needed > width else "  "
        used = needed + (0 if gap != "  " else used)
        legend.append(gap).append("■ ", style=_COLOURS[kind]).append(text)
    return Group(bar, legend)


def _tasks(details: RunDetails, most: int) -> RenderableType:
    table = plain_table()
    rows = list(_grouped(details.tasks))
    limited = any(task.time_left_s is not None for task in details.tasks)
    names = ("task", "state", "node", "attempt", "ranks", *(["time left"] if limited else []))
    for name in names:
        right = name in ("attempt", "ranks", "time left")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "state")
    for task, num in rows[:most]:
        ranks = task.ranks
        shown = "" if ranks is None else str(ranks[0])
        if ranks is not None and ranks[1] > ranks[0]:
            shown = f"{ranks[0]} to {ranks[1]}"
        left = "" if task.time_left_s is None else duration(task.time_left_s)
        attempt = "" if task.attempt is None else str(task.attempt)
        cells = (task.task, _state(task, num), Text(task.node or ""), attempt, shown, left)
        table.add_row(*cells[: len(names)])
    if len(rows) > most:
        table.caption = f"and {len(rows) - most} more: --json has all of them"
        table.caption_justify = "left"
    return table


def _grouped(tasks: Sequence[RunTask]) -> Iterator[tuple[RunTask, int]]:
    """Yield tasks, each with the number of tasks it stands for: similar pending ones are one."""

    def similarity(task: RunTask) -> tuple[object, ...] | None:
        waits = task.state == "PENDING" and not task.node
        return (task.state, task.reason, task.attempt) if waits else None

    for waits, group in groupby(tasks, key=similarity):
        alike = list(group)
        if waits is None or len(alike) < 3:
            yield from ((task, 1) for task in alike)
        else:
            first, last = alike[0].task, alike[-1].task
            index = index_of(last)
            name = f"{first} to {last if index is None else index}"
            yield replace(alike[0], task=name), len(alike)


def _state(task: RunTask, num: int) -> Text:
    from hpc_elastic.site import FAR_S

    if task.last_known is not None:
        text = Text("unknown", style="yellow")
        return text.append(f" (last known: {_LAST.get(task.last_known, task.last_known)})", "dim")
    if task.state is None:
        return Text(_LAST.get(task.reason or "", task.reason or "not in the queue"), style="dim")
    colour = {"RUNNING": "green", "PENDING": "cyan", "COMPLETED": "green"}.get(task.state, "yellow")
    text = Text(f"{num} {task.state}" if num > 1 else task.state, style=colour)
    if task.reason:
        text.append(f" ({task.reason})", style="dim")
    starts_in_s = task.starts_in_s or 0.0
    if task.state == "PENDING" and 0 < starts_in_s < FAR_S:
        text.append(f" in {duration(starts_in_s)}", style="dim")
    return text


def line(details: RunDetails) -> str:
    """Return a run in one line, for a watch whose output is no terminal."""
    parts = [details.view.phase]
    if details.nodes is not None and details.view.ended is None:
        parts.append(f"{details.nodes[0]} of {details.nodes[2]} nodes")
    status = details.status
    if status is not None and status.step is not None:
        of = f" of {status.total_steps:,}" if status.total_steps else ""
        parts.append(f"step {status.step:,}{of}")
        parts += [f"loss {status.loss:.4g}"] if status.loss is not None else []
    if details.pace.steps_per_s is not None:
        parts.append(f"{number(details.pace.steps_per_s)} steps/s")
    if details.pace.remaining_s is not None:
        parts.append(f"{duration(details.pace.remaining_s)} to go")
    if details.account.goodput is not None:
        parts.append(f"goodput {details.account.goodput:.1%}")
    if details.view.ended is not None and details.view.ended.why:
        parts.append(details.view.ended.why)
    return ", ".join(parts)


def slow_values(details: RunDetails) -> tuple[object, ...]:
    """Return the values whose change is printed at once; not steps, pace and loss."""
    view = details.view
    return view.phase, details.nodes, view.restarts, tuple(sorted(details.departures.items()))


# ---- ``hpc-elastic list``


_WIDE = 130
"""Columns from which a run fits on one line; otherwise its overrides are below it."""

_LIST_HELP = """
\b
A run's state is one of
  queued      none of its tasks has a node
  starting    its first tasks have nodes
  waiting     the group is forming, or has fewer nodes than min_nodes
  training    it trains
  requeued    its nodes were requeued, as they were fewer than min_nodes
  succeeded, failed
  cancelled   it was cancelled, and no task is left
  lost        no task is left, and there is no result
  unknown     Slurm does not answer, and the run has not started yet

\b
With --json, a list of objects: run_id, run (the directory), submitted (Unix seconds), state, nodes,
step, total_steps, loss (null if unknown), overrides, problem (why its files cannot be read) and
why_waits (why its first task waits, while no group trains).

\b
Examples:
  hpc-elastic list
  hpc-elastic list --all --json | jq -r '.[] | select(.state == "failed") | .run'
"""


@dataclass(frozen=True)
class Listed:
    """One run of the list; None and empty if unknown."""

    run_id: str
    run: str
    submitted: float
    state: str
    nodes: int | None = None
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    overrides: str = ""
    problem: str | None = None
    why_waits: str | None = None


@click.command(epilog=_LIST_HELP)
@click.option("-a", "--all", "everything", is_flag=True, help="List all runs.")
@click.option(
    "-n", "--limit", default=20, show_default=True, metavar="N", type=click.IntRange(min=1),
    help="Number of runs.",
)  # fmt: skip
@options.as_json
def list_command(everything: bool, limit: int, as_json: bool) -> int:
    """List the runs that you have submitted, the newest first.

    Slurm is queried once, for all runs that have not ended. Runs whose directory was deleted are
    left out. `hpc-elastic status RUN` shows a run in detail.
    """
    from hpc_elastic.run import registry

    known = registry.newest_first()
    found = list(known if everything else islice(known, limit))
    runs = listed(found)
    if as_json:
        options.print_json([asdict(run) for run in runs])
        return 0
    _print_runs(runs, cut=not everything and next(known, None) is not None)
    return 0


def listed(known: Sequence[KnownRun], query: Query | None = None) -> list[Listed]:
    """Return the rows of runs; the scheduler is queried once for all that go on."""
    from hpc_elastic.report.run_view import label_of, read_views
    from hpc_elastic.slurm.scheduler import take_snapshot

    views = read_views([run.path for run in known], query or take_snapshot)
    found = []
    for run, view in zip(known, views, strict=True):
        row = Listed(run.run_id, str(run.path), run.submitted, view.phase, why_waits=view.why_waits)
        if view.spec is None:
            row = replace(row, state="unknown", problem=view.notes[0])
        else:
            names = ("step", "total_steps", "loss", *(["nodes"] if view.trains else []))
            known_of: dict[str, Any] = {n: getattr(view.status, n, None) for n in names}
            row = replace(row, **known_of, overrides=label_of(run.path, view.spec))
        found.append(row)
    return found


def _print_runs(runs: Sequence[Listed], *, cut: bool) -> None:
    out = console()
    if not runs:
        out.print("no runs yet: hpc-elastic submit, or python your_script.py -m launcher=slurm ...")
        return
    wide = out.width >= _WIDE
    table = plain_table()
    for name in ("run", "state"):
        table.add_column(name, no_wrap=name != "run", overflow="fold")
    for name in ("step", "loss", "nodes"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("submitted", "overrides", "directory") if wide else ():
        table.add_column(name, overflow="fold")
    here = Path.cwd()
    rows = []
    for run in runs:
        path, title = Path(run.run), Text(run.run_id, style="bold")
        place = str(path.relative_to(here)) if path.is_relative_to(here) else run.run
        ago = f"{duration(time.time() - run.submitted)} ago"
        waits = f"{run.overrides} waits: {run.why_waits}".strip() if run.why_waits else ""
        more = (ago, run.problem or waits or run.overrides, place)
        for line in () if wide else filter(None, more):
            title.append(f"\n  {line}", style="dim not bold")
        of = f" of {run.total_steps:,}" if run.total_steps else ""
        figures = (
            "" if run.step is None else f"{run.step:,}{of}",
            "" if run.loss is None else f"{run.loss:.4g}",
            "" if run.nodes is None else str(run.nodes),
        )
        state = Text(run.state, style=PHASES.get(run.state, ""))
        rows.append([title, state, *map(Text, (*figures, *(more if wide else ())))])
    for row in _joined(rows, table, out):
        table.add_row(*row)
    out.print(table)
    if cut:
        out.print(f"showing the newest {len(runs)} (--all for every run)", style="dim")


def _joined(rows: Sequence[Sequence[Text]], table: Table, out: Console) -> Sequence[Sequence[Text]]:
    """Return rows as one of many lines, four times as fast, unless one would be folded."""
    alike = []
    for row in rows:
        ends = [cell.plain.count("\n") for cell in row]
        missing = (max(ends) - num for num in ends)
        alike.append([c + "\n" * n if n else c for c, n in zip(row, missing, strict=True)])
    whole = [Text("\n").join(cells) for cells in zip(*alike, strict=True)]
    widths = (
        max(out.measure(cell).maximum, len(str(column.header))) + 2  # with the padding
        for cell, column in zip(whole, table.columns, strict=True)
    )
    return [whole] if sum(widths) <= out.width else rows


# ---- times and numbers (pure)


BLOCKS = "▁▂▃▄▅▆▇█"

_HOUR = 3600


def clock(at: float, now: float) -> str:
    """Return a local time, with its day if that is not today."""
    there, here = time.localtime(at), time.localtime(now)
    if there[:3] == here[:3]:
        return time.strftime("%H:%M:%S" if abs(at - now) < _HOUR else "%H:%M", there)
    return time.strftime("%a %d %b %H:%M", there)


def span(start: StartTimes, now: float) -> str:
    """Return from when to when eight of ten starts are: ``in 10 to 40 min (8 of 10)``."""
    from hpc_elastic.site import SAME_S

    if start.p90 - now < SAME_S:
        return "now"
    first, last = (duration(60 * round((at - now) / 60)) for at in (start.p10, start.p90))
    if start.p10 - now < SAME_S:
        return f"within {last} (9 of 10)"
    (least, _, unit), (_, _, units) = first.partition(" "), last.partition(" ")
    return f"in {least if unit == units else first} to {last} (8 of 10)"


def number(value: float) -> str:
    """Return a number with three significant digits, large ones with separators."""
    if value and abs(value) < 0.001:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def sparkline(
    changes: Sequence[tuple[float, float]], begin: float, end: float, width: int, top: float
) -> str:
    """Return a value over time as a line of blocks, each the mean over its interval.

    The changes are in order of time, and the value is 0 before the first. ``top`` is the value of
    the highest block.
    """
    if end <= begin or top <= 0:
        return ""
    step, blocks = (end - begin) / width, ""
    times = [at for at, _ in changes]
    for i in range(width):
        left, right, total = begin + i * step, begin + (i + 1) * step, 0.0
        first, last = max(0, bisect_right(times, left) - 1), bisect_left(times, right)
        ends = [*times[first + 1 : last], right]
        for (at, value), until in zip(changes[first:last], ends, strict=False):
            total += value * max(0.0, min(right, until) - max(left, at))
        share = total / step / top
        block = BLOCKS[min(len(BLOCKS) - 1, max(0, round(share * len(BLOCKS)) - 1))]
        blocks += block if share > 0.01 else " "
    return blocks
