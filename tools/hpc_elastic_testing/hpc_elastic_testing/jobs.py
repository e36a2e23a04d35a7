"""Jobs, their steps and tasks, the processes of the tasks, and the nodes."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from hpc_elastic.slurm import nodelist
from hpc_elastic_testing.config import Refusal
from hpc_elastic_testing.submit_options import JobRequest

PENDING, RUNNING = "PENDING", "RUNNING"
COMPLETED, FAILED, CANCELLED = "COMPLETED", "FAILED", "CANCELLED"
TIMEOUT, NODE_FAIL, PREEMPTED = "TIMEOUT", "NODE_FAIL", "PREEMPTED"
COMPACT = {
    **{PENDING: "PD", RUNNING: "R", COMPLETED: "CD", FAILED: "F", CANCELLED: "CA"},
    **{TIMEOUT: "TO", NODE_FAIL: "NF", PREEMPTED: "PR", "COMPLETING": "CG"},
}
SHORT = {
    **{"idle": "idle", "mixed": "mix", "allocated": "alloc", "completing": "comp"},
    **{"down": "down", "down*": "down*", "draining": "drng", "drained": "drain"},
}
"""The short forms of the states."""
MARKER = "HPC_ELASTIC_FAKE_SLURM"
"""Variable with the cluster's directory, in the environment of every process of its jobs."""
INVALID = "Invalid job id specified"
_STEPD = Path(__file__).with_name("stepd.py")
_KILL_S = 5.0
"""A process that hangs in the kernel is left alone after that."""
_NAME = re.compile(r"(\d+)(?:_(?:(\d+)|\[(.+)\]|(\*)))?", re.ASCII)


@dataclass(frozen=True)
class TaskExit:
    """The end of a task: its exit code, or the signal that ended it."""

    code: int = 0
    signal: int = 0

    @property
    def as_shell(self) -> int:
        """The exit code that a shell reports."""
        return 128 + self.signal if self.signal else self.code

    def __str__(self) -> str:
        return f"{self.code}:{self.signal}"


@dataclass
class Job:
    """One job, or one element of an array; ``submitted`` is in epoch seconds.

    Attributes:
        number: Its job id; None for an element that still waits in its array's record.
        array: The array's job id; None for a job that is no element.
        limit: Number of elements that may run at a time; None for all.
        bounds: The lowest and the highest index of the array.
    """

    request: JobRequest
    submitted: float
    order: int
    number: int | None = None
    array: int | None = None
    index: int | None = None
    limit: int | None = None
    num_in_array: int = 0
    bounds: tuple[int, int] = (0, 0)
    state: str = PENDING
    reason: str = "None"
    held: bool = False
    begin: float = 0.0
    may_requeue: bool = True
    excluded: frozenset[str] = frozenset()
    nice: int = 0
    limit_s: float | None = None
    restarts: int = 0
    nodes: list[str] = field(default_factory=list)
    given: list[str] = field(default_factory=list)
    started: float | None = None
    ended: float | None = None
    preempted: float | None = None
    ending: Ending | None = None
    was_warned: bool = False
    exit: TaskExit = field(default_factory=TaskExit)
    steps: list[JobStep] = field(default_factory=list)
    num_steps: int = 0

    @property
    def name(self) -> str:
        """Its name in squeue."""
        return f"{self.array}_{self.index}" if self.array is not None else str(self.number)

    @property
    def shown_state(self) -> str:
        """Slurm's name of the state, COMPLETING included."""
        return "COMPLETING" if self.ending is not None else self.state

    @property
    def priority(self) -> int:
        """Its priority: the earlier job has the higher one."""
        return 2**32 - 1 - self.order - self.nice

    @property
    def is_queued(self) -> bool:
        """Whether it is in the queue, or will be once its processes have ended."""
        if self.ending is not None:
            return self.ending.requeue
        return self.state == PENDING

    @property
    def has_nodes(self) -> bool:
        """Whether it holds nodes: it runs, or is being ended."""
        return self.state == RUNNING or self.ending is not None

    @property
    def is_over(self) -> bool:
        """Whether it has ended for good."""
        return self.ending is None and self.state not in (PENDING, RUNNING)

    @property
    def ends_at(self) -> float | None:
        """When its time limit is reached; None without a limit, or if it does not run."""
        if self.started is None or self.limit_s is None:
            return None
        return self.started + self.limit_s

    @property
    def batch(self) -> JobStep | None:
        """The step of its batch script."""
        return next((step for step in self.steps if step.number is None), None)

    def all_tasks(self) -> Iterator[StepTask]:
        """Yield the tasks of all its steps."""
        for step in self.steps:
            yield from step.tasks


@dataclass
class JobStep:
    """A job step; the batch script is a step without a number.

    ``no_kill``: it outlives the loss of a node. ``kills_on_bad_exit``: a failed task ends the
    others.
    """

    number: int | None
    tasks: list[StepTask] = field(default_factory=list)
    no_kill: bool = False
    kills_on_bad_exit: bool = False

    @property
    def is_over(self) -> bool:
        """Whether all tasks have ended."""
        return all(task.exit is not None for task in self.tasks)

    @property
    def exit(self) -> TaskExit:
        """The worst exit of its tasks."""
        exits = [task.exit for task in self.tasks if task.exit is not None]
        return max(exits, key=lambda e: e.as_shell, default=TaskExit())


@dataclass
class StepTask:
    """One task of a step; ``rank`` is its number in the step.

    ``exit`` is None while it runs. ``lost``: its node has died unknown to the controller.
    """

    rank: int
    node: str
    process: TaskProcess
    exit: TaskExit | None = None
    lost: bool = False


@dataclass
class Ending:
    """The end of a job whose processes have been signalled; ``state`` is its state after that.

    ``kill_at`` is when its remaining processes are killed, in epoch seconds.
    """

    requeue: bool
    state: str
    kill_at: float


@dataclass
class FakeNode:
    """One node; ``died`` is in epoch seconds, None while it lives.

    ``is_down``: the controller knows that it is dead. ``is_drained``: it takes no further jobs.
    ``is_paused``: all its processes are stopped.
    """

    name: str
    died: float | None = None
    is_down: bool = False
    is_drained: bool = False
    is_paused: bool = False

    @property
    def takes_jobs(self) -> bool:
        """Whether jobs may start on it."""
        return self.died is None and not (self.is_down or self.is_drained or self.is_paused)

    def state(self, jobs: Iterable[Job], num_cpus: int) -> str:
        """Return its state in Slurm's long form, such as ``idle`` or ``down*``."""
        here = [job for job in jobs if job.has_nodes and self.name in job.nodes]
        if self.is_down:
            return "down*" if self.died is not None else "down"
        if self.is_drained:
            return "draining" if here else "drained"
        if not here:
            return "idle"
        if all(job.ending is not None for job in here):
            return "completing"
        used = sum(num_cpus if j.request.exclusive else j.request.cpus for j in here)
        return "allocated" if used >= num_cpus else "mixed"


class JobTable:
    """All remembered jobs of a cluster, in the order of submission.

    Elements of an array wait in one record. Each gets a number of its own when it leaves the
    record; the last one has the array's.
    """

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self._numbers = itertools.count(1)
        self._orders = itertools.count()

    def add_jobs(
        self, request: JobRequest, array: str | None, now: float, max_array_size: int
    ) -> tuple[int, list[Job]]:
        """Add a job, or all elements of an array; return its id, and them.

        Raises Refusal if the indices are malformed or too large.
        """
        if array is None:
            job = self._new(request, now)
            job.number = next(self._numbers)
            self.jobs.append(job)
            return job.number, [job]
        indices, limit = _indices(array, max_array_size)
        number = next(self._numbers)
        elements = [self._new(request, now) for _ in indices]
        for job, index in zip(elements, indices, strict=True):
            job.array, job.index, job.limit = number, index, limit
            job.num_in_array, job.bounds = len(indices), (indices[0], indices[-1])
        self.jobs += elements
        return number, elements

    def _new(self, request: JobRequest, now: float) -> Job:
        return Job(
            request, now, next(self._orders),
            held=request.hold, begin=request.begin, may_requeue=request.requeue,
            excluded=frozenset(request.exclude), limit_s=request.limit_s,
        )  # fmt: skip

    def assign_number(self, job: Job) -> None:
        """Assign a number to a job that leaves its array's record."""
        if job.number is None:
            in_record = sum(j.array == job.array and j.number is None for j in self.jobs)
            job.number = job.array if in_record == 1 else next(self._numbers)

    def find_jobs(self, name: str) -> list[Job]:
        """Return the jobs named ``12``, ``12_3`` or ``12_[1-3]``; empty if there are none.

        Raises Refusal if the text is not the name of a job.
        """
        m = _NAME.fullmatch(name)
        if m is None:
            raise Refusal(f"Invalid job id {name}")
        number = int(m[1])
        whole = [job for job in self.jobs if job.array == number]
        if m[2] is None and m[3] is None:
            return whole or [job for job in self.jobs if job.number == number]
        wanted = {int(m[2])} if m[2] else set(_indices(m[3], 1 << 30)[0])
        return [job for job in whole if job.index in wanted]

    def remove_ended(self, before: float) -> None:
        """Remove jobs that ended before a moment."""
        self.jobs = [j for j in self.jobs if not (j.is_over and (j.ended or 0.0) < before)]


def _indices(text: str, max_size: int) -> tuple[list[int], int | None]:
    try:
        indices, limit = nodelist.expand_indices(text)
    except ValueError as e:
        raise Refusal(f"Invalid job array specification: {e}") from e
    if max(indices) >= max_size:
        raise Refusal("Batch job submission failed: Invalid job array specification")
    return sorted(set(indices)), limit


class TaskProcess:
    """The processes of one task: its stepd and all descendants."""

    def __init__(self, popen: subprocess.Popen[bytes], lifeline: int) -> None:
        self._popen, self._lifeline = popen, lifeline
        self.pid = popen.pid

    def poll(self) -> int | None:
        """Return its exit code, or minus the signal that ended it; None while it runs."""
        code = self._popen.poll()
        if code is not None:
            self._close()
        return code

    def signal(self, number: int, *, only_first: bool = False) -> None:
        """Send a signal to every process of the task, or only to the first."""
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.pid).children(recursive=not only_first):
                if _lives(process):
                    with contextlib.suppress(psutil.Error):
                        process.send_signal(number)

    def kill(self) -> None:
        """Kill all processes of the task, and wait for their end."""
        self.signal(signal.SIGKILL)
        self._close()  # the stepd kills what was forked meanwhile, and exits
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_KILL_S)

    def _close(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str,
    output: int | IO[bytes],
    error: int | IO[bytes],
) -> TaskProcess:
    """Start a task under a stepd of its own.

    Raises OSError if the directory is missing, or the machine has no process left.
    """
    theirs, ours = os.pipe()
    argv = [sys.executable, "-I", "-S", str(_STEPD), str(theirs), *command]
    try:
        popen = subprocess.Popen(
            argv, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=error,
            pass_fds=(theirs,), start_new_session=True,
        )  # fmt: skip
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    return TaskProcess(popen, ours)


def kill_descendants() -> None:
    """Kill all descendants of this process; the controller calls it at its end."""
    _kill_all(lambda: psutil.Process().children(recursive=True))


def kill_marked(folder: Path) -> None:
    """Kill all processes with a cluster's mark in their environment; needs no controller."""

    def is_marked(process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARKER) == str(folder)
        except (psutil.Error, OSError):
            return False

    _kill_all(lambda: [p for p in psutil.process_iter() if is_marked(p)])


def _kill_all(find: Callable[[], Iterable[psutil.Process]]) -> None:
    """Kill the processes that are found, until none lives, or for `_KILL_S`."""
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline and (found := [p for p in find() if _lives(p)]):
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        time.sleep(0.005)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
