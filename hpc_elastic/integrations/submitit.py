"""A run's task as submitit's Checkpointable, for users of submitit.

    python train.py -m launcher=slurm nodes=1:4 launcher.dry_run=true   # prepares, submits nothing

    executor = submitit.SlurmExecutor("logs")
    executor.update_parameters(time=60, signal_delay_s=90)
    with executor.batch():
        jobs = [executor.submit(task) for task in ElasticTask.of("multirun/.../.hpc_elastic")]
    print(jobs[0].result())

submitit acts only on its signal (USR2) and ignores SIGTERM, but a preemption sends only SIGTERM.
Here the run's agent is a process of its own that receives both: it saves and leaves the group as
under our own launcher. After it has left, submitit's signal is raised: submitit calls `checkpoint`,
and requeues the job in its own way. Then Slurm's hold of two minutes is shortened.

The tasks have to form one job array, with the indices of the array file: submit all of them in one
batch, and at least two. The jobs' pickles hold a path and a number.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import DelayedSubmission
from submitit.helpers import Checkpointable

from hpc_elastic._util import readable
from hpc_elastic.errors import HpcElasticError, SlurmCommandError, SubmissionError
from hpc_elastic.launcher.batch_script import TASK_MODULE
from hpc_elastic.launcher.run_handle import RunHandle
from hpc_elastic.launcher.slurm import SlurmJobs
from hpc_elastic.run.directory import ArrayFiles, RunDir, Submission
from hpc_elastic.shared_files import parse_json, read_text
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.environment import SlurmEnvironment, as_array_task, outside
from hpc_elastic.slurm.exit_action import ExitAction
from hpc_elastic.slurm.requeue import PARENT_REQUEUES, RETURN_DELAY_S, predict_exit_action

_log = logging.getLogger(__name__)

_REQUEUED_WITHIN_S = 60.0
_POLL_S = 0.5


@dataclass
class ElasticTask(Checkpointable):
    """One node of an elastic run, to be called in a job of submitit.

    Attributes:
        array_file: Absolute path of ``array-<k>.json`` of a prepared run.
        index: Index of the task.
        attempt: Number of requeues, outside of Slurm.
    """

    array_file: str
    index: int
    attempt: int = 0
    _agent: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, submission: str | Path, array: int | None = None) -> list[ElasticTask]:
        """Return the tasks of a prepared array, in the order in which to submit them.

        Args:
            submission: The sweep's ``.hpc_elastic``.
            array: The array's number k; None if there is only one.

        Raises:
            SubmissionError: Nothing was prepared there, it is a co-allocated job, or there are
                several arrays.
        """
        prepared = Submission(Path(submission).absolute())
        if array is None and len(prepared.arrays()) > 1:
            remedy = "submit the tasks of each: ElasticTask.of(submission, k)"
            raise SubmissionError(f"{prepared.path} has several arrays: {remedy}")
        file = prepared.array(array or 0).tasks
        try:
            content = parse_json(read_text(file), file)
        except (OSError, ValueError) as e:
            remedy = "prepare it with launcher.dry_run=true"
            raise SubmissionError(f"{file} cannot be read ({e}): {remedy}") from e
        if content.get("coallocated"):
            raise SubmissionError(
                f"{file} is a co-allocated job: prepare the run with launcher.coallocate_min=false"
            )
        return [cls(str(file), index) for index in range(len(content["runs"]))]

    def __call__(self) -> Any:
        """Run the node until the run has ended (in the job).

        Returns:
            The return value of rank 0.

        Raises:
            WorkerGroupError: The run has failed.
            HpcElasticError: This node has failed, or was cancelled; the run may go on.
        """
        self._agent = subprocess.Popen(
            [sys.executable, "-uP", "-m", TASK_MODULE, self.array_file],
            env=self._environment(os.environ),
        )
        exit_code = _wait(self._agent)
        end = self._run().read_end()
        if end is not None:
            if end.error is not None:
                raise end.error
            return end.value
        if exit_code == 128 + signal.SIGTERM:  # its node was taken
            exit_action: ExitAction | None = ExitAction.REQUEUE
            if _in_slurm():
                task = SlurmEnvironment.from_env(os.environ)
                exit_action = predict_exit_action(
                    task.task_name, SlurmClient(), attempt=task.restart_count
                )
            if exit_action is not ExitAction.EXIT:
                # submitit calls `checkpoint`, requeues the job and ends this process.
                signal.raise_signal(signal.Signals[f"SIG{submitit.JobEnvironment().USR_SIG}"])
        raise HpcElasticError(f"the agent of {self.array_file}[{self.index}] ended: {exit_code}")

    def checkpoint(self) -> DelayedSubmission:
        """Let the agent save and leave; submitit calls it on its signal and requeues the result."""
        if self._agent is not None and self._agent.poll() is None:
            name = self._run().paths.load().settings.launcher.preempt_signal
            self._agent.send_signal(signal.Signals[f"SIG{name}"])
            _wait(self._agent)
        if _in_slurm():
            task = SlurmEnvironment.from_env(os.environ)
            threading.Thread(target=_end_hold, args=(task, SlurmClient())).start()
        return DelayedSubmission(ElasticTask(self.array_file, self.index, self.attempt + 1))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_agent": None}

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        if not _in_slurm():
            job_id = ArrayFiles.of(Path(self.array_file)).job_id or "1"  # on one machine
            made_up = as_array_task(
                int(job_id), self.index,
                node_name=socket.gethostname(), cpus=1, restart_count=self.attempt,
            )  # fmt: skip
            return {**outside(env), **made_up}
        if env.get("SLURM_ARRAY_TASK_ID") != str(self.index):
            remedy = "submit all tasks of ElasticTask.of() in one `with executor.batch()`"
            raise SubmissionError(f"task {self.index} is not that element of a job array: {remedy}")
        return {**env, PARENT_REQUEUES: "1"}

    def _run(self) -> RunHandle:
        file = Path(self.array_file)
        runs = parse_json(read_text(file), file)["runs"]
        path = Path(runs[self.index]["dir"])
        submission = Path(RunDir(path).load().submission)
        jobs = SlurmJobs([], submission.parent, SlurmClient())
        return RunHandle(path, "", (), submission, jobs)


def _in_slurm() -> bool:
    return submitit.JobEnvironment().cluster == "slurm"


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process, also in a signal handler: `Popen.wait` alone holds a lock meanwhile."""
    pidfd = os.pidfd_open(process.pid)
    try:
        readable(pidfd)
    finally:
        os.close(pidfd)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        return process.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _end_hold(task: SlurmEnvironment, client: SlurmClient) -> None:
    """Set the start of the job once submitit has requeued it (a thread that Python waits for)."""
    deadline = time.monotonic() + _REQUEUED_WITHIN_S
    while time.monotonic() < deadline:
        try:
            state = client.tasks([str(task.array_job_id)]).get(task.task_name)
            if state is not None and (state.restarts or 0) > task.restart_count:
                client.postpone([task.task_name], RETURN_DELAY_S)
                return
        except SlurmCommandError as e:
            _log.warning("%s is held for two minutes: %s", task.task_name, e)
        time.sleep(_POLL_S)
