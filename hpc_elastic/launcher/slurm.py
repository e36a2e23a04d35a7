"""launcher=slurm: the plan as job arrays and gangs, and what Slurm says of their tasks."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import DelayedSubmission, FailedJobError, FailedSubmissionError

from hpc_elastic.config.schema import SlurmSettings
from hpc_elastic.errors import HpcElasticError, SlurmCommandError, SubmissionError
from hpc_elastic.launcher.batch_script import explain
from hpc_elastic.launcher.prepare import Prepared
from hpc_elastic.run.directory import SUBMISSION, ArrayFiles, RunDir, Submission
from hpc_elastic.slurm import requeue
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.environment import outside
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.parsing import NodeKind

DEFAULT_MAX_ARRAY_SIZE = 1001
"""Slurm's own default, for a machine without Slurm on which a script is only rendered."""


@dataclass(frozen=True)
class SlurmHandle:
    """Submitted arrays: they go on whatever becomes of this process.

    Attributes:
        job_ids: The job ids of the arrays and gangs.
        sweep: The sweep directory, which `hpc-elastic wait` takes.
        client: The caller of Slurm's commands.
        is_own: Whether this user has submitted them.
    """

    job_ids: Sequence[str]
    sweep: Path
    client: SlurmClient
    is_own: bool = True

    def tasks(self) -> Mapping[str, TaskState]:
        """Ask squeue once for all tasks of all runs; a replacement stands for the task before."""
        if not self.job_ids:
            return {}
        return requeue.list_followed(
            self.client, self._submission, self.job_ids, is_own=self.is_own
        )

    def cancel(self) -> None:
        """Cancel the arrays, running tasks and replacements included."""
        if self.job_ids:
            replacements = requeue.followed(self._submission).values()
            self.client.cancel([*self.job_ids, *replacements])

    @property
    def _submission(self) -> Submission:
        return Submission(self.sweep / SUBMISSION)

    def leave(self) -> str:
        """Return how to come back to the runs, which go on."""
        jobs = f"job{'s' if len(self.job_ids) > 1 else ''} {' '.join(self.job_ids)}"
        sweep = shlex.quote(str(self.sweep))
        return (
            f"The runs are in Slurm, as {jobs}, and go on without this command.\n"
            f"  wait:   hpc-elastic wait {sweep}\n"
            f"  cancel: hpc-elastic cancel RUN, for each run below {sweep}"
        )

    def close(self) -> None:
        """Do nothing: tasks that are left over cancel themselves when their run has ended."""


def submit(prepared: Prepared, client: SlurmClient | None = None) -> SlurmHandle:
    """Submit every array of the plan.

    Raises:
        ConfigError: sbatch refused a setting; names the key.
        SubmissionError: sbatch refused the job for another reason. In both cases the arrays that
            were submitted before are cancelled.
        KeyboardInterrupt: the same; its text says what has become of the runs.
    """
    client = client or SlurmClient()
    sweep = prepared.plan.submission.parent
    ids: dict[int, str] = {}
    for array, script in zip(prepared.plan.arrays, prepared.scripts, strict=True):
        assert isinstance(array.launcher, SlurmSettings)
        after = None if array.after is None else ids[array.after]
        try:
            jobs = submit_script(script, len(array.tasks), after=after)
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt):
                ids |= _withdraw(prepared)
            SlurmHandle(list(ids.values()), sweep, client).cancel()
            if isinstance(e, KeyboardInterrupt):
                what = f"no run was started, and {sweep} can be removed"
                raise KeyboardInterrupt(f"interrupted during the submission: {what}") from e
            if isinstance(e, SbatchRefusedError):
                raise refusal(e.stderr, array.launcher, client) from e
            raise
        ids[array.number] = array_job_id(jobs)
    return SlurmHandle(list(ids.values()), sweep, client)


def _withdraw(prepared: Prepared) -> dict[int, str]:
    """Let every task of the runs end; return the job ids of the arrays that have started.

    The interrupted sbatch may have submitted its job, whose id nobody knows. A task writes the id
    down when it starts, and then ends where its run is marked as cancelled.
    """
    from hpc_elastic.launcher.wait import mark

    for run in prepared.plan.runs:
        mark(RunDir(run.dir), lambda text: print(text, file=sys.stderr))
    started = Submission(prepared.plan.submission).job_ids()
    return {a.number: started[a.number] for a in prepared.plan.arrays if a.number in started}


def max_array_size(*, dry_run: bool, client: SlurmClient | None = None) -> int:
    """Return the cluster's MaxArraySize.

    Args:
        dry_run: Nothing will be submitted: without Slurm, its default is assumed.
        client: The caller of Slurm's commands.

    Raises:
        SubmissionError: Slurm does not answer, so nothing can be submitted.
    """
    try:
        return (client or SlurmClient()).max_array_size()
    except SlurmCommandError as e:
        if dry_run:
            note = f"Slurm does not answer here: MaxArraySize={DEFAULT_MAX_ARRAY_SIZE} is assumed"
            print(note, file=sys.stderr)
            return DEFAULT_MAX_ARRAY_SIZE
        remedy = "launcher=slurm needs Slurm; launcher=local runs on this machine"
        raise SubmissionError(f"{e} ({remedy})") from e


def refusal(stderr: str, settings: SlurmSettings, client: SlurmClient) -> HpcElasticError:
    """Return the error to raise for what sbatch refused, with what the cluster has."""
    return explain(
        stderr, settings, known_partitions(client), known_nodes(client, settings.partition)
    )


def known_nodes(client: SlurmClient, partition: str | None) -> list[NodeKind]:
    """Return what the nodes of a partition have; nothing where Slurm does not answer."""
    try:
        return client.node_kinds(partition)
    except HpcElasticError:
        return []


def known_partitions(client: SlurmClient) -> list[str]:
    """Return the names of the cluster's partitions; none where Slurm does not answer."""
    try:
        return list(client.partitions())
    except HpcElasticError:
        return []


# ---- Submission through submitit's Slurm executor, with our script and no pickle
# submitit pickles a closure for each task, renders its own script, and sleeps between
# submissions. Here a task is a path and an index (`ArrayTask`), and the script is the one in
# ``array-<k>.sbatch``, so these private parts of `submitit.SlurmExecutor` are overridden, and
# only in this file; a test fails when submitit renames one:
#
#     _internal_process_submissions   submit_array() ends here: no pickles, no throttle
#     _make_submission_file_text      our text
#     _make_submission_command        our file, and not inside of another job's variables
#
# Used as they are: submit_array (public), _submit_command, _get_job_id_from_submission_command.


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
