"""srun: a step of the job that it runs in, or of an allocation that it makes for itself.

Each call has a thread of the controller, which looks whether the step has ended and takes what the
client hands on: SIGTERM and its like end the step at once, other signals go to its tasks.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from hpc_elastic.testing.fake_slurm import cluster as cluster_module
from hpc_elastic.testing.fake_slurm import submit_options
from hpc_elastic.testing.fake_slurm.cluster import Cluster
from hpc_elastic.testing.fake_slurm.config import Refusal
from hpc_elastic.testing.fake_slurm.jobs import (
    COMPLETED,
    FAILED,
    RUNNING,
    Exit,
    Job,
    Step,
    Task,
)
from hpc_elastic.testing.fake_slurm.queries import Answer, Call, refused
from hpc_elastic.testing.fake_slurm.submit_options import Parsed, parse

_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_POLL_S = 0.02
_INHERITED = {
    "nodes": "SLURM_JOB_NUM_NODES",
    "ntasks": "SLURM_NTASKS",
    "ntasks-per-node": "SLURM_NTASKS_PER_NODE",
}


class Gone(Exception):  # noqa: N818 (of the client, no error)
    """The client has gone."""


class Session:
    """One call of srun, in a thread of its own.

    Args:
        call: The call.
        output: File descriptor of its standard output.
        error: The same for its errors.
        signals: Returns what the client has handed on since the last time; raises `Gone`.
        cluster: The cluster.
        lock: The controller's.
    """

    def __init__(
        self,
        call: Call,
        *,
        output: int,
        error: int,
        signals: Callable[[], list[int]],
        cluster: Cluster,
        lock: threading.Lock,
    ) -> None:
        self._call, self._output, self._error = call, output, error
        self._signals, self._cluster, self._lock = signals, cluster, lock
        self._notes: list[str] = []

    def run(self) -> Answer:
        """Run the step to its end; return what srun prints, and its exit code."""
        try:
            options = parse(self._call.argv, submit_options.SRUN)
            if not options.rest:
                raise Refusal("fatal: No command given to execute.")
            number = self._call.env.get("SLURM_JOB_ID")
            if number is not None:
                exit_ = self._step(self._job(number), options)
            else:
                exit_ = self._allocate(options)
        except Refusal as e:
            return refused("srun", e)
        return Answer(
            stderr="".join(f"srun: {note}\n" for note in self._notes), code=exit_.as_shell
        )

    def _job(self, number: str) -> Job:
        with self._lock:
            jobs = self._cluster.table.jobs
            job = next((job for job in jobs if str(job.number) == number), None)
        if job is None or not job.has_nodes:
            raise Refusal(
                f"Unable to confirm allocation for job {number}: Invalid job id specified"
            )
        return job

    def _allocate(self, options: Parsed) -> Exit:
        """Queue for nodes, run the step on them, and give them back."""
        call = self._call
        origin = submit_options.Origin(
            call.cwd, call.env, call.now, None, options.rest[0].rpartition("/")[2]
        )
        wanted = replace(submit_options.read(options, origin, self._cluster.config), requeue=False)
        with self._lock:
            _, (job,) = self._cluster.table.submit(wanted, None, call.now, 1)
            self._cluster.schedule(call.now)
        with self._ended(job):
            self._wait(lambda: job.has_nodes or job.is_over, None)
            if job.is_over:
                raise Refusal(
                    "Unable to allocate resources: Job/step already completing or completed"
                )
            exit_ = self._step(job, options)
            with self._lock:
                job.exit = exit_
                if job.ending is None:
                    state = COMPLETED if exit_ == Exit() else FAILED
                    self._cluster.end(job, time.time(), state)
            return exit_

    @contextmanager
    def _ended(self, job: Job) -> Iterator[None]:
        """Cancel an allocation whose srun has gone."""
        try:
            yield
        except (Gone, Refusal):
            with self._lock:
                if not job.is_over and job.ending is None:
                    self._cluster.cancel(job, time.time())
            raise

    def _step(self, job: Job, options: Parsed) -> Exit:
        with self._lock:
            if job.state != RUNNING or job.ending is not None:
                why = "Job/step already completing or completed"
                raise Refusal(f"Unable to create step for job {job.number}: {why}")
            try:
                step = cluster_module.start_step(
                    job, self._srun(options), self._cluster.config, self._cluster.folder
                )
            except OSError as e:
                raise Refusal(f"Unable to create step for job {job.number}: {e}") from e
        self._wait(lambda: step.is_over, (job, step))
        self._notes += [_note(task) for task in step.tasks if task.exit not in (None, Exit())]
        return step.exit

    def _srun(self, options: Parsed) -> cluster_module.Srun:
        """Return the call with what srun takes over from its environment."""
        env = self._call.env
        if not {"nodes", "ntasks", "ntasks-per-node"} & options.options.keys():
            for name, variable in _INHERITED.items():
                if variable in env and "SLURM_JOB_ID" in env:
                    options.options[name] = env[variable]
        wanted, tasks = options.get("nodes"), options.get("ntasks")
        if wanted and tasks and int(tasks) < int(wanted):
            self._notes.append(
                f"Warning: can't run {tasks} processes on {wanted} nodes, setting nnodes to {tasks}"
            )
            options.options["nodes"] = tasks
        return cluster_module.Srun(options, env, self._call.cwd, self._output, self._error)

    def _wait(self, is_done: Callable[[], bool], of: tuple[Job, Step] | None) -> None:
        """Wait until something holds, and do with the step what the client is sent meanwhile."""
        has_client = True
        while True:
            with self._lock:
                if is_done():
                    return
            try:
                for number in self._signals() if has_client else []:
                    self._forward(number, of)
            except Gone:
                if of is None or of[0].batch is None:
                    raise
                has_client = False
            time.sleep(_POLL_S)

    def _forward(self, number: int, of: tuple[Job, Step] | None) -> None:
        if of is None:
            raise Gone
        job, step = of
        with self._lock:
            living = [task for task in step.tasks if task.exit is None and not task.lost]
            if number not in _ENDS:
                for task in living:
                    task.process.signal(number)
            elif job.ending is None:  # else Slurm is ending it already
                self._notes.append("forcing job termination")
                for task in living:
                    task.process.kill()


def _note(task: Task) -> str:
    """Return what srun says of a task that failed."""
    assert task.exit is not None
    if task.exit.signal:
        how = signal.strsignal(task.exit.signal) or f"Signal {task.exit.signal}"
    else:
        how = f"Exited with exit code {task.exit.code}"
    return f"error: {task.node}: task {task.rank}: {how}"
