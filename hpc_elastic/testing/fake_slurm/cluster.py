"""The life of jobs: started, preempted, ended, requeued, lost with their nodes.

All times are epoch seconds, handed in. The caller holds the one lock of the controller.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hpc_elastic.testing.fake_slurm import jobs, scheduling, variables
from hpc_elastic.testing.fake_slurm.config import FakeConfig, Refusal
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
    Node,
    Step,
    Table,
    Task,
    Then,
)
from hpc_elastic.testing.fake_slurm.submit_options import Parsed

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
            job.steps = [start_batch(job, self.config, self.folder)]
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


# ---- Starts what a job runs: its batch script, and the tasks of its steps


def cpus_of(job: Job, config: FakeConfig) -> int:
    """Return how many CPUs a job has on each of its nodes."""
    return config.cpus_per_node if job.request.exclusive else job.request.cpus


def start_batch(job: Job, config: FakeConfig, folder: Path) -> Step:
    """Start the batch script of a job on its first node.

    Raises:
        OSError: its directory or its log is not there.
    """
    request = job.request
    assert request.script is not None
    script = folder / "spool" / f"job{job.number:05}" / "slurm_script"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(request.script)
    script.chmod(0o700)
    env = variables.of_batch(job, cpus_of(job, config), folder)
    mode = "ab" if request.append else "wb"
    node = job.nodes[0]
    log = variables.expand(request.output or variables.default(job), job, node=node)
    with contextlib.ExitStack() as files:
        output = files.enter_context(log.open(mode))
        error: IO[bytes] = output
        if request.error:
            error = files.enter_context(variables.expand(request.error, job, node=node).open(mode))
        process = jobs.start(
            [str(script), *request.arguments], env=env, cwd=request.cwd, output=output, error=error
        )
    return Step(None, [Task(0, node, process)])


@dataclass(frozen=True)
class Srun:
    """One call of srun.

    Attributes:
        options: Its options.
        env: Its environment.
        cwd: Its directory.
        output: File descriptor of its standard output.
        error: The same for its errors.
    """

    options: Parsed
    env: Mapping[str, str]
    cwd: str
    output: int
    error: int

    def number(self, option: str, default: int) -> int:
        """Return the value of an option that is a number."""
        text = self.options.get(option)
        return default if text is None else int(text)


def start_step(job: Job, srun: Srun, config: FakeConfig, folder: Path) -> Step:
    """Start a step: its tasks, on the nodes of its job.

    Raises:
        Refusal: the job has not as much as it asks for.
        OSError: its directory or a log is not there.
    """
    placed = _places(job, srun)
    cpus = cpus_of(job, config)
    if srun.number("cpus-per-task", 1) > cpus:
        raise Refusal(
            f"Unable to create step for job {job.number}: "
            "Requested node configuration is not available"
        )
    number, job.num_steps = job.num_steps, job.num_steps + 1
    bad_exit = srun.options.get("kill-on-bad-exit")
    step = Step(
        number,
        no_kill="no-kill" in srun.options and srun.options.get("no-kill") != "off",
        kills_on_bad_exit=bad_exit is not None and bad_exit != "0",
    )
    for rank, node in enumerate(placed):
        env = variables.of_step(job, number, placed, rank, cpus, srun.env)
        env[jobs.MARKER] = str(folder)
        step.tasks.append(Task(rank, node, _start_task(job, srun, step, placed, rank, env)))
    job.steps.append(step)
    return step


def _start_task(
    job: Job, srun: Srun, step: Step, placed: Sequence[str], rank: int, env: Mapping[str, str]
) -> jobs.Process:
    cwd = srun.options.get("chdir") or srun.cwd
    with contextlib.ExitStack() as files:
        output, error = srun.output, srun.error
        for name in ("output", "error"):
            if (pattern := srun.options.get(name)) is not None:
                nodes = list(dict.fromkeys(placed))
                node_id = nodes.index(placed[rank])
                path = variables.expand(
                    str(Path(cwd) / pattern), job,
                    node=placed[rank], node_id=node_id, rank=rank, step=step.number,
                )  # fmt: skip
                mode = os.O_APPEND if srun.options.get("open-mode") == "append" else os.O_TRUNC
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | mode, 0o666)
                files.callback(os.close, fd)
                output = fd if name == "output" else output
                error = fd if name == "error" or "error" not in srun.options else error
        return jobs.start(srun.options.rest, env=env, cwd=cwd, output=output, error=error)


def _places(job: Job, srun: Srun) -> list[str]:
    """Return the node of each task, by rank: what srun says, else what the job asked for."""
    count = srun.number("nodes", 0)
    tasks = srun.number("ntasks", 0)
    per_node = srun.number("ntasks-per-node", 0)
    if not count:
        count = min(tasks, len(job.nodes)) if tasks else len(job.nodes)
    if count > len(job.nodes):
        why = "More processors requested than permitted"
        raise Refusal(f"Unable to create step for job {job.number}: {why}")
    tasks = tasks or (count * per_node if per_node else max(count, job.request.num_tasks))
    counts = variables.split(max(tasks, count), count)
    return [node for node, num in zip(job.nodes, counts, strict=False) for _ in range(num)]
