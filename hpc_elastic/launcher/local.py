"""launcher=local: the same plan as processes on this machine, with a small scheduler of their own.

Each array task is one node: a process in a session of its own, with the SLURM_* variables of a task
in Slurm, named ``local-<slot>``. At most ``max_agents`` run at a time, started in the order of the
array; a task whose run has ended is not started. Agents and commands see the tasks, and send
requests, through the files of `hpc_elastic.slurm.local_queue`.

A task goes back to the queue, and starts again as another attempt,

- on request: of its own agent, which leaves its node because of a preemption notice, or of the
  leader of the run, for a task that was lost (`slurm.exit_action` has the rules);
- when a signal has ended its agent (kill -9, or the kernel, out of memory), like a task whose node
  died. After ``_MOST_SHORT_LIVES`` such ends in a row, each soon after the start, it has failed.

It starts when its begin time has come (`LocalQueue.postpone`), nothing of its last attempt runs any
more, a place is free, and the run does not exclude its node.

A thread runs the queue, so that a free place is filled even while the launcher is busy. The
processes end with the launcher if it has time for that: a kill -9 of the launcher leaves them.

The nodes of a run get equal shares of the machine's GPUs, in order, through CUDA_VISIBLE_DEVICES;
left alone, each would take GPU 0:

    4 GPUs, nodes=1:2     node 0 gets 0,1 and node 1 gets 2,3
    8 GPUs, nodes=3       two each; the last two are not used
    1 GPU, nodes=1:2      refused: NCCL cannot share a GPU between two processes of a group
    nproc_per_node=cpu    no node gets any

Different runs of a sweep share the GPUs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import secrets
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import psutil

from hpc_elastic._util import counted
from hpc_elastic.config.schema import LocalSettings, Nproc
from hpc_elastic.errors import ConfigError, RunDirectoryError, SubmissionError
from hpc_elastic.gpus import count_devices, driver_gpus
from hpc_elastic.launcher import detach
from hpc_elastic.launcher.batch_script import TASK_MODULE, python_path
from hpc_elastic.launcher.plan import Plan, RunRequest
from hpc_elastic.run import task_name
from hpc_elastic.run.directory import RunDir, Submission
from hpc_elastic.run.registry import mark_cancelled
from hpc_elastic.shared_files import read_json, write_atomic
from hpc_elastic.slurm import quarantine
from hpc_elastic.slurm.environment import GPUS, as_array_task, listed_gpus, outside
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.local_queue import LocalEntry, node_name, start_ticks
from hpc_elastic.slurm.requeue import RETURN_DELAY_S

_log = logging.getLogger(__name__)

EXCLUDED = "Excluded"
"""Reason of a pending task whose node the run excludes."""
_TICK_S = 0.05
_CHECK_RUNS_S = 1.0
_MARGIN_S = 5.0
"""Seconds that an agent has to finish by itself, and, beyond its workers' stop time-out, to end."""
_SHORT_LIFE_S = 20.0
_MOST_SHORT_LIVES = 3


def submit(plan: Plan) -> LocalJobs:
    """Start a plan, whose files are written; SubmissionError once what was started has ended."""
    agents = [run.settings.launcher.agent for run in plan.runs]
    jobs = LocalJobs(
        queue_of(plan),
        plan.submission,
        max_agents=agent_limit(plan, os.cpu_count() or 1),
        stop_after_s=max(agent.stop_timeout_s for agent in agents) + _MARGIN_S,
        exit_after_s=max(agent.exit_timeout_s for agent in agents) + _MARGIN_S,
        command=task_command,
    )
    for array, job_id in zip(plan.arrays, jobs.job_ids, strict=True):
        Submission(plan.submission).array(array.number).submitted_as(job_id)
    try:
        jobs.start()
    except OSError as e:
        remedy = "the processes that had been started were ended"
        raise SubmissionError(f"a task cannot be started on this machine: {e}; {remedy}") from e
    return jobs


def require_possible(plan: Plan) -> None:
    """Refuse a plan that this machine cannot run, before anything is written."""
    if not plan.launcher.wait and detach.report_file() is None:
        remedy = "launcher=local runs as long as the launcher waits: leave the setting off. In the "
        remedy += "background: `hpc-elastic run --detach`, or `submit` of a script with @hydra.main"
        raise ConfigError("launcher.wait", False, remedy)
    require_gpus(plan.runs, machine_gpus(os.environ))


def agent_limit(plan: Plan, num_cpus: int) -> int:
    """Return how many agents may run at a time over all runs (pure)."""
    launchers = [run.settings.launcher for run in plan.runs]
    given = [s.max_agents for s in launchers if isinstance(s, LocalSettings) and s.max_agents]
    largest = max(run.settings.nodes.max for run in plan.runs)
    return min(given) if given else max(2 * num_cpus, largest)


def queue_of(plan: Plan) -> list[LocalTask]:
    """Return the tasks of all arrays in order, with job ids that no other launch has.

    The ids find a task's leftovers to kill, so they are drawn at random: two launches may begin at
    the same time, also in containers that do not see each other.
    """
    job_id = 10**12 + secrets.randbelow(9 * 10**12)
    gpus = machine_gpus(os.environ)
    tasks: list[LocalTask] = []
    for array in plan.arrays:
        file = Submission(plan.submission).array(array.number).tasks
        cpus = getattr(array.launcher, "cpus_per_node", 1) or 1
        for index, (number, slot) in enumerate(array.tasks):
            run, own = RunDir(plan.runs[number].dir), plan.runs[number].settings
            variables = gpu_variables(gpus, own.nproc_per_node, slot=slot, num_nodes=own.nodes.max)
            task = LocalTask(
                job_id, index, array_file=file, run=run, cpus=cpus, slot=slot,
                max_requeues=own.launcher.max_requeues, gpus=variables,
            )  # fmt: skip
            tasks.append(task)
        job_id += 1 + len(array.tasks)
    return tasks


def task_command(array_file: Path) -> list[str]:
    """Return the command line of a task; the same as in a batch script."""
    return [sys.executable, "-uP", "-m", TASK_MODULE, str(array_file)]


# ---- the queue


@dataclass
class LocalTask:
    """One array task in the queue of this machine."""

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
    """Start time of the process, see `local_queue.start_ticks`."""
    started_at: float = 0.0
    """The same in monotonic seconds."""
    exit_code: int | None = None
    """That of the last attempt, once nothing of it runs any more."""
    skipped: bool = False
    """Whether it is never started."""
    restarts: int = 0
    begin: float | None = None
    """Monotonic seconds before which it does not start."""
    is_ending: bool = False
    """Whether its process is to end: it is cancelled, or goes back to the queue."""
    comes_back: bool = False
    """Whether it goes back to the queue when its process has ended."""
    kill_at: float = math.inf
    is_excluded: bool = False
    num_short_lives: int = 0

    @property
    def name(self) -> str:
        """Its name in the queue."""
        return task_name(str(self.job_id), self.index)

    @property
    def node(self) -> str:
        """Name of its node."""
        return node_name(self.slot)

    @property
    def is_running(self) -> bool:
        """Whether its process has started, and something of it may run."""
        return self.process is not None and self.exit_code is None

    @property
    def is_pending(self) -> bool:
        """Whether it may still start."""
        return self.process is None and not self.skipped

    def entry(self) -> LocalEntry:
        """Return its entry in the table."""
        process, launcher = self.process, os.getpid()
        state = "PENDING" if self.is_pending else "RUNNING" if self.is_running else "ENDED"
        if process and self.is_running and (self.is_ending or process.returncode is not None):
            state = "COMPLETING"
        return LocalEntry(
            state, pid=process.pid if process else None, started=self.started,
            exit_code=self.exit_code, host=socket.gethostname(), launcher=launcher,
            launcher_started=_launcher_started(launcher), node=self.node, restarts=self.restarts,
            begin=self.begin if self.is_pending else None,
            reason=EXCLUDED if self.is_excluded else "",
        )  # fmt: skip

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of its process (pure).

        The variables of a Slurm job around the launcher are hidden: this is another, made-up job.
        gloo resolves the host name to find its interface, which fails on laptops and in containers;
        all processes are on this machine, so the loopback interface is right.
        """
        path = python_path(environ)
        found = {"PYTHONPATH": os.pathsep.join(path)} if path else {}
        made_up = as_array_task(
            self.job_id, self.index, node_name=self.node, cpus=self.cpus,
            restart_count=self.restarts,
        )  # fmt: skip
        return {"GLOO_SOCKET_IFNAME": "lo", **outside(environ), **found, **self.gpus, **made_up}

    def requeue(self, now: float, stop_after_s: float) -> None:
        """Send it back to the queue; its process has some seconds to end, then it is killed."""
        self.restarts += 1
        self.begin = None
        if self.is_running:
            self.comes_back = self.is_ending = True
            self.kill_at = now + stop_after_s
        else:
            self._reset()

    def on_end(self, code: int, now: float) -> None:
        """Record that its process has ended, and all processes that it left behind."""
        killed = code < 0 and not self.is_ending
        is_short = killed and now - self.started_at < _SHORT_LIFE_S
        self.num_short_lives = self.num_short_lives + 1 if is_short else 0
        may_restart = self.max_requeues is None or self.restarts < self.max_requeues
        if killed and may_restart and self.num_short_lives < _MOST_SHORT_LIVES:
            self.restarts += 1
            self.begin = now + RETURN_DELAY_S
            self.comes_back = True
        if self.comes_back:
            self._reset()
        else:
            self.exit_code = code

    def _reset(self) -> None:
        self.process, self.started, self.exit_code, self.kill_at = None, None, None, math.inf
        self.is_ending = self.comes_back = False


_launcher_started = cache(start_ticks)


class LocalJobs:
    """The processes of one submission, and the thread that starts them.

    ``stop_after_s`` are between SIGTERM and SIGKILL; ``exit_after_s`` is the time that agents have
    to end once their runs have ended.
    """

    def __init__(
        self,
        tasks: Sequence[LocalTask],
        submission: Path,
        *,
        max_agents: int,
        stop_after_s: float,
        exit_after_s: float = _MARGIN_S,
        command: Callable[[Path], Sequence[str]],
    ) -> None:
        self._tasks = list(tasks)
        self._submission = Submission(submission)
        self._max_agents = max_agents
        self._stop_after_s = stop_after_s
        self._exit_after_s = exit_after_s
        self._command = command
        self._written: dict[str, LocalEntry] = {}
        self._check_runs_at = 0.0
        self._warned_unwritten = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run_queue, name="local-queue", daemon=True)

    result_job = None

    @property
    def job_ids(self) -> Sequence[str]:
        """The made-up job id of each array."""
        return list(dict.fromkeys(str(task.job_id) for task in self._tasks))

    def start(self) -> None:
        """Write the table and start tasks; if one fails, end the others and raise OSError."""
        try:
            self.run_queue_once()
            self._thread.start()
        except BaseException:
            self.cancel()
            raise

    def list_tasks(self) -> Mapping[str, TaskState]:
        """Return all tasks, as agents and commands see them."""
        return {task.name: task.entry().to_state(task.name) for task in self._tasks}

    def cancel(self) -> None:
        """End everything: SIGTERM, a bounded wait, SIGKILL."""
        self._stop_queue()
        for task in self._tasks:
            task.skipped = task.skipped or task.process is None
            task.is_ending, task.comes_back = True, False
        self.write_table()  # before SIGTERM: an agent reads there what its signal means
        end_processes(self._processes(), self._stop_after_s)
        deadline = time.monotonic() + _MARGIN_S
        while any(task.is_running for task in self._tasks) and time.monotonic() < deadline:
            self._reap_tasks()
        self.write_table()

    def release(self) -> str:
        """End all processes, and cancel runs that go on: nothing else would start pending tasks."""
        for run in {task.run for task in self._tasks}:
            with contextlib.suppress(OSError, RunDirectoryError):  # the processes end in any case
                if not run.is_over:
                    mark_cancelled(run, _log.warning)
        self.cancel()
        dirs = list(dict.fromkeys(str(task.run.path) for task in self._tasks))
        which = shlex.quote(dirs[0]) if len(dirs) == 1 else "RUN"
        remedy = f"to continue one from its last checkpoint: hpc-elastic resume {which}"
        return f"launcher=local: the runs were ended; {remedy}"

    def close(self) -> None:
        """Wait for the agents of runs that have ended; end those that do not finish."""
        self._stop_queue()
        try:
            _wait_all(self._processes(), _MARGIN_S)
            if any(process.poll() is None for process in self._processes()):
                _log.warning("the runs have ended; processes of their workers are still ending")
            _wait_all(self._processes(), self._exit_after_s - _MARGIN_S)
        finally:
            self.cancel()

    def _processes(self) -> list[subprocess.Popen[bytes]]:
        return [task.process for task in self._tasks if task.process and task.is_running]

    def _stop_queue(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run_queue(self) -> None:
        is_failing = False
        while not self._stop.wait(_TICK_S):
            try:
                self.run_queue_once()
                is_failing = False
            except OSError as e:
                if not is_failing:
                    _log.warning("tasks wait, since none can be started; tried again: %s", e)
                is_failing = True

    def run_queue_once(self) -> None:
        """Reap processes, carry out requests, and start the tasks for which there are places."""
        self._reap_tasks()  # before the check of runs: an agent that has ended has left its result
        done = self._carry_out_requests()
        num_running = sum(task.is_running for task in self._tasks)
        try:
            self._check_runs(is_full=num_running >= self._max_agents)
            now = time.monotonic()
            waiting = [task for task in self._tasks if task.is_pending and not task.is_excluded]
            waiting = [task for task in waiting if task.begin is None or now >= task.begin]
            for task in waiting[: max(0, self._max_agents - num_running)]:
                task.process = self._spawn(task)
                task.started, task.started_at = start_ticks(task.process.pid), now
        finally:
            self.write_table()
            for file in done:
                file.unlink(missing_ok=True)

    def _reap_tasks(self) -> None:
        """Record which attempts have ended, and kill the processes that they left."""
        now = time.monotonic()
        for task in self._tasks:
            process = task.process
            if process is None or not task.is_running:
                continue
            if now >= task.kill_at:
                _kill(_family(process.pid))
            code, index = process.poll(), str(task.index)
            own = {"SLURM_ARRAY_JOB_ID": str(task.job_id), "SLURM_ARRAY_TASK_ID": index}
            if code is None or (code != 0 and kill_by_environment(own)):
                continue  # reaped once nothing is left
            task.on_end(code, now)

    def _carry_out_requests(self) -> list[Path]:
        """Carry out the requests of agents and commands; return the files of those."""
        try:
            files = sorted(self._submission.local_requests.iterdir())
        except FileNotFoundError:
            return []
        mine, now = {task.name: task for task in self._tasks}, time.monotonic()
        done = []
        for file in files:
            try:
                request = (None if file.name.startswith(".") else read_json(file)) or {}
            except (OSError, ValueError):
                continue  # withdrawn, or malformed
            task = mine.get(str(request.get("task")))
            if task is None:
                continue  # of another launcher, or withdrawn
            match request:
                case {"do": "requeue", "restarts": task.restarts}:
                    if not (task.is_pending or task.skipped):
                        task.requeue(now, self._stop_after_s)
                case {"do": "postpone", "begin": int() | float() as begin}:
                    if task.is_pending or task.comes_back:
                        task.begin = begin
            done.append(file)
        return done

    def _check_runs(self, *, is_full: bool) -> None:
        """Skip tasks of ended runs and excluded nodes; more rarely while no place is free."""
        if is_full and time.monotonic() < self._check_runs_at:
            return
        self._check_runs_at = time.monotonic() + _CHECK_RUNS_S
        over = {run: run.is_over for run in {t.run for t in self._tasks if t.is_pending}}
        excluded = {run: quarantine.excluded(run) for run in over if not over[run]}
        for task in self._tasks:
            if task.is_pending:
                task.skipped = over[task.run]
                task.is_excluded = task.node in excluded.get(task.run, {})

    def _spawn(self, task: LocalTask) -> subprocess.Popen[bytes]:
        with (self._submission.logs / f"{task.name}.log").open("ab") as output:
            return subprocess.Popen(
                list(self._command(task.array_file)), env=task.environment(os.environ),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def write_table(self) -> None:
        """Write the table if it has changed; several launchers of a sweep write the same file."""
        now = {task.name: task.entry() for task in self._tasks}
        if now == self._written:
            return
        path = self._submission.local_tasks
        try:
            with path.with_suffix(".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                ours = {name: asdict(entry) for name, entry in now.items()}
                table = {**(read_json(path) or {}), **ours}
                write_atomic(path, json.dumps(table, indent=1) + "\n")
        except OSError as e:  # the queue continues on a full disk
            if not self._warned_unwritten:
                _log.warning("%s: not written: %s", path, e)
            self._warned_unwritten = True
            return
        self._written, self._warned_unwritten = now, False


# ---- the machine's GPUs


def machine_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that a process with this environment may use, as CUDA names them."""
    given = environ.get(GPUS)
    return [str(n) for n in range(_num_gpus())] if given is None else listed_gpus(given)


@cache
def _num_gpus() -> int:
    """Return the number of GPUs by the driver: torch takes seconds to import."""
    counted_by_smi = count_devices()
    return len(driver_gpus()) if counted_by_smi is None else counted_by_smi[0]


def gpu_variables(
    gpus: Sequence[str], nproc: Nproc, *, slot: int, num_nodes: int
) -> dict[str, str]:
    """Return the GPU variables of a node: consecutive GPUs, equally many for every node (pure).

    Without GPUs, no variable is set. ``num_nodes`` is the most that the run may have.
    """
    if not gpus:
        return {}
    size = 0 if nproc == "cpu" else len(gpus) // num_nodes
    return {GPUS: ",".join(gpus[slot * size : (slot + 1) * size])}


def require_gpus(runs: Iterable[RunRequest], gpus: Sequence[str]) -> None:
    """Raise ConfigError for a run that uses GPUs if there are none, or fewer than nodes (pure)."""
    for run in runs:
        nodes = run.settings.nodes
        if not gpus and run.settings.nproc_per_node == "gpu":
            remedy = "this machine has no GPU: give a number or cpu, or leave it at auto"
            raise ConfigError("nproc_per_node", "gpu", remedy)
        if gpus and nodes.max > len(gpus) and run.settings.nproc_per_node != "cpu":
            value = nodes.max if nodes.min == nodes.max else f"{nodes.min}:{nodes.max}"
            most = counted(len(gpus), "node")
            what = f"launcher=local gives each of the {nodes.max} nodes GPUs of its own"
            have = f"this machine has {counted(len(gpus), 'GPU')}; ask for {most} at most"
            remedy = f"{what}, and {have}, or set nproc_per_node=cpu to use none"
            raise ConfigError("nodes", value, remedy)


# ---- end processes


def end_processes(processes: Sequence[subprocess.Popen[bytes]], stop_after_s: float) -> None:
    """End processes and their descendants: SIGTERM, then SIGKILL, at once on a second Ctrl-C."""
    if not processes:
        return
    for process in processes:
        process.terminate()
    family = [member for process in processes for member in _family(process.pid)]
    with contextlib.suppress(KeyboardInterrupt):
        _wait_all(processes, stop_after_s)
    _kill(family)
    for process in processes:
        process.wait()


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):  # psutil detects a pid that was reused
            process.kill()


def kill_by_environment(variables: Mapping[str, str]) -> int:
    """Kill the processes that were started with all these variables; return their number."""
    wanted = {f"{name}={value}".encode() for name, value in variables.items()}
    num = 0
    for process in psutil.process_iter():
        try:
            environ = Path(f"/proc/{process.pid}/environ").read_bytes()
            if wanted <= set(environ.split(b"\0")) and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                num += 1
        except (OSError, psutil.Error):  # of another user, or gone
            continue
    return num


def _wait_all(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
