"""``hpc-elastic status``: one run as it is now."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpc_elastic.cli import options

if TYPE_CHECKING:
    from rich.console import Console

    from hpc_elastic.cli.run_view import RunFacts
    from hpc_elastic.run.directory import RunSpec
    from hpc_elastic.slurm.scheduler import QueueSnapshot

_SLURM_EVERY_S, _SLURM_SELDOM_S = 10.0, 60.0
"""A watch asks Slurm no more often, or so seldom once it knows how a run trains: many users have
one open all day."""
_GONE_S = 12.0
"""A run without a result has ended once its tasks were gone for so long, as Slurm said twice."""
_LINE_EVERY_S = 10.0
_AROUND_TASKS = 20
"""Lines of the page that are no tasks."""

_HELP = """
\b
What it shows:
  step        how far the training is, as the script reports it, or by its optimizer's steps
  pace        over the last five minutes of the present group, and when it will be done
  nodes       in the group now, and since the beginning as a line of blocks
  slow        ranks that take over 1.3 times the median's time of a step themselves
  so far      restarts that workers' failures have cost, and how nodes have left
  goodput     the share of all node-time that was new training steps
  node time   where it went:
    useful      steps that nobody had made before
    replayed    steps made again, because a node or worker was lost with them
    checkpoint  the training stood still for a checkpoint
    restore     looking for a checkpoint, and loading it
    import      workers start, import and get ready, until their first step
    rendezvous  the group is being formed
    start       the node's agent starts
    idle        others train, and this node does not

\b
With --json, one object (with --watch, one a line): run_id, directory, launcher, overrides, phase
(not submitted, queued, starting, waiting, training, requeued, succeeded, failed, cancelled, lost,
unknown), time, updated, submitted, round, nodes, min_nodes, max_nodes, world_size, group (time,
nodes, world_size of each change), tasks (task, slot, state, reason, node, attempt, ranks,
time_left_s, starts_in_s, last_known: what it was at, where Slurm does not answer), step,
total_steps, loss, samples, steps_per_s, samples_per_s, remaining_s, checkpoint (step, time, kept,
age_s), restarts, max_restarts, departures (number of attempts that ended: preempted, requeued,
time_limit, cancelled, asked, node_lost, silence, nodes_requeued, agent_failed, end, ...),
stragglers (rank, host, ratio), goodput, node_seconds (by kind), queue_seconds, ended (status, time,
why, failure) and notes (what could not be found out). Times are Unix seconds; what is not known is
null.

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
    type=click.FloatRange(min=0.1), help="With --watch: the time between two looks.",
)  # fmt: skip
@options.as_json
def status_command(run: Path, watch: bool, every_s: float, as_json: bool) -> int:
    """Show a run: its group, tasks, step, pace, checkpoints, and where its time went.

    Everything is read from the run's directory, and Slurm is asked once; nothing has to be
    running, and it works from any node that sees the directory. The exit code is 0 whatever has
    become of the run, and 1 if RUN is none; with --watch it is 1 if the run has not succeeded.
    """
    from hpc_elastic.cli.run_view import look

    asks = PatientAsks()
    facts = look(run, asks)
    if watch:
        return _watch(lambda: asks.saw(look(run, asks)), facts, every_s, as_json=as_json)
    if as_json:
        print(json.dumps(facts.to_json(), indent=2))
    else:
        from hpc_elastic.cli.status_text import console, page

        out = console()
        out.print(page(facts, out.width))
    return 0


class PatientAsks:
    """Asks the scheduler, but Slurm only now and then."""

    def __init__(self) -> None:
        self._asked_at = -math.inf
        self._answer: QueueSnapshot | None = None
        self._group: object = None
        self._changed_at = 0.0

    def __call__(self, specs: Sequence[RunSpec]) -> QueueSnapshot:
        """Return the queue of these runs as it was when it was asked for last."""
        from hpc_elastic.slurm.scheduler import take_snapshot

        settled = self._group is not None and self._changed_at < self._asked_at
        every_s = _SLURM_SELDOM_S if settled else _SLURM_EVERY_S
        local = all(spec.launcher == "local" for spec in specs)
        if local or self._answer is None or time.monotonic() - self._asked_at >= every_s:
            self._asked_at, self._answer = time.monotonic(), take_snapshot(specs)
        return self._answer

    def saw(self, facts: RunFacts) -> RunFacts:
        """Take note of the group, and return the facts: one that trains changes in the files."""
        trains = facts.phase == "training" and facts.status is not None
        fresh = facts.now - (facts.updated or 0.0) < _SLURM_EVERY_S
        group = (facts.round, facts.status.nodes) if trains and fresh and facts.status else None
        if group != self._group:
            self._group, self._changed_at = group, time.monotonic()
        return facts


def _watch(look: Callable[[], RunFacts], facts: RunFacts, every_s: float, *, as_json: bool) -> int:
    """Show the run until it has ended."""
    from hpc_elastic.cli.status_text import calm, console, line

    out, over = console(), _Over()
    if out.is_terminal and not as_json:
        return _watch_page(out, look, facts, every_s)
    shown: tuple[object, float] = (None, 0.0)
    while True:
        changed = calm(facts) != shown[0]
        if changed or time.monotonic() - shown[1] >= _LINE_EVERY_S:
            shown = (calm(facts), time.monotonic())
            text = json.dumps(facts.to_json()) if as_json else line(facts)
            stamp = "" if as_json else time.strftime("%H:%M:%S ")
            print(f"{stamp}{text}", flush=True)
        if over.is_reached(facts):
            return _exit_code(facts)
        time.sleep(every_s)
        facts = look()


class _Over:
    """Tells when a watch is over: the result may be on its way when the tasks are gone."""

    def __init__(self) -> None:
        self._since: float | None = None

    def is_reached(self, facts: RunFacts) -> bool:
        """Tell whether a run has ended for good, as it is now."""
        from hpc_elastic.cli.run_view import CANCELLED, LOST

        if facts.ended is None:
            self._since = None
            return False
        if facts.ended.status not in (CANCELLED, LOST):
            return True
        self._since = facts.now if self._since is None else self._since
        return facts.now - min(self._since, facts.ended.time + _GONE_S) >= _GONE_S


def _exit_code(facts: RunFacts) -> int:
    return 0 if facts.ended is not None and facts.ended.status == "succeeded" else 1


def _watch_page(
    console: Console, look: Callable[[], RunFacts], facts: RunFacts, every_s: float
) -> int:
    from rich.live import Live

    from hpc_elastic.cli.status_text import page
    from hpc_elastic.launcher.local import terminated_as_interrupt

    over = _Over()
    with terminated_as_interrupt(), Live(console=console, auto_refresh=False) as live:
        while True:
            most = max(3, console.height - _AROUND_TASKS)
            live.update(page(facts, console.width, most_tasks=most), refresh=True)
            if over.is_reached(facts):
                return _exit_code(facts)
            time.sleep(every_s)
            facts = look()
