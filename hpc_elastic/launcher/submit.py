"""Submission of runs: written, handed to Slurm or to this machine, and returned as handles.

`hpc_elastic.launch` and the Hydra launcher (`sweep`) both call `submit`, and `wait.wait` after it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hpc_elastic._util import sigterm_as_interrupt
from hpc_elastic.config.schema import LauncherSettings, LocalSettings
from hpc_elastic.launcher import detach
from hpc_elastic.launcher.plan import Plan, RunRequest
from hpc_elastic.launcher.prepare import prepare
from hpc_elastic.launcher.progress import location
from hpc_elastic.launcher.run_handle import RunHandle, SubmittedJobs
from hpc_elastic.launcher.run_view import overrides_label
from hpc_elastic.run import registry

RENDERED = "rendered: "
"""First part of the line with the path of each script in a dry run; `hpc-elastic submit` reads
it."""


def submit(requests: Sequence[RunRequest], *, sweep: Path, name: str) -> list[RunHandle]:
    """Submit the runs of one sweep directory.

    With ``launcher.dry_run=true`` the files are written and the plan is printed. If the runs are
    not waited for (`is_awaited`), how to come back to them is printed, or reported to
    `hpc-elastic submit`.

    Args:
        requests: The runs, at least one.
        sweep: Absolute path of the sweep directory.
        name: Name of the user's script or function.

    Returns:
        The submitted runs, in order; none in a dry run.

    Raises:
        HpcElasticError: Nothing was submitted.
        KeyboardInterrupt: Its text states what has become of the runs.
    """
    prepared = prepare(requests, sweep=sweep, name=name)
    plan = prepared.plan
    if plan.launcher.dry_run:
        rendered = [f"{RENDERED}{script}" for script in prepared.scripts]
        print("\n".join([str(plan), *rendered, _location(plan)]))
        return []
    jobs = start(plan, prepared.scripts)
    with released_on_failure(jobs):
        folders = [run.dir for run in plan.runs]
        registry.add(dict(zip(prepared.run_ids, folders, strict=True)))
        handles = handles_of(plan, jobs)
        if (report := detach.report_file()) is not None:
            detach.report_submission(report, prepared, jobs.job_ids)
        elif not is_awaited(plan.launcher):
            print(plan, _location(plan), jobs.release(), sep="\n")
    return handles


def is_awaited(launcher: LauncherSettings) -> bool:
    """Return whether the launcher waits for its runs. Local runs end with it, so it always does."""
    return not launcher.dry_run and (launcher.wait or isinstance(launcher, LocalSettings))


def start(plan: Plan, scripts: Sequence[Path]) -> SubmittedJobs:
    """Hand a plan, whose files are written, to Slurm or to this machine."""
    if plan.backend == "slurm":
        from hpc_elastic.launcher import slurm

        return slurm.submit(plan, scripts)
    from hpc_elastic.launcher import local

    return local.submit(plan)


def handles_of(plan: Plan, jobs: SubmittedJobs) -> list[RunHandle]:
    """Return the runs of a submitted plan, in its order."""
    return [
        RunHandle(run.dir, overrides_label(run.overrides), names, plan.submission, jobs)
        for run, names in zip(plan.runs, plan.task_names(jobs.job_ids), strict=True)
    ]


@contextmanager
def released_on_failure(jobs: SubmittedJobs) -> Iterator[None]:
    """Release submitted jobs if a later step fails, and print what has become of them.

    Processes of ``launcher=local`` would continue without a launcher otherwise.
    """
    try:
        yield
    except KeyboardInterrupt as e:
        raise KeyboardInterrupt(jobs.release()) from e
    except BaseException:
        print(jobs.release(), file=sys.stderr)
        raise


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """End this program with a message, and no traceback, on Ctrl-C or SIGTERM.

    The message is that of the KeyboardInterrupt, if it has one.

    Raises:
        SystemExit: It was interrupted.
    """
    try:
        with sigterm_as_interrupt():
            yield
    except KeyboardInterrupt as e:
        print(str(e) or "interrupted: nothing was submitted", file=sys.stderr)
        sys.exit(130)


def _location(plan: Plan) -> str:
    return location([run.dir for run in plan.runs], plan.submission.parent, Path.cwd())
