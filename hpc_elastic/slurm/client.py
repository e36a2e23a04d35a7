"""The only caller of Slurm's commands; sbatch alone is called by submitit, at submission.

No accounting is needed: squeue and scontrol know a job until MinJobAge (300 s by default) after its
end. A job that Slurm has forgotten is no error here, just no longer among the answers.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence

from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.slurm.environment import for_commands
from hpc_elastic.slurm.nodelist import compress_indices
from hpc_elastic.slurm.states import SQUEUE_FORMAT, Phase, TaskState, parse_squeue

FORGOTTEN = "Invalid job id specified"
_ENDED = (FORGOTTEN, "already completing or completed")
_IDS_A_CALL = 100
RELEASE_DELAY_S = 2


class SlurmClient:
    """Asks Slurm, and tells it what to do, as the user who runs it (login node and agents).

    Every method raises `SlurmCommandError` if the command is not installed, fails or does not
    answer in time; it says which command line and what Slurm wrote.
    """

    def __init__(self, timeout_s: float = 10, *, env: Mapping[str, str] | None = None) -> None:
        """Prepare to call Slurm.

        Args:
            timeout_s: How long a command may take.
            env: The environment of the commands, in place of this process's.
        """
        self.timeout_s = timeout_s
        self._env = for_commands(os.environ if env is None else env)

    def tasks(self, job_ids: Iterable[str]) -> dict[str, TaskState]:
        """Return all tasks of these jobs by name, in one call of squeue.

        Args:
            job_ids: Jobs and job arrays, the user's own.

        Returns:
            Every array element by ``<array job id>_<index>``, the pending ones too. A task that
            has ended is there until Slurm forgets it; none for job ids that it has forgotten.
        """
        ids = list(dict.fromkeys(job_ids))
        if not ids:
            return {}
        try:
            return self._squeue(ids)
        except SlurmCommandError as e:
            if FORGOTTEN not in e.stderr:
                raise
        alone = ids if len(ids) > 1 else []
        return {name: task for job_id in alone for name, task in self.tasks([job_id]).items()}

    def _squeue(self, ids: Sequence[str]) -> dict[str, TaskState]:
        """Ask for one job, or for several: then the controller sends all jobs of the user."""
        mine = ["--me"] if len(ids) > 1 else []
        argv = ["squeue", "-h", "-t", "all", *mine, "-O", SQUEUE_FORMAT, "-j", ",".join(ids)]
        output = self._run(argv)
        try:
            return parse_squeue(output)
        except ValueError as e:
            raise SlurmCommandError(argv, 0, str(e)) from e

    def cancel(self, tasks: Sequence[str], *, pending_only: bool = False) -> None:
        """Cancel tasks; those that have ended are no error.

        Args:
            tasks: Names as in `tasks`: jobs, arrays, or single array elements.
            pending_only: Leave alone what has a node. Asks squeue first: scancel's own ``--state``
                filter cancels *every* pending element of an array if one is named (Slurm 22.05).
                A task that Slurm starts in between is cancelled nevertheless.
        """
        if pending_only:
            states = self.tasks(task.partition("_")[0] for task in tasks)
            tasks = _pending(tasks, states)
        ids = list(_compact(tasks))
        for at in range(0, len(ids), _IDS_A_CALL):
            self._scancel(ids[at : at + _IDS_A_CALL])

    def _scancel(self, ids: Sequence[str]) -> None:
        try:
            self._run(["scancel", *ids])
        except SlurmCommandError as e:
            lines = e.stderr.splitlines()
            if e.exit_code is None or not lines or any(not _is_ended(line) for line in lines):
                raise

    def max_array_size(self) -> int:
        """Return the cluster's MaxArraySize: the highest index of an array is one less."""
        argv = ["scontrol", "show", "config"]
        output = self._run(argv)
        m = re.search(r"^MaxArraySize\s*=\s*(\d+)\s*$", output, re.MULTILINE)
        if m is None:
            raise SlurmCommandError(argv, 0, "no MaxArraySize in its output")
        return int(m[1])

    def partitions(self) -> list[str]:
        """Return the names of the cluster's partitions, those hidden from the user included."""
        return list(dict.fromkeys(self._run(["sinfo", "-h", "-a", "-o", "%R"]).split()))

    def requeue(self, task: str) -> None:
        """Send a task back to the queue: Slurm kills it, and starts it again when it can."""
        self._run(["scontrol", "requeue", task])

    def release(self, task: str) -> None:
        """Let a requeued task start soon, without the two minutes that Slurm makes it wait.

        Not at once: a node refuses what was granted in the second in which the task's earlier
        attempt was ended ("Job credential revoked"), and Slurm then ends the task as FAILED for
        good, although it is to be requeued (22.05).
        """
        begin = f"starttime=now+{RELEASE_DELAY_S}"
        self._run(["scontrol", "update", f"jobid={task}", begin])

    def _run(self, argv: Sequence[str]) -> str:
        """Return what a command prints."""
        try:
            done = subprocess.run(
                argv,
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=self.timeout_s,
                env=self._env,
            )
        except subprocess.TimeoutExpired as e:
            raise SlurmCommandError(argv, None, f"no answer within {self.timeout_s:g} s") from e
        except OSError as e:
            why = f"{e.strerror or e}; is Slurm installed here, and on PATH?"
            raise SlurmCommandError(argv, None, why) from e
        if done.returncode != 0:
            raise SlurmCommandError(argv, done.returncode, done.stderr)
        return done.stdout


def _is_ended(line: str) -> bool:
    """Tell whether a line of scancel's says no more than that a job has ended."""
    return any(phrase in line for phrase in _ENDED)


def _pending(tasks: Iterable[str], states: Mapping[str, TaskState]) -> list[str]:
    """Return the names of single tasks that wait for a node, whole arrays taken apart."""
    asked = set(tasks)
    return [
        name
        for name, state in states.items()
        if state.phase is Phase.PENDING and (name in asked or name.partition("_")[0] in asked)
    ]


def _compact(tasks: Iterable[str]) -> Iterator[str]:
    """Yield ``123_[1-5,7]`` for the elements of an array, and other names as they are."""
    elements: dict[str, list[int]] = {}
    for task in dict.fromkeys(tasks):
        job, _, index = task.partition("_")
        if index.isdecimal():
            elements.setdefault(job, []).append(int(index))
        else:
            yield task
    for job, indices in elements.items():
        yield f"{job}_[{compress_indices(indices)}]"
