"""launcher=local: the same plan as processes on this machine, with a small scheduler of their own.

Each array task is one node: a process in a session of its own, with the SLURM_* variables that it
would have in Slurm, named ``local-<slot>``. At most ``max_agents`` run at a time, started in the
order of the array; a task whose run has ended is not started any more. Agents and commands see the
tasks, and ask for something, by the files of `hpc_elastic.slurm.local_queue`.

A task goes back to the queue, and starts again as another attempt,

- when it is asked for: by its own agent, which leaves its node because of a notice, or by the
  leader of the run, for a task that was lost (`slurm.exit_action` has the rules);
- when a signal has ended its agent (kill -9, or the kernel, which was out of memory), as a task
  whose node died. After ``_MOST_SHORT_LIVES`` such ends in a row, each soon after the start, it
  has failed.

It starts when its time has come (`LocalQueue.postpone`), nothing of its last attempt runs any more,
a place is free, and the run does not avoid its node.

A thread keeps the queue, so that a free place is filled however the launcher is busy. The
processes end with the launcher, if that is given the time: a kill -9 of it leaves them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from hpc_elastic import _util
from hpc_elastic._util import counted
from hpc_elastic.config.schema import LocalSettings, Nproc
from hpc_elastic.errors import ConfigError, SubmissionError
from hpc_elastic.launcher import detach
from hpc_elastic.launcher.batch_script import TASK_MODULE
from hpc_elastic.launcher.plan import Plan, PlannedRun
from hpc_elastic.launcher.prepare import Prepared, python_path
from hpc_elastic.run.directory import RunDir, Submission, task_name
from hpc_elastic.shared_files import read_json, write_atomic
from hpc_elastic.slurm import requeue as requeue_module
from hpc_elastic.slurm.environment import GPUS, as_array_task, listed_gpus, outside
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.local_queue import LocalEntry, node_name, start_ticks
from hpc_elastic.slurm.requeue import RETURN_DELAY_S

_log = logging.getLogger(__name__)

_TICK_S = 0.05
_LOOK_S = 1.0
_MARGIN_S = 5.0
"""What an agent gets to finish by itself, and beyond its workers' stop time-out to be ended."""
_SHORT_LIFE_S = 20.0
_MOST_SHORT_LIVES = 3


@dataclass
class LocalTask:
    """One array task in the queue of this machine."""

    name: str
    job_id: int
    index: int
    array_file: Path
    run: RunDir
    cpus: int
    slot: int = 0
    max_requeues: int | None = None
    gpus: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    started: int | None = None
    exit_code: int | None = None
    """Of the last attempt, once nothing of it runs any more."""
    skipped: bool = False
    restarts: int = 0
    begin: float | None = None
    """Monotonic seconds before which it does not start; None: it may."""
    is_leaving: bool = False
    """Whether its process is to end: it is cancelled, or goes back to the queue."""
    comes_back: bool = False
    """Whether it goes back to the queue when its process has ended."""
    kill_at: float = math.inf
    is_excluded: bool = False
    began: float = 0.0
    short_lives: int = 0

    @property
    def node(self) -> str:
        """Return the name of its node."""
        return node_name(self.slot)

    @property
    def running(self) -> bool:
        """Return whether its process has started, and something of it may run."""
        return self.process is not None and self.exit_code is None

    @property
    def pending(self) -> bool:
        """Return whether it may still start."""
        return self.process is None and not self.skipped

    def may_start(self, now: float) -> bool:
        """Return whether it waits for nothing but a place."""
        return self.pending and not self.is_excluded and (self.begin is None or now >= self.begin)

    def describe(self) -> LocalEntry:
        """Return its entry in the table."""
        process, launcher = self.process, os.getpid()
        state = "PENDING" if self.pending else "RUNNING" if self.running else "ENDED"
        if process and self.running and (self.is_leaving or process.returncode is not None):
            state = "COMPLETING"
        return LocalEntry(
            state,
            pid=process.pid if process else None,
            started=self.started,
            exit_code=self.exit_code,
            host=socket.gethostname(),
            launcher=launcher,
            launcher_started=_launched(launcher),
            node=self.node,
            restarts=self.restarts,
            begin=self.begin if self.pending else None,
            reason=EXCLUDED if self.is_excluded else "",
        )

    # ---- its way back to the queue --------------------------------------------------------

    def leave(self, now: float, within_s: float) -> None:
        """Let its process end by itself, for so long."""
        self.is_leaving, self.kill_at = True, now + within_s

    def requeue(self, now: float, stop_after_s: float) -> None:
        """Send it back to the queue: when its process has ended, which is killed at last."""
        self.restarts += 1
        self.begin = None
        if self.running:
            self.comes_back = True
            self.leave(now, stop_after_s)
        else:
            self._wait()

    def ended(self, code: int, now: float) -> None:
        """Its process has ended, with all that it has left behind."""
        killed = code < 0 and not self.is_leaving
        short = killed and now - self.began < _SHORT_LIFE_S
        self.short_lives = self.short_lives + 1 if short else 0
        may = self.max_requeues is None or self.restarts < self.max_requeues
        if killed and may and self.short_lives < _MOST_SHORT_LIVES:
            self.restarts += 1
            self.begin = now + RETURN_DELAY_S
            self.comes_back = True
        if self.comes_back:
            self._wait()
        else:
            self.exit_code = code

    def _wait(self) -> None:
        self.process, self.started, self.exit_code, self.kill_at = None, None, None, math.inf
        self.is_leaving = self.comes_back = False


EXCLUDED = "Excluded"
"""Why a task waits whose node the run avoids."""


@cache
def _launched(launcher: int) -> int | None:
    return start_ticks(launcher)


def task_command(array_file: Path) -> list[str]:
    """Return the command line of a task; the same as in a batch script."""
    return [sys.executable, "-u", "-m", TASK_MODULE, str(array_file)]


Command = Callable[[Path], Sequence[str]]


def next_to_start(
    waiting: Iterable[LocalTask], *, num_running: int, max_agents: int
) -> list[LocalTask]:
    """Return the tasks to start now, of those that wait for a place, in their order (pure)."""
    return list(waiting)[: max(0, max_agents - num_running)]


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
        """Return all tasks, as everybody else sees them."""
        return {task.name: task.describe().to_state(task.name) for task in self._tasks}

    def cancel(self) -> None:
        """End everything: SIGTERM, a bounded wait, SIGKILL."""
        self._stop_queue()
        for task in self._tasks:
            task.skipped = task.skipped or task.process is None
            task.is_leaving, task.comes_back = True, False
        self._write()  # an agent that is told to end looks what that means
        end_processes([p for task in self._tasks if (p := _process(task))], self._stop_after_s)
        deadline = time.monotonic() + _MARGIN_S
        while any(task.running for task in self._tasks) and time.monotonic() < deadline:
            self._settle()
        self._write()

    def leave(self) -> str:
        """End all processes: without the launcher nothing would start what still waits."""
        self.cancel()
        dirs = list(dict.fromkeys(str(task.run.path) for task in self._tasks))
        which = shlex.quote(dirs[0]) if len(dirs) == 1 else "RUN"
        remedy = f"to let one go on from its last checkpoint: hpc-elastic resume {which}"
        return f"launcher=local: the runs were ended; {remedy}"

    def close(self) -> None:
        """Let the agents of runs that have ended finish; end what does not."""
        self._stop_queue()
        wait_all([p for task in self._tasks if (p := _process(task))], _MARGIN_S)
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
        self._settle()
        taken = self._carry_out_requests()
        num_running = sum(task.running for task in self._tasks)
        try:
            self._look_at_runs(is_full=num_running >= self._max_agents)
            now = time.monotonic()
            waiting = (task for task in self._tasks if task.may_start(now))
            limit = self._max_agents
            for task in next_to_start(waiting, num_running=num_running, max_agents=limit):
                task.process = self._spawn(task)
                task.started, task.began = start_ticks(task.process.pid), now
        finally:
            self._write()
            for file in taken:
                file.unlink(missing_ok=True)

    def _settle(self) -> None:
        """See which attempts have ended, and end what they have left behind."""
        now = time.monotonic()
        for task in self._tasks:
            process = _process(task)
            if process is None:
                continue
            if now >= task.kill_at:
                kill_family(process.pid)
            if (code := process.poll()) is None:
                continue
            if code != 0 and kill_leftovers(_marks(task)):
                continue  # they are looked at again
            task.ended(code, now)

    def _carry_out_requests(self) -> list[Path]:
        """Do what agents and commands ask for; return the requests that are done."""
        try:
            files = sorted(Submission(self._submission).local_requests.iterdir())
        except FileNotFoundError:
            return []
        mine, now = {task.name: task for task in self._tasks}, time.monotonic()
        done = []
        for file in files:
            request = None if file.name.startswith(".") else _read_request(file)
            task = None if request is None else mine.get(str(request.get("task")))
            if task is None or request is None:
                continue  # another launcher's, or half written
            self._carry_out(request, task, now)
            done.append(file)
        return done

    def _carry_out(self, request: Mapping[str, Any], task: LocalTask, now: float) -> None:
        match request:
            case {"do": "requeue", "restarts": task.restarts} if not (task.pending or task.skipped):
                task.requeue(now, self._stop_after_s)
            case {"do": "postpone", "begin": int() | float() as begin}:
                if task.pending or task.comes_back:
                    task.begin = begin

    def _look_at_runs(self, *, is_full: bool) -> None:
        """Start no task of a run that has ended, nor on a node that its run avoids.

        While no place is free, that can wait a while.
        """
        if is_full and time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK_S
        over = {run: run.is_over for run in {task.run for task in self._tasks if task.pending}}
        avoided = {
            run: requeue_module.excluded(run) for run, is_over in over.items() if not is_over
        }
        for task in self._tasks:
            if task.pending:
                task.skipped = over[task.run]
                task.is_excluded = task.node in avoided.get(task.run, {})

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


def _process(task: LocalTask) -> subprocess.Popen[bytes] | None:
    """Return the process of an attempt that is not over."""
    return task.process if task.running else None


def _marks(task: LocalTask) -> dict[str, str]:
    """Return the variables by which the processes of a task are known, whoever started them."""
    names = "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"
    made_up = as_array_task(task.job_id, task.index, node_name=task.node, cpus=task.cpus)
    return {name: made_up[name] for name in names}


def _read_request(file: Path) -> dict[str, Any] | None:
    """Return what is asked for; None if it was withdrawn, or is none."""
    try:
        return read_json(file)
    except (OSError, ValueError):
        return None


def task_environment(environ: Mapping[str, str], task: LocalTask) -> dict[str, str]:
    """Return the environment of a task (pure).

    The variables of a Slurm job around the launcher are hidden: this is another, made-up job.
    gloo resolves the host's name to find its interface, which fails on laptops and in containers;
    all processes are on this machine, so the loopback interface is right.
    """
    made_up = as_array_task(
        task.job_id,
        task.index,
        node_name=task.node,
        cpus=task.cpus,
        restart_count=task.restarts,
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
    require_enough(plan.runs, machine_gpus(os.environ))


def _queue(plan: Plan) -> list[LocalTask]:
    """Return the tasks of all arrays in order, under job ids that no other launch has."""
    first_id = time.time_ns() // 1_000_000
    devices = machine_gpus(os.environ)
    return [
        LocalTask(
            name=task_name(str(first_id + array.number), index),
            job_id=first_id + array.number,
            index=index,
            array_file=Submission(plan.submission).array(array.number).tasks,
            run=RunDir(plan.runs[task.run].dir),
            cpus=getattr(array.launcher, "cpus_per_node", 1) or 1,
            slot=task.slot,
            max_requeues=plan.runs[task.run].settings.launcher.max_requeues,
            gpus=variables(
                devices,
                plan.runs[task.run].settings.nproc_per_node,
                slot=task.slot,
                num_nodes=plan.runs[task.run].settings.nodes.max,
            ),
        )
        for array in plan.arrays
        for index, task in enumerate(array.tasks)
    ]


# ---- Which GPUs of this machine each node of a local run gets
# Local nodes are processes on one machine; left alone, each would take GPU 0. So, as long as
# there are GPUs at all, the nodes of a run get equal shares of them, in order, through
# CUDA_VISIBLE_DEVICES:
#
#     4 GPUs, nodes=1:2     node 0 gets 0,1 and node 1 gets 2,3
#     8 GPUs, nodes=3       two each; the last two are not used
#     1 GPU, nodes=1:2      refused: two processes of a group can not share a GPU in NCCL
#     nproc_per_node=cpu    no node gets any: the workers are to run on CPUs
#
# Different runs of a sweep share the machine's GPUs. The machine's GPUs are those of
# CUDA_VISIBLE_DEVICES if that is set, else all. torch is not asked: it takes seconds to import.


_PROC = Path("/proc/driver/nvidia/gpus")
_TIMEOUT_S = 20.0


def machine_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that a process with this environment may use, as CUDA names them."""
    given = environ.get(GPUS)
    return [str(n) for n in range(_count())] if given is None else listed_gpus(given)


def share(gpus: Sequence[str], slot: int, num_nodes: int) -> list[str]:
    """Return the GPUs of one node: consecutive ones, as many as every other node gets (pure).

    Args:
        gpus: The machine's.
        slot: Which node, from 0.
        num_nodes: The most nodes that the run may have.
    """
    size = len(gpus) // num_nodes
    return list(gpus[slot * size : (slot + 1) * size])


def variables(gpus: Sequence[str], nproc: Nproc, *, slot: int, num_nodes: int) -> dict[str, str]:
    """Return what a node finds in its environment of GPUs; nothing where there are none (pure)."""
    if not gpus:
        return {}
    return {GPUS: "" if nproc == "cpu" else ",".join(share(gpus, slot, num_nodes))}


def require_enough(runs: Iterable[PlannedRun], gpus: Sequence[str]) -> None:
    """Refuse a run with more nodes than there are GPUs, if it would use them (pure).

    Raises:
        ConfigError: a run has such nodes; names both numbers.
    """
    for run in runs:
        nodes = run.settings.nodes
        if gpus and nodes.max > len(gpus) and run.settings.nproc_per_node != "cpu":
            value = nodes.max if nodes.min == nodes.max else f"{nodes.min}:{nodes.max}"
            most = counted(len(gpus), "node")
            remedy = (
                f"launcher=local gives each of the {nodes.max} nodes GPUs of its own, and this "
                f"machine has {counted(len(gpus), 'GPU')}; ask for {most} at most, or set "
                "nproc_per_node=cpu to use none"
            )
            raise ConfigError("nodes", value, remedy)


@cache
def _count() -> int:
    try:
        done = _util.run(["nvidia-smi", "-L"], timeout_s=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return len(list(_PROC.iterdir())) if _PROC.is_dir() else 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


# ---- Ending processes that this process started: politely, then surely


def end_processes(processes: Sequence[subprocess.Popen[bytes]], stop_after_s: float) -> None:
    """End processes and all their descendants.

    SIGTERM first, so that agents can stop their workers; after ``stop_after_s`` seconds, or at
    once on a second Ctrl-C, SIGKILL for whatever is left.
    """
    if not processes:
        return
    for process in processes:
        process.terminate()
    family = [member for process in processes for member in _family(process.pid)]
    with contextlib.suppress(KeyboardInterrupt):
        wait_all(processes, stop_after_s)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # psutil knows a pid that was reused
            member.kill()
    for process in processes:
        process.wait()


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Let one process of this machine at a time change a file that several change.

    Raises:
        OSError: the lock can not be made.
    """
    with file.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def wait_all(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Wait for processes to end, at most so long over all."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def kill_family(pid: int) -> None:
    """Kill a process and all its descendants at once."""
    for member in _family(pid):
        with contextlib.suppress(psutil.Error):
            member.kill()


def kill_leftovers(marks: Mapping[str, str]) -> int:
    """Kill the processes that were started with these variables; return how many there were.

    For what an agent that was killed has left behind: it is nobody's descendant any more.

    Args:
        marks: Variables with their values; all have to be there.
    """
    wanted = {f"{name}={value}".encode() for name, value in marks.items()}
    num = 0
    for process in psutil.process_iter():
        try:
            environ = Path(f"/proc/{process.pid}/environ").read_bytes()
            if wanted <= set(environ.split(b"\0")) and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                num += 1
        except (OSError, psutil.Error):  # another user's, or gone
            continue
    return num


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@contextlib.contextmanager
def terminated_as_interrupt(*others: signal.Signals) -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt, so that one path ends what was started.

    Without it SIGTERM ends Python at once, and its child processes would go on alone.

    Args:
        others: What does the same, such as the SIGHUP of a lost terminal.
    """

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # whoever has it decides
        yield
        return
    before = {n: signal.signal(n, interrupt) for n in (signal.SIGTERM, *others)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
