"""``hpc-elastic list``: the runs of this user, the newest first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from hpc_elastic._console import console
from hpc_elastic._util import duration
from hpc_elastic.cli import options
from hpc_elastic.cli.status import PHASES
from hpc_elastic.report.run_view import Query, label_of, read_views
from hpc_elastic.run import registry
from hpc_elastic.run.registry import KnownRun
from hpc_elastic.slurm.scheduler import take_snapshot

_WIDE = 130
"""Columns from which a run fits on one line; otherwise its overrides are below it."""

_HELP = """
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
With --json, a list of objects: run_id, directory, submitted (Unix seconds), state, nodes, step,
total_steps (null if unknown), overrides and problem (why its files cannot be read).

\b
Examples:
  hpc-elastic list
  hpc-elastic list --all --json | jq -r '.[] | select(.state == "failed") | .directory'
"""


@dataclass(frozen=True)
class Listed:
    """One run of the list; None and empty if unknown."""

    run_id: str
    directory: str
    submitted: float
    state: str
    nodes: int | None = None
    step: int | None = None
    total_steps: int | None = None
    overrides: str = ""
    problem: str | None = None


@click.command(epilog=_HELP)
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
    known = registry.newest_first()
    found = list(known if everything else islice(known, limit))
    runs = listed(found)
    if as_json:
        options.print_json([asdict(run) for run in runs])
        return 0
    _print(runs, cut=not everything and next(known, None) is not None)
    return 0


def listed(known: Sequence[KnownRun], query: Query = take_snapshot) -> list[Listed]:
    """Return the rows of runs; the scheduler is queried once for all that go on."""
    views = read_views([run.path for run in known], query)
    found = []
    for run, view in zip(known, views, strict=True):
        head = (run.run_id, str(run.path), run.submitted)
        if view.spec is None:
            found.append(Listed(*head, "unknown", problem=view.notes[0]))
            continue
        status = view.status
        found.append(
            Listed(
                *head,
                view.phase,
                status.nodes if status is not None and view.phase == "training" else None,
                None if status is None else status.step,
                None if status is None else status.total_steps,
                label_of(run.path),
            )
        )
    return found


# ---- the table


def _print(runs: Sequence[Listed], *, cut: bool) -> None:
    out = console()
    if not runs:
        out.print("no runs yet: hpc-elastic submit, or python your_script.py -m launcher=slurm ...")
        return
    wide = out.width >= _WIDE
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("run", "submitted", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("nodes", justify="right", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    if wide:
        table.add_column("overrides", ratio=1, overflow="fold")
        table.add_column("directory", ratio=1, overflow="fold")
    here = Path.cwd()
    for run in runs:
        path, title = Path(run.directory), Text(run.run_id, style="bold")
        place = str(path.relative_to(here)) if path.is_relative_to(here) else run.directory
        more = (run.problem or run.overrides, place)
        for line in () if wide else filter(None, more):
            title.append(f"\n  {line}", style="dim not bold")
        of = f" of {run.total_steps:,}" if run.total_steps else ""
        table.add_row(
            title,
            f"{duration(time.time() - run.submitted)} ago",
            Text(run.state, style=PHASES.get(run.state, "")),
            "" if run.nodes is None else str(run.nodes),
            "" if run.step is None else f"{run.step:,}{of}",
            *(map(Text, more) if wide else ()),
        )
    out.print(table)
    if cut:
        out.print(f"the newest {len(runs)}; --all lists all, --limit N the newest N", style="dim")
