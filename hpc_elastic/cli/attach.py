"""``hpc-elastic attach``: wait for runs that were submitted before, as the launcher would."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from hpc_elastic.cli.options import SweepName
from hpc_elastic.cli.queues import local_tasks
from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.rundir import SUBMISSION, RunDir, Submission, read_json
from hpc_elastic.slurm.states import TaskState
from hpc_elastic.submit.backend import Handle, TrackedRun


@click.command(
    epilog="\b\nExamples:\n  hpc-elastic attach last\n"
    "  hpc-elastic attach multirun/2030-01-31/12-00-00",
)
@click.argument("sweep", type=SweepName(), metavar="SWEEP_DIR")
@click.option("--poll-s", default=1.0, show_default=True, help="Interval in seconds.")
def command(sweep: Path, poll_s: float) -> int:
    """Show the progress of submitted runs, as the launcher does, until they end.

    SWEEP_DIR is the directory of a sweep, or one of its runs: a run directory, an id, or `last`.
    The exit code is 1 if a run failed, was cancelled, or has left no result though its tasks are
    gone.
    """
    return attach(sweep, poll_s)


def attach(sweep: Path, poll_s: float) -> int:
    """Show progress until all runs of the sweep have ended.

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
    if launcher == "slurm":
        from hpc_elastic.slurm.client import SlurmClient
        from hpc_elastic.submit.slurm_backend import SlurmHandle

        handle = SlurmHandle(list(job_ids.values()), submission.parent, SlurmClient())
    else:
        host = RunDir(runs[0].dir).load().provenance.get("host")
        handle = LocalView(submission, list(job_ids.values()), host == socket.gethostname())
    outcomes = session.wait(session.Submitted(handle, runs, poll_s))
    failed = [outcome.error for outcome in outcomes if outcome.error]
    for error in failed:
        print(f"\n{error}")
    return 1 if failed else 0


@dataclass(frozen=True)
class LocalView:
    """Somebody else's local launch: it can be looked at, and is left alone."""

    submission: Path
    job_ids: Sequence[str]
    is_here: bool = True
    """Whether its processes are of this machine."""

    def tasks(self) -> Mapping[str, TaskState]:
        """Return what the launcher has written down about its processes, as far as they live."""
        return local_tasks(Submission(self.submission), self.is_here)

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
    if RunDir(folder).spec.exists():
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

    Raises:
        RunDirectoryError: a file of the sweep is missing.
    """
    runs, launcher = [], "slurm"
    for path in dict.fromkeys(_run_dirs(submission, job_ids)):
        spec = RunDir(path).load()
        launcher = spec.launcher
        runs.append(TrackedRun(path, _label(path), tuple(spec.task_names(job_ids)), submission))
    return runs, launcher


def _run_dirs(submission: Path, job_ids: Mapping[int, str]) -> Iterator[Path]:
    for number in job_ids:
        file = Submission(submission).array(number).tasks
        array = read_json(file)
        if array is None:
            raise RunDirectoryError(f"{submission} has no {file.name}")
        try:
            yield from [Path(run["dir"]) for run in array["runs"]]
        except (KeyError, TypeError) as e:
            raise RunDirectoryError(f"{file} is damaged: it names no runs") from e


def _label(run: Path) -> str:
    """Return the overrides of a run; what a program launched has none."""
    import yaml

    from hpc_elastic.submit.session import overrides_label

    try:
        overrides = yaml.safe_load((RunDir(run).hydra / "overrides.yaml").read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return ""
    lines = overrides if isinstance(overrides, list) else []
    return overrides_label([str(line) for line in lines])
