"""``hpc-elastic cancel`` and ``resume``: end a run, and restart one that has stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from hpc_elastic._util import quoted
from hpc_elastic.cli import options
from hpc_elastic.errors import ScriptError

_CANCEL_EXAMPLES = """
\b
Examples:
  hpc-elastic cancel last
  hpc-elastic cancel multirun/2030-01-31/12-00-00/3 --yes

\b
--json prints one object:
  run_id, run   the run's id and directory
  result        how it had ended already: "succeeded", "failed", or null
  cancelled     names of the tasks that were cancelled
  left          those of them that have not ended in time
"""


@click.command(epilog=_CANCEL_EXAMPLES)
@options.changed_run
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option(
    "--wait-s", type=click.FloatRange(min=0), default=None, metavar="SECONDS",
    help="Longest wait for the tasks to end. [default: 30 s more than they may take]",
)  # fmt: skip
@options.trust
@options.as_json
def cancel_command(run: Path, yes: bool, wait_s: float | None, as_json: bool) -> int:
    """End a run: its running tasks and its pending ones.

    Other runs of the same sweep go on. The tasks are ended as by scancel: SIGTERM, and SIGKILL
    after KillWait (by default 30 s). In that time the run saves a checkpoint at one step, from
    which `hpc-elastic resume` continues. A script that does not call should_checkpoint continues
    from its own last checkpoint.

    A task that is being requeued at this moment is ended too. The command returns when no task is
    left. On a terminal it asks for confirmation; without one, `last` needs --yes.

    The exit code is 1 if tasks are left after --wait-s, or the command was not confirmed. A run
    that has ended already is not changed, and the exit code is 0.
    """
    from hpc_elastic.launcher import control
    from hpc_elastic.launcher.run_handle import read_result_status
    from hpc_elastic.report.run_view import end_limit_s

    target = control.CancelTarget.read(run)
    done = control.nothing_to_do(target)
    if done is not None:
        options.print_json(target.to_json(None)) if as_json else print(done)
        return 0
    asks = not yes and options.has_terminal()
    question = f"Cancel {target.spec.run_id}: {target}?"
    if not yes and not asks and click.get_current_context().meta[options.NAMED_LAST]:
        remedy = f"add --yes, or give the run's id ({target.spec.run_id})"
        raise click.UsageError(f"cancel last asks, and there is no terminal: {remedy}")
    if asks and not click.confirm(question, err=True):
        click.echo("not cancelled", err=True)
        if as_json:
            options.print_json(target.to_json(None))
        return 1
    bound = end_limit_s(target.spec) if wait_s is None else wait_s
    if not as_json:
        print(f"cancelling {target.spec.run_id}: {target}", flush=True)
    left = control.cancel(target, wait_s=bound, warn=lambda text: click.echo(text, err=True))
    if as_json:
        options.print_json(target.to_json(left))
        return 1 if left else 0
    if left:
        names = ", ".join(f"{task.task} ({task.state} {task.node})".strip() for task in left)
        click.echo(f"still there after {bound:g} s: {names}; they have received SIGTERM", err=True)
        return 1
    result = read_result_status(target.run)
    if result is not None:
        print(f"no task is left; the run {result} before it was cancelled")
        return 0
    print(f"cancelled; to continue from its last checkpoint: hpc-elastic resume {quoted(run)}")
    return 0


# ---- ``hpc-elastic resume``


_RESUME_EXAMPLES = """
\b
Examples:
  hpc-elastic resume last
  hpc-elastic resume last nodes=2:8 launcher.partition=low launcher.time=12:00:00
  hpc-elastic resume multirun/2030-01-31/12-00-00/3 launcher.exclude=node17

\b
--json prints one object:
  run_id, run, launcher   as at the submission; run is the directory
  generation              number of times that the run was resumed
  nodes, job_ids          the requested nodes, and the jobs that request them
  result_job              the job of launcher.result_job; null without
  log                     launcher=local: the output of the launcher's process
"""


@click.command(epilog=_RESUME_EXAMPLES)
@options.changed_run
@click.argument("overrides", nargs=-1, metavar="[OVERRIDE]...")
@options.trust
@options.as_json
def resume_command(run: Path, overrides: tuple[str, ...], as_json: bool) -> int:
    """Restart a run that has stopped, in the same run directory, and return at once.

    The run has failed, was cancelled, or has lost all its tasks. It continues from its last good
    checkpoint in new tasks, as after any other loss of all its nodes: logs and events are appended,
    and rounds are counted on. Its number of restarts begins at 0 again, and its list of excluded
    nodes is empty again; launcher.exclude=... excludes nodes.

    OVERRIDE is nodes=..., nproc_per_node=... or launcher.KEY=..., as at the submission. All other
    settings and the config of the training stay the same; other overrides are refused. The code is
    that of the script's files now, or of its snapshot with launcher.code_snapshot=true.

    A run that still has tasks, or has succeeded, is refused. If this command is interrupted, the
    run can be resumed again.
    """
    from hpc_elastic.cli.submit import print_run
    from hpc_elastic.launcher.control import resume
    from hpc_elastic.run.directory import RunDir

    local = RunDir(run).load().settings.backend == "local"
    if local:
        resumed = _resume_locally(run, overrides)
    else:
        resumption, handle = resume(run, overrides)
        resumed = resumption.to_json(handle.jobs, log=None)
    if as_json:
        options.print_json(resumed)
        return 0
    where = f"output in {resumed['log']}" if local else f"job {' '.join(resumed['job_ids'])}"
    print(f"resumed with nodes={resumed['nodes']} ({where})")
    print_run(resumed["run_id"], run)
    return 0


def _resume_locally(run: Path, overrides: Sequence[str]) -> dict[str, Any]:
    from hpc_elastic.launcher import detach

    def work(report: Callable[[dict[str, Any]], None]) -> None:
        from hpc_elastic._util import sigterm_as_interrupt
        from hpc_elastic.launcher.control import resume
        from hpc_elastic.launcher.submit import released_on_failure
        from hpc_elastic.launcher.wait import wait

        with sigterm_as_interrupt():
            resumption, handle = resume(run, overrides)
            with released_on_failure(handle.jobs):
                log = detach.log_of(resumption.plan)
                detach.leave_terminal(log)
                report(resumption.to_json(handle.jobs, log=log))
            wait([handle], poll_interval_s=resumption.plan.launcher.poll_interval_s)

    resumed = detach.in_background(work)
    error = resumed.get("error")
    if error or not resumed:
        why = error["message"] if error else "the launcher ended; its traceback is above"
        options.print_message(why)
        raise ScriptError("the launcher", 1, error)
    return resumed
