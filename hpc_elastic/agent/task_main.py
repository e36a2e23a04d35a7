"""What a task does first: it opens its log, and starts what takes long.

Warm workers and the checks of the node run beside the imports of `agent.node_agent`, which
supervises the task from then on.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue

from hpc_elastic._util import patiently
from hpc_elastic.agent.output_files import OutputTimes
from hpc_elastic.agent.preflight import Preflight
from hpc_elastic.agent.signals import SignalPipe
from hpc_elastic.agent.task import Task, find_task, prepare_environment, worker_command
from hpc_elastic.agent.warm_workers import WarmWorkerPool
from hpc_elastic.config.schema import Nproc
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.gpus import driver_gpus
from hpc_elastic.run import ownership, task_name
from hpc_elastic.run.directory import AGENT_LOG, Submission
from hpc_elastic.shared_files import is_there, make_folder
from hpc_elastic.slurm import scheduler
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.environment import (
    GPUS,
    SlurmEnvironment,
    granted_gpus,
    listed_gpus,
    mig_slices,
)
from hpc_elastic.transport import socket_filter
from hpc_elastic.worker.shared_page import AGENT_VARIABLE

_OPEN_FILES = 1 << 16
_CPUS_PER_WARMING = 8  # CPUs for each process that may import while the workers train


def start(argv: Sequence[str], caught: SignalPipe) -> int:
    """Run the agent of one node, with the signals caught since its start; return its exit code."""
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
        return _run(task, caught, times)
    finally:
        log.close()
        times.close()


def _run(task: Task, caught: SignalPipe, times: OutputTimes) -> int:
    print(f"{task.run.path}: logs of this task are in {task.logs}")
    _raise_limits()
    os.environ[AGENT_VARIABLE] = str(os.getpid())
    launcher = task.spec.settings.launcher
    os.environ[socket_filter.VARIABLE] = ",".join(launcher.rendezvous.allow_from)
    warm_workers = _start_pool(task)  # beside the imports of this process
    checks = _start_checks(task)
    from hpc_elastic.agent.node_agent import supervise  # psutil, asyncio

    exit_code = supervise(task, caught, warm_workers, times, checks)
    if task.is_coallocated:
        _leave_coallocated_job(task)
    return exit_code


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
