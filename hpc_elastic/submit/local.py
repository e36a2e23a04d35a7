"""launcher=local: the same plan as processes on this machine, with a queue of their own.

Each array task is one process in a session of its own, with the SLURM_* variables that it would
have in Slurm. At most ``max_agents`` run at a time, started in the order of the array; a task
whose run has ended is not started any more. What the agents would ask squeue for, they read from
``local-tasks.json`` (`hpc_elastic.slurm.local_tasks`).

A thread keeps the queue, so that a free place is filled however the launcher is busy. The
processes end with the launcher, if that is given the time: a kill -9 of it leaves them.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from hpc_elastic.config import LocalSettings
from hpc_elastic.errors import ConfigError, SubmissionError
from hpc_elastic.files import read_json, write_atomic
from hpc_elastic.rundir import RunDir, Submission, task_name
from hpc_elastic.slurm.environment import as_array_task, outside
from hpc_elastic.slurm.local_tasks import LocalEntry, started
from hpc_elastic.slurm.states import TaskState
from hpc_elastic.submit import detach, gpus
from hpc_elastic.submit.plan import Plan
from hpc_elastic.submit.prepare import Prepared, python_path
from hpc_elastic.submit.processes import end_processes, locked, wait_all
from hpc_elastic.submit.sbatch import TASK_MODULE

_log = logging.getLogger(__name__)

_TICK_S = 0.05
_LOOK_S = 1.0
_MARGIN_S = 5.0
"""What an agent gets to finish by itself, and beyond its workers' stop time-out to be ended."""


@dataclass
class LocalTask:
    """One array task in the queue of this machine."""

    name: str
    job_id: int
    index: int
    array_file: Path
    run: RunDir
    cpus: int
    gpus: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    started: int | None = None
    skipped: bool = False

    @property
    def running(self) -> bool:
        """Return whether its process has started and not ended."""
        return self.process is not None and self.process.poll() is None

    @property
    def pending(self) -> bool:
        """Return whether it may still start."""
        return self.process is None and not self.skipped

    @property
    def exit_code(self) -> int | None:
        """Return the exit code of its process, once it has ended."""
        return None if self.process is None else self.process.poll()

    def describe(self) -> LocalEntry:
        """Return its entry in the table."""
        state = "PENDING" if self.pending else "RUNNING" if self.running else "ENDED"
        pid = self.process.pid if self.process else None
        host, launcher = socket.gethostname(), os.getpid()
        mine = host, launcher, _launched(launcher)
        return LocalEntry(state, pid, self.started, self.exit_code, *mine)

    def seen_by_slurm(self) -> TaskState:
        """Return the state that Slurm would give it."""
        entry = self.describe()
        if entry.state == "RUNNING":  # a launcher need not look for what it has started itself
            return TaskState(self.name, "RUNNING", node=entry.host)
        return entry.seen_as(self.name)


@cache
def _launched(launcher: int) -> int | None:
    return started(launcher)


def task_command(array_file: Path) -> list[str]:
    """Return the command line of a task; the same as in a batch script."""
    return [sys.executable, "-u", "-m", TASK_MODULE, str(array_file)]


Command = Callable[[Path], Sequence[str]]


def next_to_start(
    pending: Iterable[LocalTask], *, num_running: int, max_agents: int
) -> list[LocalTask]:
    """Return the tasks to start now, in the order of the queue (pure)."""
    return list(pending)[: max(0, max_agents - num_running)]


def agent_limit(plan: Plan, num_cpus: int) -> int:
    """Return how many agents may run at a time over all runs (pure)."""
    limits = [r.settings.launcher for r in plan.runs]
    given = [s.max_agents for s in limits if isinstance(s, LocalSettings) and s.max_agents]
    largest = max(run.settings.nodes.max for run in plan.runs)
    return min(given) if given else max(2 * num_cpus, largest)


class LocalHandle:
    """The processes of one submission and the thread that starts them.

    Args:
        tasks: All tasks, in the order of the queue.
        submission: The sweep's ``.hpc_elastic``.
        max_agents: At most so many processes at a time.
        stop_after_s: Between SIGTERM and SIGKILL when they are ended.
        command: Makes the command line of a task.
    """

    def __init__(
        self,
        tasks: Sequence[LocalTask],
        submission: Path,
        *,
        max_agents: int,
        stop_after_s: float,
        command: Command,
    ) -> None:
        self._tasks = list(tasks)
        self._submission = submission
        self._max_agents = max_agents
        self._stop_after_s = stop_after_s
        self._command = command
        self._written: dict[str, LocalEntry] = {}
        self._look_at = 0.0
        self._unwritten = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_queue, name="local-queue", daemon=True)

    @property
    def job_ids(self) -> Sequence[str]:
        """Return the made-up job id of each array."""
        return list(dict.fromkeys(str(task.job_id) for task in self._tasks))

    def start(self) -> None:
        """Write the queue down and start its first tasks.

        Raises:
            OSError: one could not be started; those that were are ended.
        """
        try:
            self._tick()
            self._thread.start()
        except BaseException:
            self.cancel()
            raise

    def tasks(self) -> Mapping[str, TaskState]:
        """Return all tasks in Slurm's words."""
        return {task.name: task.seen_by_slurm() for task in self._tasks}

    def cancel(self) -> None:
        """End everything: SIGTERM, a bounded wait, SIGKILL."""
        self._stop_queue()
        for task in self._tasks:
            task.skipped = task.skipped or task.process is None
        running = [task.process for task in self._tasks if task.process and task.running]
        end_processes(running, self._stop_after_s)
        self._write()

    def leave(self) -> str:
        """End all processes: without the launcher nothing would start what still waits."""
        self.cancel()
        return "launcher=local: the runs were ended; their directories are complete up to here."

    def close(self) -> None:
        """Let the agents of runs that have ended finish; end what does not."""
        self._stop_queue()
        wait_all([task.process for task in self._tasks if task.process], _MARGIN_S)
        self.cancel()

    def _stop_queue(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _keep_queue(self) -> None:
        failing = False
        while not self._stop.wait(_TICK_S):
            try:
                self._tick()
                failing = False
            except OSError as e:
                if not failing:
                    _log.warning("tasks wait, for none can be started; tried again: %s", e)
                failing = True

    def _tick(self) -> None:
        # asked before is_over: an agent that has ended has left its result by then
        num_running = sum(task.running for task in self._tasks)
        try:
            self._skip_ended(is_full=num_running >= self._max_agents)
            pending = (task for task in self._tasks if task.pending)
            limit = self._max_agents
            for task in next_to_start(pending, num_running=num_running, max_agents=limit):
                task.process = self._spawn(task)
                task.started = started(task.process.pid)
        finally:
            self._write()

    def _skip_ended(self, *, is_full: bool) -> None:
        """Start no task of a run that has ended; while no place is free, that can wait a while."""
        if is_full and time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK_S
        over = {run: run.is_over for run in {task.run for task in self._tasks if task.pending}}
        for task in self._tasks:
            task.skipped = task.skipped or (task.pending and over[task.run])

    def _spawn(self, task: LocalTask) -> subprocess.Popen[bytes]:
        log = Submission(self._submission).logs / f"{task.name}.log"
        with log.open("ab") as output:
            return subprocess.Popen(
                list(self._command(task.array_file)),
                env=task_environment(os.environ, task),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _write(self) -> None:
        now = {task.name: task.describe() for task in self._tasks}
        if now == self._written:
            return
        path = Submission(self._submission).local_tasks
        ours = {name: asdict(entry) for name, entry in now.items()}
        try:
            with locked(path):
                table = {**(read_json(path) or {}), **ours}
                write_atomic(path, json.dumps(table, indent=1) + "\n")
        except OSError as e:  # a full disk is the runs' to report; the queue goes on
            if not self._unwritten:
                _log.warning("%s: not written: %s", path, e)
            self._unwritten = True
            return
        self._written, self._unwritten = now, False


def task_environment(environ: Mapping[str, str], task: LocalTask) -> dict[str, str]:
    """Return the environment of a task (pure).

    The variables of a Slurm job around the launcher are hidden: this is another, made-up job.
    gloo resolves the host's name to find its interface, which fails on laptops and in containers;
    all processes are on this machine, so the loopback interface is right.
    """
    made_up = as_array_task(
        task.job_id,
        task.index,
        node_name=socket.gethostname(),
        cpus=task.cpus,
        restart_count=0,
    )
    path = python_path(environ)
    found = {"PYTHONPATH": os.pathsep.join(path)} if path else {}
    return {"GLOO_SOCKET_IFNAME": "lo", **outside(environ), **found, **task.gpus, **made_up}


def submit(prepared: Prepared) -> LocalHandle:
    """Start the plan on this machine.

    Args:
        prepared: A plan whose files are written.

    Raises:
        ConfigError: see `require_possible`.
        SubmissionError: a process could not be started; none is left.
    """
    plan = prepared.plan
    require_possible(plan)
    stop_after_s = max(run.settings.launcher.agent.stop_timeout_s for run in plan.runs)
    handle = LocalHandle(
        _queue(plan),
        plan.submission,
        max_agents=agent_limit(plan, os.cpu_count() or 1),
        stop_after_s=stop_after_s + _MARGIN_S,
        command=task_command,
    )
    for array, job_id in zip(plan.arrays, handle.job_ids, strict=True):
        Submission(plan.submission).array(array.number).submitted_as(job_id)
    try:
        handle.start()
    except OSError as e:
        remedy = "what was started by then was ended"
        raise SubmissionError(f"a task can not be started on this machine: {e}; {remedy}") from e
    return handle


def require_possible(plan: Plan) -> None:
    """Refuse what this machine can not run; asked before anything is written.

    Raises:
        ConfigError: ``launcher.wait=false``, for nothing would keep the queue; or a run has more
            nodes than the machine has GPUs.
    """
    if not plan.launcher.wait and detach.report_file() is None:
        remedy = "launcher=local runs as long as the launcher waits: leave the setting off, or use "
        remedy += "`hpc-elastic submit`, whose launcher goes on behind the terminal"
        raise ConfigError("launcher.wait", False, remedy)
    gpus.require_enough(plan.runs, gpus.machine_gpus(os.environ))


def _queue(plan: Plan) -> list[LocalTask]:
    """Return the tasks of all arrays in order, under job ids that no other launch has."""
    first_id = time.time_ns() // 1_000_000
    devices = gpus.machine_gpus(os.environ)
    return [
        LocalTask(
            name=task_name(str(first_id + array.number), index),
            job_id=first_id + array.number,
            index=index,
            array_file=Submission(plan.submission).array(array.number).tasks,
            run=RunDir(plan.runs[task.run].dir),
            cpus=getattr(array.launcher, "cpus_per_node", 1) or 1,
            gpus=gpus.variables(
                devices,
                plan.runs[task.run].settings.nproc_per_node,
                slot=task.slot,
                num_nodes=plan.runs[task.run].settings.nodes.max,
            ),
        )
        for array in plan.arrays
        for index, task in enumerate(array.tasks)
    ]
