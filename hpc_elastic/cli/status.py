"""``hpc-elastic status``: one run as it is now."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live

from hpc_elastic._util import sigterm_as_interrupt
from hpc_elastic.cli import options
from hpc_elastic.cli.run_details import RunDetails, read_details
from hpc_elastic.cli.status_text import console, line, page, slow_values
from hpc_elastic.launcher.run_view import CANCELLED, LOST, GoneTimer, RunEnd, RunView
from hpc_elastic.run.directory import RunSpec
from hpc_elastic.slurm.scheduler import QueueSnapshot, take_snapshot

_QUERY_INTERVAL_S, _SETTLED_QUERY_INTERVAL_S = 10.0, 60.0
"""Seconds between two queries of Slurm by a watch; the longer while the run trains and its group
does not change. Many users have a watch open all day."""
_GONE_S = 12.0
"""Time without a task after which a run without a result has ended: two queries."""
_LINE_EVERY_S = 10.0
_AROUND_TASKS = 20
"""Lines of the page besides those of tasks."""

_HELP = """
\b
What it shows:
  step        the last step, as the script reports it, or of the optimizer
  pace        over the last five minutes of the present group, and the expected end
  nodes       in the group now, and over time as a line of blocks
  slow        ranks whose own part of a step takes over 1.3 times that of the median
  so far      restarts that failures of workers have spent, and how nodes have left
  goodput     the share of new training steps in the time of all nodes
  node time   what it was spent on:
    useful      steps that were not made before
    replayed    steps that were made again after a node or worker was lost
    checkpoint  the training waits for a checkpoint
    restore     finding and loading a checkpoint
    import      workers start and import, until their first step
    rendezvous  the group forms
    start       the agent of the node starts
    idle        other nodes train, and this one does not

\b
With --json, one object (with --watch, one a line): run_id, directory, launcher, overrides, phase
(not submitted, queued, starting, waiting, training, requeued, succeeded, failed, cancelled, lost,
unknown), time, updated, submitted, round, nodes, min_nodes, max_nodes, world_size, group (time,
nodes, world_size of each change), tasks (task, slot, state, reason, node, attempt, ranks,
time_left_s, starts_in_s, last_known: its last known state if Slurm does not answer), step,
total_steps, loss, samples, steps_per_s, samples_per_s, remaining_s, checkpoint (step, time, kept,
age_s), restarts, max_restarts, departures (number of attempts that ended: preempted, requeued,
time_limit, cancelled, asked, node_lost, silence, nodes_requeued, agent_failed, end, ...),
stragglers (rank, host, ratio), goodput, node_seconds (by kind), queue_seconds, ended (status, time,
why, failure) and notes (what could not be found out). Times are Unix seconds; unknown
values are null.

\b
Examples:
  hpc-elastic status last
  hpc-elastic status runs/7 --watch
  hpc-elastic status last --json | jq .goodput
"""


@click.command(epilog=_HELP)
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
    if the run has not succeeded.
    """
    query = CachedQuery()

    def read() -> RunDetails:
        return query.observe(read_details(run, query))

    details = read()
    if watch:
        return _watch(read, details, every_s, as_json=as_json)
    if as_json:
        print(json.dumps(details.to_json(), indent=2))
    else:
        out = console()
        out.print(page(details, out.width))
    return 0


class CachedQuery:
    """Queries the scheduler, Slurm only now and then."""

    def __init__(self) -> None:
        self._asked_at = -math.inf
        self._answer: QueueSnapshot | None = None
        self._group: object = None
        self._changed_at = 0.0

    def __call__(self, specs: Sequence[RunSpec]) -> QueueSnapshot:
        """Return the tasks of these runs as of the last query."""
        settled = self._group is not None and self._changed_at < self._asked_at
        every_s = _SETTLED_QUERY_INTERVAL_S if settled else _QUERY_INTERVAL_S
        local = all(spec.launcher == "local" for spec in specs)
        if local or self._answer is None or time.monotonic() - self._asked_at >= every_s:
            self._asked_at, self._answer = time.monotonic(), take_snapshot(specs)
        return self._answer

    def observe(self, details: RunDetails) -> RunDetails:
        """Record the group, and return the details. The files show changes of a training group."""
        view, status = details.view, details.status
        fresh = view.now - (view.updated or 0.0) < _QUERY_INTERVAL_S
        trains = view.phase == "training" and status is not None and fresh
        group = (details.round, status.nodes) if trains and status is not None else None
        if group != self._group:
            self._group, self._changed_at = group, time.monotonic()
        return details


def _watch(
    read: Callable[[], RunDetails], details: RunDetails, every_s: float, *, as_json: bool
) -> int:
    out, has_ended = console(), EndCheck()
    if out.is_terminal and not as_json:
        return _watch_page(out, read, details, every_s)
    shown: tuple[object, float] = (None, 0.0)
    while True:
        changed = slow_values(details) != shown[0]
        if changed or time.monotonic() - shown[1] >= _LINE_EVERY_S:
            shown = (slow_values(details), time.monotonic())
            text = json.dumps(details.to_json()) if as_json else line(details)
            stamp = "" if as_json else time.strftime("%H:%M:%S ")
            print(f"{stamp}{text}", flush=True)
        end = has_ended(details.view)
        if end is not None:
            return end.exit_code
        time.sleep(every_s)
        details = read()


class EndCheck:
    """Detects the end of a run that is watched: without a result, when no task is left for long."""

    def __init__(self) -> None:
        self._gone = GoneTimer(_GONE_S)

    def __call__(self, view: RunView) -> RunEnd | None:
        """Return how the run ended; None if it goes on, or its result may be on its way."""
        if view.ended is None:
            self._gone.since = None
            return None
        if view.ended.status not in (CANCELLED, LOST):
            return view.ended
        self._gone.update((), view.now)
        is_over = self._gone.is_over(view.now) or view.now - view.ended.time > 2 * _GONE_S
        return view.ended if is_over else None


def _watch_page(
    console: Console, read: Callable[[], RunDetails], details: RunDetails, every_s: float
) -> int:
    has_ended = EndCheck()
    with sigterm_as_interrupt(), Live(console=console, auto_refresh=False) as live:
        while True:
            most = max(3, console.height - _AROUND_TASKS)
            live.update(page(details, console.width, most_tasks=most), refresh=True)
            end = has_ended(details.view)
            if end is not None:
                return end.exit_code
            time.sleep(every_s)
            details = read()
