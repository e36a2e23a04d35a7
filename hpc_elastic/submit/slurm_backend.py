"""launcher=slurm: the plan as job arrays and gangs, and what Slurm says of their tasks."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.config import SlurmSettings
from hpc_elastic.errors import HpcElasticError, SlurmCommandError, SubmissionError
from hpc_elastic.rundir import SUBMISSION, RunDir, Submission
from hpc_elastic.slurm import replacement
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.outputs import NodeKind
from hpc_elastic.slurm.states import TaskState
from hpc_elastic.submit.prepare import Prepared
from hpc_elastic.submit.refusals import explain

DEFAULT_MAX_ARRAY_SIZE = 1001
"""Slurm's own default, for a machine without Slurm on which a script is only rendered."""


@dataclass(frozen=True)
class SlurmHandle:
    """Submitted arrays: they go on whatever becomes of this process.

    Attributes:
        job_ids: The job ids of the arrays and gangs.
        sweep: The sweep directory, which `hpc-elastic attach` takes.
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
        return replacement.list_followed(
            self.client, self._submission, self.job_ids, is_own=self.is_own
        )

    def cancel(self) -> None:
        """Cancel the arrays, running tasks and replacements included."""
        if self.job_ids:
            replacements = replacement.followed(self._submission).values()
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
            f"  attach: hpc-elastic attach {sweep}\n"
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
    from hpc_elastic.submit.executor import SbatchRefusedError, array_job_id, submit_script

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
    from hpc_elastic.submit.cancel import mark

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
