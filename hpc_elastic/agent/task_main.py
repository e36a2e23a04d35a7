"""What a task does first: it finds its run, opens its log, starts what takes long.

Warm workers and the checks of the node run beside the imports of `agent.node_agent`, which
supervises the task from then on.
"""

from __future__ import annotations

import argparse
import atexit
import json
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue

from hpc_elastic._util import patiently
from hpc_elastic.agent.output_files import OutputTimes
from hpc_elastic.agent.preflight import Preflight
from hpc_elastic.agent.signals import SignalPipe
from hpc_elastic.agent.warm_workers import WarmWorkerPool
from hpc_elastic.config.schema import Nproc
from hpc_elastic.errors import HpcElasticError, RunDirectoryError
from hpc_elastic.gpus import driver_gpus
from hpc_elastic.run import job_of, ownership, task_name
from hpc_elastic.run.directory import AGENT_LOG, ArrayFiles, Pool, RunDir, RunSpec, Submission
from hpc_elastic.shared_files import is_there, make_folder, read_text
from hpc_elastic.slurm import run_tasks, scheduler
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.environment import (
    GPUS,
    REPLACEMENT,
    SlurmEnvironment,
    granted_gpus,
    listed_gpus,
    mig_slices,
)
from hpc_elastic.slurm.job_state import Phase
from hpc_elastic.transport import socket_filter
from hpc_elastic.worker.shared_page import AGENT_VARIABLE

_OPEN_FILES = 1 << 16
_THREADS = "OMP_NUM_THREADS"
_GIVEN_THREADS = os.environ.get(_THREADS)  # the user's own value, before anything is set here
_CPUS_PER_WARMING = 8  # CPUs for each process that may import while the workers train


@dataclass(frozen=True)
class Task:
    """One node of one run, in one attempt."""

    run: RunDir
    spec: RunSpec
    slot: int
    slurm: SlurmEnvironment

    is_coallocated: bool = False
    num_in_array: int = 1  # how many tasks the array has, of all its runs
    superseded: bool = False
    """Whether another task has its place: the run was resumed, or no record names this one."""

    @property
    def name(self) -> str:
        """``<array job id>_<index>``; ``<job id>.<node id>`` in a co-allocated job."""
        return self.slurm.task_name

    @property
    def pool(self) -> Pool:
        """The pool of its slot."""
        return self.spec.pool_of(self.slot)

    @property
    def attempt(self) -> int:
        """How often Slurm has requeued this task."""
        return self.slurm.restart_count

    @property
    def logs(self) -> Path:
        """Where this attempt's logs go."""
        return self.run.attempt(self.name, self.attempt)


def find_task(array: Path, slurm: SlurmEnvironment) -> Task:
    """Look up the run and the node of this task.

    Raises HpcElasticError if this process is no task of that array, another job runs its script,
    others may write it, it or the run cannot be read, or a variable that the task will need is
    malformed.
    """
    # read once what the agent will read later, far from where an error could be explained
    _ = slurm.task_name, slurm.restart_count, slurm.node_name, slurm.cpus_on_node
    _ = slurm.step_id, slurm.end_time_s, slurm.hosts
    ownership.require_own(array.parent, array)
    try:
        content = json.loads(read_text(array))
        runs, is_coallocated = content["runs"], bool(content.get("coallocated"))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise RunDirectoryError(f"{array}: not readable on {slurm.node_name}: {e}") from e
    job_id, index = slurm.array_job_id, slurm.array_task_id
    if is_coallocated:
        if job_id is not None:
            raise HpcElasticError("not a co-allocated job: submit the script without --array")
        job_id, index = slurm.job_id, slurm.node_id
    elif index is None or job_id is None:
        raise HpcElasticError("not an array task: submit the script with its #SBATCH --array line")
    if index >= len(runs):
        raise HpcElasticError(f"{array} has {len(runs)} tasks, not {index}")
    files = ArrayFiles.of(array)
    if files.job_id is None:
        files.started_as(str(job_id))
    run = RunDir(Path(runs[index]["dir"]))
    spec = ownership.load_own(run, run.rdzv, run.first_term, run.event_logs, run.tasks, run.hydra)
    superseded = spec.generation > 0 and (files.number, index) not in spec.tasks
    if REPLACEMENT in slurm.variables:  # its answer may have been lost, and another one submitted
        superseded = superseded or not run_tasks.is_recorded(spec, slurm.task_name)
    elif not (superseded or files.job_id == str(job_id)):
        _require_sole_job(run, spec, slurm.task_name)
    if is_coallocated:
        scheduler.record_job_nodes(files, slurm)
    slot = int(runs[index]["slot"])
    run.complete(spec)
    return Task(run, spec, slot, slurm, is_coallocated, len(runs), superseded)


def _require_sole_job(run: RunDir, spec: RunSpec, task: str) -> None:
    """Refuse a job whose script was submitted by hand while the run's own job waits or runs."""
    if run_tasks.is_recorded(spec, task):
        return
    job, states = job_of(task), scheduler.own_queue(spec).tasks(run_tasks.jobs_of(spec)).values()
    for state in states:
        if state.phase is not Phase.ENDED:
            raise RunDirectoryError(
                f"job {job} has the script of job {job_of(state.task)}, whose task {state.task} is "
                f"{state.state}: it would have the places of the same run; `scancel {job}`. To "
                f"change the nodes of the run: `hpc-elastic cancel {run.path}`, then `hpc-elastic "
                f"resume {run.path} nodes=...`"
            )


def start(argv: Sequence[str], caught: SignalPipe, supervise: Callable[..., int]) -> int:
    """Run the agent of one node, with the signals caught since its start; return its exit code.

    ``supervise`` is that of `node_agent`: its imports come last.
    """
    parser = argparse.ArgumentParser(prog="python -m hpc_elastic.agent")
    parser.add_argument("array", type=Path, help="<sweep>/.hpc_elastic/array-<k>.json")
    parser.add_argument("--trust", action="store_true", help="act on what others may write, too")
    arguments = parser.parse_args(argv)
    if arguments.trust:
        os.environ[ownership.TRUST_VARIABLE] = "1"  # of its workers, too
    try:
        task = find_task(arguments.array, SlurmEnvironment.from_env(os.environ))
        if task.superseded or task.run.is_over:
            why = "has other tasks in place of this one" if task.superseded else "has ended"
            print(f"{task.run.path}: the run {why}; nothing to do")
            return 0
        log_file = task.logs / AGENT_LOG

        def open_log() -> None:
            make_folder(task.logs, parents=True)
            with log_file.open("a"):
                pass  # an error is reported at once

        patiently(open_log)
    except (HpcElasticError, OSError) as e:
        print(f"hpc_elastic: {e}", file=sys.stderr)
        return 1

    def make_handlers() -> list[logging.Handler]:
        file = logging.FileHandler(log_file, delay=True)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        errors = logging.StreamHandler()
        errors.setLevel(logging.ERROR)
        return [file, errors]

    logging.getLogger().setLevel(logging.INFO)
    log = BackgroundLog(make_handlers)
    times = OutputTimes([log_file, Submission(Path(task.spec.submission)).log(task.name)])
    times.start()
    try:
        return _run(task, caught, times, supervise)
    finally:
        log.close()
        times.close()


def _run(task: Task, caught: SignalPipe, times: OutputTimes, supervise: Callable[..., int]) -> int:
    print(f"{task.run.path}: logs of this task are in {task.logs}")
    _raise_limits()
    os.environ[AGENT_VARIABLE] = str(os.getpid())
    launcher = task.spec.settings.launcher
    os.environ[socket_filter.VARIABLE] = ",".join(launcher.rendezvous.allow_from)
    warm_workers = _start_pool(task)  # beside the imports of this process
    exit_code = supervise(task, caught, warm_workers, times, _start_checks(task))
    if task.is_coallocated:
        _leave_coallocated_job(task)
    return exit_code


def worker_command(task: Task) -> tuple[str, ...]:
    """Return the command line of this task's workers."""
    return (sys.executable, "-uP", "-m", "hpc_elastic.agent.worker_main", str(task.run.path))


def _start_pool(task: Task) -> WarmWorkerPool:
    """Start the warm workers of a task, which import while the agent joins."""
    settings = task.spec.settings
    num_workers = likely_workers(
        settings.nproc_per_node, task.slurm.cpus_on_node, os.environ, len(driver_gpus())
    )
    prepare_environment(task, num_workers)
    num_warming = max(1, len(os.sched_getaffinity(0)) // _CPUS_PER_WARMING)
    how = settings.launcher.agent.warm_workers
    slots = num_workers if how else 0
    pool = WarmWorkerPool(slots, worker_command(task), how, num_warming=num_warming)
    pool.fill(paced=False)
    return pool


def likely_workers(wanted: Nproc, cpus: int, env: Mapping[str, str], num_devices: int) -> int:
    """Estimate the number of workers of a node without torch, by its machine's GPUs (pure)."""
    if isinstance(wanted, int):
        return wanted
    if wanted == "cpu":
        return cpus
    gpus = len(listed_gpus(env[GPUS])) if GPUS in env else num_devices
    return max(1, len(mig_slices(env)) or min(gpus, num_devices))


def prepare_environment(task: Task, num_workers: int) -> None:
    """Set the variables that a process reads at its start, for a number of workers."""
    cpus = min(task.slurm.cpus_on_node, len(os.sched_getaffinity(0)))
    launcher = task.spec.settings.launcher
    share = launcher.agent.omp_num_threads or max(1, cpus // num_workers)
    os.environ[_THREADS] = _GIVEN_THREADS or str(share)
    os.environ |= {**task.spec.file_env, **launcher.env}


def _start_checks(task: Task) -> Preflight | None:
    settings = task.spec.settings
    if not settings.launcher.agent.preflight:
        return None
    granted = [] if settings.nproc_per_node == "cpu" else granted_gpus(os.environ) or []
    shared = settings.backend == "local" or "SLURM_SHARDS_ON_NODE" in os.environ
    return Preflight(task.logs, granted, shared=shared, numa=settings.launcher.agent.numa)


def _raise_limits() -> None:
    """Raise the limits of open files and of CPU time, for the workers as well.

    A leader has a connection to each agent; and gloo aborts a worker whose descriptors are used up
    by strangers at its port. Slurm hands on the `ulimit -t` of the login node, where it is right.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))


def _leave_coallocated_job(task: Task) -> None:
    """Ensure that the co-allocated job ends with its run, whatever became of the batch script."""
    try:
        scheduler.mark_agent_ended(task.logs, task.slurm)
        has_result = is_there(task.run.result)
    except OSError as e:  # the run has ended as it has ended
        logging.getLogger(__name__).warning("the co-allocated job may outlive its run: %s", e)
        return
    if 0 < task.slurm.node_id < scheduler.NUM_RECORDERS and has_result:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the cancellation is sent to us as well
        first = task_name(str(task.slurm.job_id), 0, coallocated=True)
        scheduler.cancel_if_orphaned(
            task.name, task.run.attempt(first, task.attempt), SlurmClient()
        )


_JOIN_S = 2.0  # a file system that hangs does not keep the task from its end
_MOST = 10_000  # at most this many records wait for one that hangs; later ones are lost

_Queue = SimpleQueue[logging.LogRecord | None]


class BackgroundLog:
    """Writes what the process logs, from now on, on a thread of its own (agent, once).

    The file is on the shared file system. The event loop that keeps the heartbeats may wait neither
    for that file, nor for the lock of a thread that does. ``make_handlers`` makes what writes it;
    again in a process that is forked.
    """

    def __init__(self, make_handlers: Callable[[], Sequence[logging.Handler]]) -> None:
        self._make_handlers = make_handlers
        self._handlers = make_handlers()
        self._queue: _Queue = SimpleQueue()
        self._hands_over = _HandsOver(self._queue)
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()
        logging.getLogger().addHandler(self._hands_over)
        os.register_at_fork(after_in_child=self._go_on_in_child)

    def close(self) -> None:
        """Write what was handed over, within `_JOIN_S`; what is logged later is written at once."""
        self._queue.put(None)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            atexit.unregister(logging.shutdown)  # it would wait for the handler that hangs
        else:
            self._replace_by(self._handlers)

    def _write(self) -> None:
        while (record := self._queue.get()) is not None:
            for handler in self._handlers:
                if record.levelno >= handler.level:
                    try:
                        handler.handle(record)
                    except Exception:  # a file that could not be opened; the next record retries
                        handler.handleError(record)

    def _go_on_in_child(self) -> None:
        """Write at once in a forked child, with handlers of its own: it lacks the thread."""
        if self._hands_over in logging.getLogger().handlers:
            self._replace_by(self._make_handlers())

    def _replace_by(self, handlers: Sequence[logging.Handler]) -> None:
        root = logging.getLogger()
        for handler in handlers:
            root.addHandler(handler)
        root.removeHandler(self._hands_over)


class _HandsOver(QueueHandler):
    """Hands a record over as text, with its traceback; it is lost where too many wait."""

    def __init__(self, records: _Queue) -> None:
        super().__init__(records)
        self._records = records

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._records.qsize() < _MOST:
            self._records.put(record)
