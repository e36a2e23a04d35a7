"""``hpc-elastic submit`` and ``wait``: submit the runs of a script, and wait for submitted runs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hpc_elastic._util import quoted
from hpc_elastic.cli import options
from hpc_elastic.errors import RunDirectoryError, SubmissionError
from hpc_elastic.launcher.run_handle import RunHandle, SubmittedJobs
from hpc_elastic.launcher.run_view import label_of
from hpc_elastic.run.directory import SUBMISSION, ArrayFiles, RunDir, Submission
from hpc_elastic.run.registry import user
from hpc_elastic.shared_files import is_there
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.local_queue import LocalQueue

_SUBMIT_EXAMPLES = """
\b
Examples:
  hpc-elastic submit train.py launcher=slurm nodes=1:16 launcher.partition=gpu
  hpc-elastic submit train.py -m launcher=slurm lr=0.1,0.001
  hpc-elastic submit --json train.py launcher=local nodes=2
  hpc-elastic submit --dry-run train.py launcher=slurm nodes=1:16
  hpc-elastic submit --dry-run -o scripts train.py -m launcher=slurm launcher.partition=gpu,cpu

\b
--json prints one object for each submission, in a list:
  launcher   "slurm" or "local"
  sweep      the sweep directory
  job_ids    of the arrays; with launcher=local they are made up
  runs       [{"run_id", "run"}]: id and directory of each run
  pid, log   launcher=local: the process that runs the launcher, and its output

\b
--dry-run --json prints one object for each batch script, in a list:
  script     its path; sbatch takes it
  sweep      the sweep directory
  tasks      number of tasks that it submits
  runs       [{"run_id", "run"}]: id and directory of each run that it starts
"""
_POLL_INTERVAL_S = 0.05
_END_S = 10.0


@click.command(epilog=_SUBMIT_EXAMPLES, context_settings={"ignore_unknown_options": True})
@click.option("--dry-run", is_flag=True, help="Print the batch script, and submit nothing.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="With --dry-run: write the batch scripts to this directory.",
)  # fmt: skip
@options.as_json
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[OVERRIDE]...")
def submit_command(
    dry_run: bool, output: Path | None, as_json: bool, script: str, overrides: tuple[str, ...]
) -> int:
    """Submit the runs that `python SCRIPT OVERRIDE...` would run, and return at once.

    Prints the id and the directory of each run, and the commands that watch and end it. Everything
    that follows SCRIPT is passed to the script: give options of this command before SCRIPT.

    With launcher=slurm the runs are Slurm jobs. With launcher=local a launcher runs in a session of
    its own, without the terminal. Its output is in the sweep directory, and the runs end with it,
    or with this machine.

    With --dry-run nothing is submitted. The run directories are written, and the batch script is
    printed: `sbatch` can submit it by hand. -o writes several scripts to a directory.

    Output of SCRIPT goes to standard error. If SCRIPT fails, this command returns its exit code.
    """
    if dry_run:
        return _render(script, overrides, output, as_json=as_json)
    if output is not None:
        raise click.UsageError("-o needs --dry-run: a submission writes no batch script to DIR")
    with tempfile.TemporaryDirectory(prefix="hpc-elastic-") as folder:
        report = Path(folder, "report")
        report.touch()
        code, submitted = _run(script, overrides, report)
    if code != 0:
        return code
    if not submitted:
        remedy = "add launcher=slurm, or +launcher=slurm"
        raise SubmissionError(f"{script} ended without submitting a run; {remedy}")
    if as_json:
        print(json.dumps(submitted, indent=2))
        return 0
    for entry in submitted:
        if entry["launcher"] == "slurm":
            print(f"submitted to Slurm as job {' '.join(entry['job_ids'])}: {entry['sweep']}")
        else:
            log = quoted(Path(entry["log"]))
            print(f"started on this machine by process {entry['pid']}; its output is in {log}")
        for run in entry["runs"]:
            print_run(run["run_id"], Path(run["run"]))
    return 0


def _run(script: str, arguments: Sequence[str], report: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit code of a script, and its submissions; a local launcher keeps running."""
    from hpc_elastic.launcher import detach

    # without a launcher Hydra refuses the override: no training starts in the foreground
    argv = [sys.executable, script, *arguments, "launcher.wait=false"]
    env = {**os.environ, detach.VARIABLE: str(report)}
    script_ = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno())
    try:
        while script_.poll() is None:
            submitted = detach.read_report(report)
            if submitted and submitted[-1]["launcher"] == "local":
                return 0, submitted
            time.sleep(_POLL_INTERVAL_S)
    except KeyboardInterrupt:  # the script received the same signal
        with suppress(subprocess.TimeoutExpired):
            script_.wait(_END_S)
        raise
    return script_.returncode, detach.read_report(report)


def print_run(run_id: str, folder: Path) -> None:
    """Print the commands that watch and end a run."""
    print(f"\n{run_id}\n  {folder}")
    for what in ("status {}", "logs {} --follow", "cancel {}"):
        print(f"  hpc-elastic {what.format(run_id)}")


# ---- ``hpc-elastic submit --dry-run``: the batch script on standard output, all else on error


def _render(script: str, arguments: Sequence[str], output: Path | None, *, as_json: bool) -> int:
    """Run a script as a dry run, and print the batch script that it has written, or copy several.

    Raises:
        SubmissionError: There is no batch script; or there are several, and neither a directory
            nor JSON was requested.
    """
    from hpc_elastic.launcher.submit import RENDERED

    argv = [sys.executable, script, *arguments, "launcher.dry_run=true"]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True)
    sys.stderr.write(done.stdout)
    if done.returncode != 0:
        return done.returncode
    lines = done.stdout.splitlines()
    scripts = [Path(line.removeprefix(RENDERED)) for line in lines if line.startswith(RENDERED)]
    if not scripts:
        remedy = "only launcher=slurm has one: add launcher=slurm, or +launcher=slurm"
        raise SubmissionError(f"{script} made no batch script; {remedy}")
    files = scripts if output is None else _copy_scripts(scripts, output)
    if as_json:
        printed = []
        for rendered, file in zip(scripts, files, strict=True):
            dirs = ArrayFiles.of(rendered).run_dirs()
            runs = [{"run_id": RunDir(d).load().run_id, "run": str(d)} for d in dict.fromkeys(dirs)]
            printed.append({
                "script": str(file.absolute()), "sweep": str(rendered.parent.parent),
                "tasks": len(dirs), "runs": runs,
            })  # fmt: skip
        print(json.dumps(printed, indent=2))
    elif output is None and len(scripts) > 1:
        why = "different resources, launcher.coallocate_min, or MaxArraySize"
        what = f"{script} makes {len(scripts)} batch scripts ({why})"
        raise SubmissionError(f"{what}: write them to a directory with -o DIR")
    elif output is None:
        sys.stdout.write(scripts[0].read_text())
    return 0


def _copy_scripts(scripts: Sequence[Path], output: Path) -> list[Path]:
    try:
        output.mkdir(parents=True, exist_ok=True)
        files = [Path(shutil.copy(script, output / script.name)) for script in scripts]
    except OSError as e:
        raise SubmissionError(f"cannot write to {output}: {e.strerror}") from e
    for file in files:
        print(f"wrote {file}", file=sys.stderr)
    return files


# ---- ``hpc-elastic wait``: the launcher's display for runs that were submitted before


_WAIT_EXAMPLES = """
\b
Examples:
  hpc-elastic wait last
  hpc-elastic wait multirun/2030-01-31/12-00-00
  hpc-elastic wait last --json | jq '.[] | .run_id, .values."0"'

\b
--json prints a list of objects when all runs have ended, one for each; progress is shown on
standard error:
  run_id, run   id and directory of the run
  status        "succeeded", "failed", "cancelled", or "lost": its tasks ended without a result
  values        return values of the workers, by global rank; NaN and infinities are null
  restarts      number of restarts that were spent
  error         why it has not succeeded, or null
"""


@click.command(epilog=_WAIT_EXAMPLES)
@click.argument("sweep", type=options.SweepName(), metavar="SWEEP_DIR")
@click.option(
    "--poll-interval-s", default=1.0, show_default=True, type=click.FloatRange(min=0.1),
    help="Interval between two reads of the runs' files, in seconds.",
)  # fmt: skip
@options.as_json
def wait_command(sweep: Path, poll_interval_s: float, as_json: bool) -> int:
    """Show the progress of submitted runs, as their launcher does, until they have ended.

    SWEEP_DIR is the directory of a sweep, or one of its runs: a run directory, an id, or `last`.
    The exit code is 1 if a run has failed, was cancelled, or its tasks ended without a result.
    """
    from hpc_elastic.launcher import wait as launcher_wait

    runs = read_handles(find_submission(sweep.absolute()))
    out = sys.stderr if as_json else sys.stdout
    outcomes = launcher_wait.wait(runs, poll_interval_s=poll_interval_s, out=out)
    failed = [outcome.error for outcome in outcomes if outcome.error]
    for error in failed:
        print(f"\n{error}", file=out)
    if as_json:
        printed = [
            {
                "run_id": outcome.run.paths.load().run_id, "run": str(outcome.run.dir),
                "status": outcome.status,
                "values": json.loads(json.dumps(outcome.values), parse_constant=lambda _: None),
                "restarts": outcome.restarts,
                "error": None if outcome.error is None else str(outcome.error),
            }
            for outcome in outcomes
        ]  # fmt: skip
        print(json.dumps(printed, indent=2))
    return 1 if failed else 0


@dataclass(frozen=True)
class LocalView:
    """Read-only view of the tasks that another process has launched with launcher=local."""

    submission: Path
    job_ids: Sequence[str]

    def list_tasks(self) -> Mapping[str, TaskState]:
        """Return the states of the launcher's tasks."""
        return LocalQueue(Submission(self.submission)).tasks(self.job_ids)

    def cancel(self) -> None:
        """Do nothing: the launcher ends its processes."""

    def release(self) -> str:
        """Return the command that waits for the runs again."""
        sweep = shlex.quote(str(self.submission.parent))
        return f"The runs continue with their launcher.\n  wait: hpc-elastic wait {sweep}"

    def close(self) -> None:
        """Do nothing: the launcher ends its processes."""


def find_submission(folder: Path) -> Path:
    """Return the ``.hpc_elastic`` of a sweep directory, or of the sweep of a run directory.

    Raises:
        RunDirectoryError: `folder` is neither.
    """
    if (folder / SUBMISSION).is_dir():
        return folder / SUBMISSION
    if is_there(RunDir(folder).spec):
        return Path(RunDir(folder).load().submission)
    remedy = "give the directory of a sweep, such as multirun/2030-01-31/12-00-00"
    raise RunDirectoryError(f"{folder} is not a sweep directory: {remedy}")


def read_handles(submission: Path) -> list[RunHandle]:
    """Return the runs of a sweep that were submitted.

    Runs whose directories were removed are left out, and named on standard error.

    Raises:
        RunDirectoryError: A file of the sweep is missing, all its runs are, or nothing was
            submitted from it.
    """
    job_ids = Submission(submission).job_ids()
    if not job_ids:
        arrays = Submission(submission).arrays()
        scripts = " ".join(shlex.quote(str(a.script)) for a in arrays if a.script.exists())
        remedy = f"; to submit it: sbatch {scripts}" if scripts else ""
        raise RunDirectoryError(f"{submission.parent} was never submitted{remedy}")
    tasks = [path for k in job_ids for path in Submission(submission).array(k).run_dirs()]
    there = {path: is_there(path) for path in dict.fromkeys(tasks)}
    removed = [path.name for path, is_there in there.items() if not is_there]
    if len(removed) == len(there):
        raise RunDirectoryError(
            f"{submission.parent} has no runs left: their directories were removed"
        )
    if removed:
        print(f"left out, as their directories were removed: {', '.join(removed)}", file=sys.stderr)
    specs = {path: RunDir(path).load() for path in there if there[path]}
    jobs: SubmittedJobs
    if next(iter(specs.values())).launcher == "local":
        jobs = LocalView(submission, list(job_ids.values()))
    else:
        from hpc_elastic.launcher.slurm import SlurmJobs
        from hpc_elastic.slurm.client import SlurmClient

        me = user()
        is_own = all(spec.provenance.get("user", me) == me for spec in specs.values())
        jobs = SlurmJobs(list(job_ids.values()), submission.parent, SlurmClient(), is_own)
    return [
        RunHandle(path, label_of(path), tuple(spec.task_names(job_ids)), submission, jobs)
        for path, spec in specs.items()
    ]
