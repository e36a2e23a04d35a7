"""The life of jobs: started, preempted, ended, requeued, lost with their nodes.

All times are epoch seconds, handed in. The caller holds the one lock of the controller.
"""

from __future__ import annotations

import signal
from pathlib import Path

from hpc_elastic.testing.fake_slurm import launching, scheduling
from hpc_elastic.testing.fake_slurm.config import FakeConfig
from hpc_elastic.testing.fake_slurm.jobs import (
    CANCELLED,
    COMPLETED,
    FAILED,
    NODE_FAIL,
    PENDING,
    PREEMPTED,
    RUNNING,
    TIMEOUT,
    Ending,
    Exit,
    Job,
    Step,
    Then,
)
from hpc_elastic.testing.fake_slurm.nodes import Node
from hpc_elastic.testing.fake_slurm.table import Table

_NO_LOG = Exit(0, 53)
"""What Slurm says of a batch script that could not be started."""


class Cluster:
    """The nodes, the jobs, and what happens to them."""

    def __init__(self, config: FakeConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.table = Table()
        self.nodes = {name: Node(name) for name in config.node_names}
        self.closed: set[str] = set()

    def tick(self, now: float) -> None:
        """Do what is due: called many times a second."""
        for job in [job for job in self.table.jobs if job.has_nodes]:
            self._collect(job)
            self._watch_time(job, now)
            self._settle(job, now)
        self._notice_deaths(now)
        self.schedule(now)
        self.table.forget(now - self.config.min_job_age_s)

    def schedule(self, now: float) -> None:
        """Start and preempt jobs as there is room."""
        up = frozenset(name for name, node in self.nodes.items() if node.takes_jobs)
        there = scheduling.Cluster(self.config, up, frozenset(self.closed))
        todo = scheduling.plan(self.table.jobs, there, now)
        for job in self.table.jobs:
            if job.order in todo.reasons:
                job.reason = todo.reasons[job.order]
        for job, nodes in todo.starts:
            self._start(job, nodes, now)
        for job in todo.victims:
            self.preempt(job, now)

    def _start(self, job: Job, nodes: list[str], now: float) -> None:
        self.table.number(job)
        job.nodes, job.given, job.started = nodes, list(nodes), now
        job.state, job.reason, job.noticed, job.num_steps = RUNNING, "None", False, 0
        if job.request.script is None:
            return
        try:
            job.steps = [launching.start_batch(job, self.config, self.folder)]
        except OSError:
            job.steps, job.exit = [], _NO_LOG
            job.ending = Ending(Then.END, FAILED, now)

    def preempt(self, job: Job, now: float) -> None:
        """Tell a job that its nodes are wanted; it is taken once its grace is over."""
        job.preempted = now
        self.signal_steps(job, signal.SIGCONT)
        self.signal_steps(job, signal.SIGTERM)

    def signal_steps(self, job: Job, number: int) -> None:
        """Send a signal to all processes of a job's steps; the batch script gets none."""
        for step in job.steps:
            if step.number is not None:
                _signal(step, number)

    def signal_batch(self, job: Job, number: int, *, with_children: bool) -> None:
        """Send a signal to the batch script, alone or with all that it has started."""
        if job.batch is not None:
            _signal(job.batch, number, only_first=not with_children)

    def end(self, job: Job, now: float, state: str, *, requeue: bool = False) -> None:
        """End the processes of a job that runs: SIGTERM now, SIGKILL after KillWait.

        Unlike a preemption's first signal, this one reaches the batch script and its children too.

        Args:
            job: The job.
            now: The time.
            state: What it is after that, if it is not requeued.
            requeue: Whether it goes back to the queue.
        """
        then = Then.REQUEUE if requeue else Then.END
        if requeue:
            job.started = job.preempted = None
        if job.ending is not None:
            job.ending.then, job.ending.state = then, state
            return
        job.ending = Ending(then, state, now + self.config.kill_wait_s)
        job.restarts += requeue
        for number in (signal.SIGCONT, signal.SIGTERM):
            self.signal_steps(job, number)
            self.signal_batch(job, number, with_children=True)

    def requeue(self, job: Job, now: float) -> None:
        """Send a job back to the queue that runs or has ended."""
        if job.is_over:
            job.restarts += 1
            self._back_to_queue(job, now)
        else:
            self.end(job, now, PENDING, requeue=True)

    def cancel(self, job: Job, now: float) -> None:
        """Cancel a job that has not ended."""
        if job.has_nodes:
            self.end(job, now, CANCELLED)
        else:
            self.table.number(job)
            job.state, job.reason, job.ended = CANCELLED, "None", now

    def kill_node(self, name: str, now: float) -> None:
        """Let a node die at once, with all its processes."""
        node = self.nodes[name]
        node.died = node.died or now
        for job in self.table.jobs:
            for task in job.all_tasks():
                if task.node == name and task.exit is None:
                    task.lost = True
                    task.process.kill()

    def restore_node(self, name: str, now: float) -> None:
        """Put a node back into service; what it had is lost, if it had died."""
        if self.nodes[name].died is not None:
            self._lose(name, now)
        elif self.nodes[name].is_paused:
            self._signal_node(name, signal.SIGCONT)
        self.nodes[name] = Node(name)

    def pause_node(self, name: str) -> None:
        """Let every process of a node stand still."""
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
            _kill(job)

    def heal(self, now: float) -> None:
        """Cancel all jobs without their KillWait, restore all nodes, open all partitions."""
        for job in self.table.jobs:
            if not job.is_over:
                self.cancel(job, now)
            if job.ending is not None:
                job.ending.kill_at = now
        for name in self.nodes:
            self.restore_node(name, now)
        self.closed.clear()
        self.tick(now)

    def _collect(self, job: Job) -> None:
        """See which tasks have ended, and end those that go with them."""
        for step in job.steps:
            for task in step.tasks:
                code = None if task.exit is not None or task.lost else task.process.poll()
                if code is not None:
                    task.exit = Exit(max(code, 0), max(-code, 0))
            if step.kills_on_bad_exit and not step.is_over and step.exit != Exit():
                _kill_step(step)

    def _watch_time(self, job: Job, now: float) -> None:
        """Send what is due before the end of a job's time, and end it then."""
        if job.ending is not None:
            return
        notice, ends_at = job.request.notice, job.ends_at
        if ends_at is not None and notice and not job.noticed and now >= ends_at - notice.ahead_s:
            job.noticed = True
            number = signal.Signals[f"SIG{notice.name}"]
            if notice.to_shell:
                self.signal_batch(job, number, with_children=False)
            else:
                self.signal_steps(job, number)
        if job.preempted is not None and now >= job.preempted + self.config.grace_s:
            mode = self.config.partition(job.request.partition).preempt_mode
            comes_back = mode == "REQUEUE" and job.may_requeue
            self.end(job, now, PREEMPTED, requeue=comes_back)
        elif ends_at is not None and now >= ends_at:
            job.reason = "TimeLimit"
            self.end(job, now, TIMEOUT)

    def _settle(self, job: Job, now: float) -> None:
        """See whether a job has ended, or is gone after it was ended."""
        batch = job.batch
        if job.ending is None and batch is not None and batch.is_over:
            job.exit = batch.exit
            job.reason = "None" if batch.exit == Exit() else "NonZeroExitCode"
            self.end(job, now, COMPLETED if batch.exit == Exit() else FAILED)
        if job.ending is None:
            return
        if now >= job.ending.kill_at:
            _kill(job)
            self._collect(job)
        if all(task.exit is not None or task.lost for task in job.all_tasks()):
            self._gone(job, job.ending, now)

    def _gone(self, job: Job, ending: Ending, now: float) -> None:
        if job.batch is not None and job.batch.is_over:
            job.exit = job.batch.exit
        job.ending = None
        if ending.then is Then.REQUEUE:
            self._back_to_queue(job, now)
            return
        job.state, job.ended = ending.state, now
        job.steps = []

    def _back_to_queue(self, job: Job, now: float) -> None:
        """Let a job wait again: for a while, unless it was told when it may start."""
        job.state, job.reason, job.nodes, job.steps = PENDING, "None", [], []
        job.started = job.ended = job.preempted = None
        if job.begin <= now:
            job.begin = now + self.config.requeue_hold_s

    def _notice_deaths(self, now: float) -> None:
        for node in self.nodes.values():
            is_new = node.died is not None and not node.is_down
            if is_new and now >= (node.died or 0.0) + self.config.node_timeout_s:
                node.is_down = True
                self._lose(node.name, now)

    def _lose(self, name: str, now: float) -> None:
        """Take a dead node from the jobs that had it, or the jobs from their other nodes."""
        for job in self.table.jobs:
            if not job.has_nodes or name not in job.nodes:
                continue
            for task in job.all_tasks():
                if task.lost and task.node == name:
                    task.lost, task.exit = False, Exit(0, signal.SIGKILL)
            if job.request.no_kill and len(job.nodes) > 1:
                self._go_on_without(job, name)
            elif job.ending is None:
                self.end(job, now, NODE_FAIL, requeue=job.may_requeue)

    def _go_on_without(self, job: Job, name: str) -> None:
        job.nodes.remove(name)
        for step in job.steps:
            if step.number is not None and not step.no_kill:
                _kill_step(step)
        batch = job.batch
        if batch is not None and batch.tasks[0].node == name:
            job.steps.remove(batch)


def _signal(step: Step, number: int, *, only_first: bool = False) -> None:
    for task in step.tasks:
        if task.exit is None and not task.lost:
            task.process.signal(number, only_first=only_first)


def _kill_step(step: Step) -> None:
    for task in step.tasks:
        if task.exit is None:
            task.process.kill()


def _kill(job: Job) -> None:
    for step in job.steps:
        _kill_step(step)
