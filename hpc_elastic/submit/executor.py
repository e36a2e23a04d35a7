"""Submission through submitit's Slurm executor, with our script and no pickle.

submitit pickles a closure for each task, renders its own script, and sleeps between submissions.
Here a task is a path and an index (`ArrayTask`), and the script is the one in
``array-<k>.sbatch``, so these private parts of `submitit.SlurmExecutor` are overridden, and only
in this file; a test fails when submitit renames one:

    _internal_process_submissions   submit_array() ends here: no pickles, no throttle
    _make_submission_file_text      our text
    _make_submission_command        our file, and not inside of another job's variables

Used as they are: submit_array (public), _submit_command, _get_job_id_from_submission_command.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import DelayedSubmission, FailedJobError, FailedSubmissionError

from hpc_elastic.errors import SubmissionError
from hpc_elastic.rundir import ArrayFiles
from hpc_elastic.slurm.environment import outside

OVERRIDDEN = (
    "_internal_process_submissions",
    "_make_submission_file_text",
    "_make_submission_command",
)
USED = ("_submit_command", "_get_job_id_from_submission_command", "_submitit_command_str")


class SbatchRefusedError(SubmissionError):
    """sbatch did not take the job; ``stderr`` says why in its words."""

    def __init__(self, stderr: str) -> None:
        self.stderr = stderr
        super().__init__(f"sbatch refused the job: {stderr.strip()}")


@dataclass(frozen=True)
class ArrayTask:
    """The payload that submitit carries: where the task's description lies."""

    array_file: str
    index: int

    def __call__(self) -> None:
        """Refuse: the batch script runs the task, submitit never does."""
        raise SubmissionError(f"{self.array_file}[{self.index}] is run by its batch script only")


class ArrayExecutor(submitit.SlurmExecutor):
    """Submits one batch script as one job array, or as one gang.

    Args:
        script: ``array-<k>.sbatch``, as rendered.
        flags: Flags of sbatch beside those in the script.
    """

    def __init__(self, script: Path, flags: Sequence[str] = ()) -> None:
        folder = script.parent / "submitit"
        try:
            super().__init__(folder)
        except RuntimeError as e:
            remedy = "submit from a login node, or use launcher=local on this machine"
            raise SubmissionError(f"Slurm's commands are not installed here: {remedy}") from e
        folder.mkdir(exist_ok=True)
        self._script = script
        self._flags = list(flags)

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[submitit.core.core.Job[Any]]:
        first = self._submit_command(self._submitit_command_str)
        names = (f"{first.job_id}_{i}" for i in range(len(delayed_submissions)))
        return [submitit.SlurmJob(folder=self.folder, job_id=name, tasks=[0]) for name in names]

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script.read_text()

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return [*without_outer_job(os.environ), "sbatch", *self._flags, str(self._script)]


def without_outer_job(environ: Mapping[str, str]) -> list[str]:
    """Return the prefix that hides a surrounding job from sbatch (pure).

    Inside of an allocation (salloc, a job that submits jobs), SLURM_MEM_PER_CPU and others like
    it would be taken over and contradict the flags of the script.
    """
    hidden = environ.keys() - outside(environ).keys()
    return ["env", *(f"--unset={name}" for name in sorted(hidden))] if hidden else []


def submit_script(script: Path, num_tasks: int, *, after: str | None = None) -> list[Any]:
    """Submit one array or gang, and write its job id beside the script.

    Args:
        script: ``array-<k>.sbatch``, as rendered.
        num_tasks: How many tasks it has.
        after: Job id of the gang that has to start first.

    Returns:
        submitit's job of each task, by index; their ids are ``<array job id>_<index>``.

    Raises:
        SbatchRefusedError: sbatch did not take it.
        SubmissionError: there is no sbatch here, or its answer makes no sense.
    """
    files = ArrayFiles.of(script)
    executor = ArrayExecutor(script, [f"--dependency=after:{after}"] if after else [])
    tasks = [ArrayTask(str(files.tasks), index) for index in range(num_tasks)]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):  # submitit prints what it also raises
            jobs = executor.submit_array(tasks)
    except FailedJobError as e:
        raise SbatchRefusedError(_own_words(str(e))) from e
    except FailedSubmissionError as e:
        raise SubmissionError(str(e)) from e
    files.submitted_as(array_job_id(jobs))
    return list(jobs)


def array_job_id(jobs: Sequence[Any]) -> str:
    """Return the array job id that the tasks of one array share."""
    return str(jobs[0].job_id).partition("_")[0]


def _own_words(text: str) -> str:
    """Return what sbatch wrote, out of submitit's message around it."""
    lines = [line for line in text.splitlines() if line.startswith("sbatch: ")]
    return "\n".join(lines) or text
