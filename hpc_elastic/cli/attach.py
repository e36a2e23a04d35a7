"""``hpc-elastic attach``: wait for runs that were submitted before, as the launcher would."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_elastic.cli import options
from hpc_elastic.cli.looking import label_of
from hpc_elastic.cli.queues import local_tasks
from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.files import is_there
from hpc_elastic.known_runs import user
from hpc_elastic.rundir import SUBMISSION, RunDir, Submission
from hpc_elastic.slurm.states import TaskState
from hpc_elastic.submit.backend import Handle, TrackedRun

if TYPE_CHECKING:
    from hpc_elastic.submit.outcome import Outcome

_EXAMPLES = """
\b
Examples:
  hpc-elastic attach last
  hpc-elastic attach multirun/2030-01-31/12-00-00
  hpc-elastic attach last --json | jq '.[] | .run_id, .values."0"'

\b
--json prints the runs as a list of objects once all have ended, and shows their progress on
standard error:
  run_id, run   the run's id and directory
  status        "succeeded", "failed", "cancelled", or "lost": no result, and its tasks are gone
  values        what the workers have returned, by global rank; NaN and infinities are null
  restarts      how many it has spent
  error         why it has not succeeded, else null
"""


@click.command(epilog=_EXAMPLES)
@click.argument("sweep", type=options.SweepName(), metavar="SWEEP_DIR")
@click.option(
    "--poll-s", default=1.0, show_default=True, type=click.FloatRange(min=0.1),
    help="Interval in seconds.",
)  # fmt: skip
@options.as_json
def command(sweep: Path, poll_s: float, as_json: bool) -> int:
    """Show the progress of submitted runs, as the launcher does, until they end.

    SWEEP_DIR is the directory of a sweep, or one of its runs: a run directory, an id, or `last`.
    The exit code is 1 if a run failed, was cancelled, or has left no result though its tasks are
    gone.
    """
    return attach(sweep, poll_s, as_json=as_json)


def attach(sweep: Path, poll_s: float, *, as_json: bool = False) -> int:
    """Show progress until all runs of the sweep have ended.

    Args:
        sweep: Its directory, or that of one of its runs.
        poll_s: Seconds between two looks.
        as_json: Print the outcomes as JSON; all else goes to standard error.

    Returns:
        0 if all succeeded, else 1.

    Raises:
        RunDirectoryError: this is no sweep directory, or nothing was submitted from it.
    """
    from hpc_elastic.submit import session

    submission = find_submission(sweep.absolute())
    job_ids = read_job_ids(submission)
    runs, launcher = read_runs(submission, job_ids)
    handle: Handle
    specs = [run.paths.load() for run in runs]
    if launcher == "slurm":
        from hpc_elastic.slurm.client import SlurmClient
        from hpc_elastic.submit.slurm_backend import SlurmHandle

        me = user()
        is_own = all(spec.provenance.get("user", me) == me for spec in specs)
        handle = SlurmHandle(list(job_ids.values()), submission.parent, SlurmClient(), is_own)
    else:
        handle = LocalView(submission, list(job_ids.values()))
    run_ids = [spec.run_id for spec in specs]
    out = sys.stderr if as_json else sys.stdout
    outcomes = session.wait(session.Submitted(handle, runs, poll_s), out)
    failed = [outcome.error for outcome in outcomes if outcome.error]
    for error in failed:
        print(f"\n{error}", file=out)
    if as_json:
        told = [_as_json(*pair) for pair in zip(run_ids, outcomes, strict=True)]
        print(json.dumps(told, indent=2))
    return 1 if failed else 0


def _as_json(run_id: str, outcome: Outcome) -> dict[str, Any]:
    values = json.loads(json.dumps(outcome.values), parse_constant=lambda _: None)
    return {
        "run_id": run_id, "run": str(outcome.run.dir), "status": outcome.status,
        "values": values, "restarts": outcome.restarts,
        "error": None if outcome.error is None else str(outcome.error),
    }  # fmt: skip


@dataclass(frozen=True)
class LocalView:
    """Somebody else's local launch: it can be looked at, and is left alone."""

    submission: Path
    job_ids: Sequence[str]

    def tasks(self) -> Mapping[str, TaskState]:
        """Return what the launcher has written down about its processes, as far as they live."""
        return local_tasks(Submission(self.submission))

    def cancel(self) -> None:
        """Do nothing: the launcher ends its processes."""

    def leave(self) -> str:
        """Return how to come back."""
        sweep = shlex.quote(str(self.submission.parent))
        return f"The runs go on with their launcher; attach: hpc-elastic attach {sweep}"

    def close(self) -> None:
        """Do nothing: the launcher ends its processes."""


def find_submission(folder: Path) -> Path:
    """Return the ``.hpc_elastic`` of a sweep directory; one of its run directories will do.

    Raises:
        RunDirectoryError: it is neither.
    """
    if (folder / SUBMISSION).is_dir():
        return folder / SUBMISSION
    if is_there(RunDir(folder).spec):
        return Path(RunDir(folder).load().submission)
    remedy = "give the folder that holds a sweep's runs, such as multirun/2030-01-31/12-00-00"
    raise RunDirectoryError(f"{folder} is no sweep directory: {remedy}")


def read_job_ids(submission: Path) -> dict[int, str]:
    """Return the job id of each array that was submitted.

    Raises:
        RunDirectoryError: there is none.
    """
    job_ids = Submission(submission).job_ids()
    if not job_ids:
        arrays = Submission(submission).arrays()
        scripts = " ".join(shlex.quote(str(a.script)) for a in arrays if a.script.exists())
        remedy = f"; to do so: sbatch {scripts}" if scripts else ""
        raise RunDirectoryError(f"{submission.parent} was never submitted{remedy}")
    return job_ids


def read_runs(submission: Path, job_ids: Mapping[int, str]) -> tuple[list[TrackedRun], str]:
    """Return the runs of the submitted arrays, and their launcher.

    Runs whose directories were removed are left out, and named.

    Raises:
        RunDirectoryError: a file of the sweep is missing, or all its runs are.
    """
    runs, launcher = [], "slurm"
    tasks = [path for k in job_ids for path in Submission(submission).array(k).run_dirs()]
    there = {path: is_there(path) for path in dict.fromkeys(tasks)}
    removed = [path.name for path, is_there in there.items() if not is_there]
    if len(removed) == len(there):
        raise RunDirectoryError(f"{submission.parent} holds no run any more: they were removed")
    if removed:
        print(f"removed, and left out: {', '.join(removed)}", file=sys.stderr)
    for path in (path for path in there if there[path]):
        spec = RunDir(path).load()
        launcher = spec.launcher
        runs.append(TrackedRun(path, label_of(path), tuple(spec.task_names(job_ids)), submission))
    return runs, launcher
