"""``hpc-elastic cancel``: end a run, its waiting tasks too."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from hpc_elastic.cli import options

_EXAMPLES = """
\b
Examples:
  hpc-elastic cancel last
  hpc-elastic cancel multirun/2030-01-31/12-00-00/3 --yes

\b
--json prints one object:
  run_id, run   the run's id and directory
  result        how it had ended before: "succeeded", "failed", or null
  cancelled     the tasks that were cancelled, by name
  left          those of them that have not ended in time
"""


@click.command(epilog=_EXAMPLES)
@options.run
@click.option("-y", "--yes", is_flag=True, help="Do not ask, on a terminal either.")
@click.option(
    "--wait-s", type=click.FloatRange(min=0), default=None, metavar="SECONDS",
    help="Wait so long for the tasks to end. [default: 30 s more than they may take]",
)  # fmt: skip
@options.as_json
def command(run: Path, yes: bool, wait_s: float | None, as_json: bool) -> int:
    """End a run for good: its tasks that run, and those that wait.

    Other runs of the same sweep go on. The tasks get what scancel would give them: SIGTERM, and
    SIGKILL after KillWait (30 s, where the cluster has not set it otherwise). In that time the run
    saves a checkpoint at one step, so that `hpc-elastic resume` goes on from there; a script that
    does not ask should_checkpoint has its own last one.

    A task that is being requeued at this very moment does not come back. The command returns when
    all tasks are gone. On a terminal it asks first.

    The exit code is 1 if tasks are left after the time, or it was not confirmed. A run that has
    ended already is left as it is, with exit code 0.
    """
    return cancel_run(run, yes=yes, wait_s=wait_s, as_json=as_json)


def cancel_run(run: Path, *, yes: bool, wait_s: float | None, as_json: bool) -> int:
    """Cancel a run and say what came of it.

    Returns:
        0 if no task of it is left, else 1.
    """
    from hpc_elastic.submit import cancel

    standing = cancel.look(run)
    done = cancel.nothing_to_do(standing)
    if done is not None:
        print(json.dumps(cancel.as_json(standing, None), indent=2) if as_json else done)
        return 0
    if not yes and sys.stdin.isatty() and not click.confirm(_question(standing), err=True):
        click.echo("not cancelled", err=True)
        if as_json:
            print(json.dumps(cancel.as_json(standing, None), indent=2))
        return 1
    bound = cancel.bound_s(standing.spec) if wait_s is None else wait_s
    if not as_json:
        print(f"cancelling {standing.spec.run_id}: {standing}", flush=True)
    left = cancel.cancel(standing, wait_s=bound, warn=lambda text: click.echo(text, err=True))
    if as_json:
        print(json.dumps(cancel.as_json(standing, left), indent=2))
        return 1 if left else 0
    if left:
        names = ", ".join(f"{task.task} ({task.state} {task.node})".strip() for task in left)
        click.echo(f"still there after {bound:g} s: {names}; they were told to end", err=True)
        return 1
    result = cancel.read_result(standing.run)
    if result is not None:
        print(f"its tasks are gone; it {result} before it was cancelled")
        return 0
    print(f"cancelled; to go on from its last checkpoint: hpc-elastic resume {options.quoted(run)}")
    return 0


def _question(standing: object) -> str:
    from hpc_elastic.submit.cancel import Standing

    assert isinstance(standing, Standing)
    return f"Cancel {standing.spec.run_id}: {standing}?"
