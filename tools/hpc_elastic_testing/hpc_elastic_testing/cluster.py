"""The life of jobs: started, preempted, ended, requeued, lost with their nodes.

All times are epoch seconds, given as arguments. The caller holds the one lock of the controller.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path

from hpc_elastic_testing import scheduling
from hpc_elastic_testing.config import FakeConfig
from hpc_elastic_testing.jobs import (
    CANCELLED,
    COMPLETED,
    FAILED,
    NODE_FAIL,
    PENDING,
    PREEMPTED,
    RUNNING,
    TIMEOUT,
    Ending,
    FakeNode,
    Job,
    JobStep,
    JobTable,
    StepTask,
    TaskExit,
)
from hpc_elastic_testing.steps import start_batch


class FakeCluster:
    """The nodes and the jobs of a fake cluster, as they change with time."""

    def __init__(self, config: FakeConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.table = JobTable()
        self.nodes = {name: FakeNode(name) for name in config.node_names}
        self.closed: set[str] = set()

    def advance(self, now: float) -> None:
        """Carry out what is due; called many times a second."""
        for job in [job for job in self.table.jobs if job.has_nodes]:
            self._collect_exits(job)
            self._check_times(job, now)
            self._check_end(job, now)
        for node in self.nodes.values():
            is_new = node.died is not None and not node.is_down
            if is_new and now >= (node.died or 0.0) + self.config.node_timeout_s:
                node.is_down = True
                self._drop_node(node.name, now)
        self.schedule_jobs(now)
        self.table.remove_ended(now - self.config.min_job_age_s)

    def schedule_jobs(self, now: float) -> None:
        """Start and preempt jobs, by `scheduling`."""
        up = frozenset(name for name, node in self.nodes.items() if node.takes_jobs)
        decision = scheduling.plan(
            self.table.jobs, now, config=self.config, up=up, closed=self.closed
        )
        for job in self.table.jobs:
            if job.order in decision.reasons:
                job.reason = decision.reasons[job.order]
        for job, nodes in decision.starts:
            self._start_job(job, nodes, now)
        for job in decision.preemptions:  # the nodes are taken after the grace time
            job.preempted = now
            self.signal_steps(job, signal.SIGCONT)
            self.signal_steps(job, signal.SIGTERM)

    def _start_job(self, job: Job, nodes: list[str], now: float) -> None:
        self.table.assign_number(job)
        job.nodes, job.given, job.started = nodes, list(nodes), now
        job.state, job.reason, job.was_warned, job.num_steps = RUNNING, "None", False, 0
        if job.request.script is None:
            return
        try:
            job.steps = [start_batch(job, self.config, self.folder)]
        except OSError:
            job.steps, job.exit = [], TaskExit(0, 53)  # Slurm's, of a script that cannot start
            job.ending = Ending(False, FAILED, now)

    def signal_steps(self, job: Job, number: int) -> None:
        """Send a signal to all processes of a job's steps, but not to the batch script."""
        for step in job.steps:
            if step.number is not None:
                _signal_step(step, number)

    def signal_batch(self, job: Job, number: int, *, with_children: bool) -> None:
        """Send a signal to the batch script, alone or with its descendants."""
        if job.batch is not None:
            _signal_step(job.batch, number, only_first=not with_children)

    def end_job(self, job: Job, now: float, state: str, *, requeue: bool = False) -> None:
        """End the processes of a job that runs: SIGTERM now, SIGKILL after KillWait.

        Unlike a preemption's first signal, this one reaches the batch script and its children too.
        Unless the job is requeued, it gets ``state`` after that.
        """
        if requeue:
            job.started = job.preempted = None
        if job.ending is not None:
            job.ending.requeue, job.ending.state = requeue, state
            return
        job.ending = Ending(requeue, state, now + self.config.kill_wait_s)
        job.restarts += requeue
        for number in (signal.SIGCONT, signal.SIGTERM):
            self.signal_steps(job, number)
            self.signal_batch(job, number, with_children=True)

    def requeue_job(self, job: Job, now: float) -> None:
        """Requeue a job that runs or has ended."""
        if job.is_over:
            job.restarts += 1
            self._queue_again(job, now)
        else:
            self.end_job(job, now, PENDING, requeue=True)

    def cancel_job(self, job: Job, now: float) -> None:
        """Cancel a job that has not ended."""
        if job.has_nodes:
            self.end_job(job, now, CANCELLED)
        else:
            self.table.assign_number(job)
            job.state, job.reason, job.ended = CANCELLED, "None", now

    def kill_node(self, name: str, now: float) -> None:
        """Kill a node at once, with all its processes."""
        node = self.nodes[name]
        node.died = node.died or now
        for job in self.table.jobs:
            for task in job.all_tasks():
                if task.node == name and task.exit is None:
                    task.lost = True
                    task.process.kill()

    def restore_node(self, name: str, now: float) -> None:
        """Put a node back into service; a dead one has lost its jobs."""
        if self.nodes[name].died is not None:
            self._drop_node(name, now)
        elif self.nodes[name].is_paused:
            self._signal_node(name, signal.SIGCONT)
        self.nodes[name] = FakeNode(name)

    def pause_node(self, name: str) -> None:
        """Stop every process of a node."""
        self.nodes[name].is_paused = True
        self._signal_node(name, signal.SIGSTOP)

    def _signal_node(self, name: str, number: int) -> None:
        for job in self.table.jobs:
            for task in job.all_tasks():
                if task.node == name and task.exit is None:
                    task.process.signal(number)

    def kill_all(self) -> None:
        """Kill every process of every job."""
        for job in self.table.jobs:
            _kill_tasks(job.all_tasks())

    def reset(self, now: float) -> None:
        """Cancel all jobs without their KillWait, restore all nodes, open all partitions."""
        for job in self.table.jobs:
            if not job.is_over:
                self.cancel_job(job, now)
            if job.ending is not None:
                job.ending.kill_at = now
        for name in self.nodes:
            self.restore_node(name, now)
        self.closed.clear()
        self.advance(now)

    def _collect_exits(self, job: Job) -> None:
        """Record the tasks that have ended, and kill the steps that end with them."""
        for step in job.steps:
            for task in step.tasks:
                code = None if task.exit is not None or task.lost else task.process.poll()
                if code is not None:
                    task.exit = TaskExit(max(code, 0), max(-code, 0))
            if step.kills_on_bad_exit and not step.is_over and step.exit != TaskExit():
                _kill_tasks(step.tasks)

    def _check_times(self, job: Job, now: float) -> None:
        """Send the warning before a job's time limit; end it at the limit or after its grace."""
        if job.ending is not None:
            return
        warning, ends_at = job.request.warning, job.ends_at
        is_due = warning and ends_at is not None and now >= ends_at - warning.ahead_s
        if warning and is_due and not job.was_warned:
            job.was_warned = True
            number = signal.Signals[f"SIG{warning.name}"]
            if warning.to_shell:
                self.signal_batch(job, number, with_children=False)
            else:
                self.signal_steps(job, number)
        if job.preempted is not None and now >= job.preempted + self.config.grace_s:
            mode = self.config.partition(job.request.partition).preempt_mode
            comes_back = mode == "REQUEUE" and job.may_requeue
            self.end_job(job, now, PREEMPTED, requeue=comes_back)
        elif ends_at is not None and now >= ends_at:
            job.reason = "TimeLimit"
            self.end_job(job, now, TIMEOUT)

    def _check_end(self, job: Job, now: float) -> None:
        """End a job whose batch script has ended; finish one without living processes."""
        batch = job.batch
        if job.ending is None and batch is not None and batch.is_over:
            job.exit = batch.exit
            job.reason = "None" if batch.exit == TaskExit() else "NonZeroExitCode"
            self.end_job(job, now, COMPLETED if batch.exit == TaskExit() else FAILED)
        if job.ending is None:
            return
        if now >= job.ending.kill_at:
            _kill_tasks(job.all_tasks())
            self._collect_exits(job)
        if not all(task.exit is not None or task.lost for task in job.all_tasks()):
            return
        if batch is not None and batch.is_over:
            job.exit = batch.exit
        ending, job.ending = job.ending, None
        if ending.requeue:
            self._queue_again(job, now)
        else:
            job.state, job.ended, job.steps = ending.state, now, []

    def _queue_again(self, job: Job, now: float) -> None:
        """Put a job back into the queue: held for a while, unless it has a start time."""
        job.state, job.reason, job.nodes, job.steps = PENDING, "None", [], []
        job.started = job.ended = job.preempted = None
        if job.begin <= now:
            job.begin = now + self.config.requeue_hold_s

    def _drop_node(self, name: str, now: float) -> None:
        """Remove a dead node from jobs with --no-kill, and end the other jobs on it."""
        for job in self.table.jobs:
            if not job.has_nodes or name not in job.nodes:
                continue
            for task in job.all_tasks():
                if task.lost and task.node == name:
                    task.lost, task.exit = False, TaskExit(0, signal.SIGKILL)
            if job.request.no_kill and len(job.nodes) > 1:
                job.nodes.remove(name)
                for step in job.steps:
                    if step.number is not None and not step.no_kill:
                        _kill_tasks(step.tasks)
                batch = job.batch
                if batch is not None and batch.tasks[0].node == name:
                    job.steps.remove(batch)
            elif job.ending is None:
                self.end_job(job, now, NODE_FAIL, requeue=job.may_requeue)


def _signal_step(step: JobStep, number: int, *, only_first: bool = False) -> None:
    for task in step.tasks:
        if task.exit is None and not task.lost:
            task.process.signal(number, only_first=only_first)


def _kill_tasks(tasks: Iterable[StepTask]) -> None:
    for task in tasks:
        if task.exit is None:
            task.process.kill()
