"""What a task does first: it finds its run, opens its log, and hands over to `agent/supervise`."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from hpc_elastic.agent import gang, preflight
from hpc_elastic.agent.background_log import BackgroundLog
from hpc_elastic.agent.lookup import Task, find_task
from hpc_elastic.agent.output_times import OutputTimes
from hpc_elastic.agent.prewarm import uncollected
from hpc_elastic.agent.signals import Caught
from hpc_elastic.agent.surroundings import first_spares
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.files import is_there
from hpc_elastic.rundir import Submission, task_name
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.environment import SlurmEnvironment

_LOOK_S = 0.5
"""Between two looks for the run's end, while this node gets ready: torch's import takes seconds."""


def start(argv: Sequence[str], caught: Caught) -> int:
    """Run the agent of one node; return its exit code.

    Args:
        argv: The arguments of `hpc_elastic.agent.task`.
        caught: The signals that came since the process was started.
    """
    parser = argparse.ArgumentParser(prog="python -m hpc_elastic.agent.task")
    parser.add_argument("array", type=Path, help="<sweep>/.hpc_elastic/array-<k>.json")
    arguments = parser.parse_args(argv)
    try:
        task = find_task(arguments.array, SlurmEnvironment.from_env(os.environ))
        if task.superseded or task.run.is_over:
            why = "was resumed with other tasks" if task.superseded else "has ended"
            print(f"{task.run.path}: the run {why}; nothing to do")
            return 0
        task.logs.mkdir(parents=True, exist_ok=True)
        log = _log_to(task.agent_log)
    except (HpcElasticError, OSError) as e:
        print(f"hpc_elastic: {e}", file=sys.stderr)
        return 1
    times = OutputTimes([task.agent_log, Submission(Path(task.spec.submission)).log(task.name)])
    times.start()
    try:
        return _run(task, caught, times)
    finally:
        log.close()
        times.close()


def _run(task: Task, caught: Caught, times: OutputTimes) -> int:
    print(f"{task.run.path}: logs of this task are in {task.logs}")
    spares = first_spares(task)  # they import torch while this process does
    checks = preflight.begin(task) if task.spec.agent.preflight else None
    with uncollected(), _unless_it_ends(task):
        from hpc_elastic.agent.supervise import supervise

    exit_code = supervise(task, caught, spares, times, checks)
    if task.in_gang:
        _leave_gang(task)
    return exit_code


@contextlib.contextmanager
def _unless_it_ends(task: Task) -> Iterator[None]:
    """End this process at once if its run ends meanwhile: no agent has heard of this node yet."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(_LOOK_S):
            with contextlib.suppress(OSError):
                if task.run.is_over:
                    os.write(1, f"{task.run.path}: the run has ended\n".encode())
                    os._exit(0)

    if not task.in_gang:  # its first nodes see to the end of the job
        threading.Thread(target=look, name="run's end", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _leave_gang(task: Task) -> None:
    """See that the gang's job ends with its run, whatever became of the batch script."""
    try:
        gang.mark_end(task.logs, task.slurm)
        has_result = is_there(task.run.result)
    except OSError as e:  # the run has ended as it has ended
        logging.getLogger(__name__).warning("the job of the gang may outlive its run: %s", e)
        return
    if 0 < task.slurm.node_id < gang.DEPUTIES and has_result:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the cancellation is sent to us as well
        first = task_name(str(task.slurm.job_id), 0, gang=True)
        gang.end_if_orphaned(task.name, task.run.attempt(first, task.attempt), SlurmClient())


def _log_to(path: Path) -> BackgroundLog:
    with path.open("a"):
        pass  # an error is to be told at once
    logging.getLogger().setLevel(logging.INFO)
    return BackgroundLog(partial(_handlers, path))


def _handlers(path: Path) -> list[logging.Handler]:
    file = logging.FileHandler(path, delay=True)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    errors = logging.StreamHandler()
    errors.setLevel(logging.ERROR)
    return [file, errors]
