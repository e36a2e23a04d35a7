"""What a task does first: it finds its run, opens its log, and hands over to `agent/node_agent`."""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue

from hpc_elastic._util import patiently
from hpc_elastic.agent import preflight
from hpc_elastic.agent.output_times import OutputTimes
from hpc_elastic.agent.signals import SignalPipe
from hpc_elastic.agent.task_context import Task, find_task
from hpc_elastic.agent.warm_workers import start_pool
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.run import ownership, task_name
from hpc_elastic.run.directory import AGENT_LOG, Submission
from hpc_elastic.shared_files import is_there, make_folder
from hpc_elastic.slurm import scheduler
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.environment import SlurmEnvironment
from hpc_elastic.transport import socket_filter
from hpc_elastic.worker.shared_page import AGENT_VARIABLE

_OPEN_FILES = 1 << 16


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
    warm_workers = start_pool(task)  # beside the imports of this process
    checks = preflight.start_checks(task) if launcher.agent.preflight else None
    from hpc_elastic.agent.node_agent import supervise

    exit_code = supervise(task, caught, warm_workers, times, checks)
    if task.is_coallocated:
        _leave_coallocated_job(task)
    return exit_code


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


_JOIN_S = 2.0
"""A file system that hangs does not keep the task from its end."""
_MOST = 10_000
"""At most this many records wait for one that hangs; later ones are lost."""

_Queue = SimpleQueue[logging.LogRecord | None]


class BackgroundLog:
    """Writes what the process logs, from now on, on a thread of its own (agent, once).

    The file is on the shared file system. A caller only hands a record over: the event loop that
    keeps the heartbeats may wait neither for that file, nor for the lock of a thread that does.
    ``make_handlers`` makes what writes it; again in a process that is forked.
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
