"""Cancel a run: all of its tasks, and nothing else; it does not come back.

A task may be requeueing itself at this moment, and another may be submitting a replacement. So
``<run>/cancelled`` is written first, and whoever brings a task back looks for it afterwards, and
takes the task back (`slurm.requeue`, `slurm.replacement`, `agent.tasks`); a task that starts under
it ends at once. What is seen in the queue again is cancelled again until nothing is left.

The tasks get what ``scancel`` gives them: SIGTERM, and SIGKILL after Slurm's KillWait. Within that
time the run saves a checkpoint, as it does before any other end of a node. Local processes get as
long as their workers may take to stop.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_elastic.errors import RunDirectoryError, SlurmError
from hpc_elastic.events import EventLog
from hpc_elastic.files import is_there, read_json, write_atomic
from hpc_elastic.known_runs import user
from hpc_elastic.rundir import RunDir, RunSpec
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.states import Phase, TaskState
from hpc_elastic.slurm.sweep import SweepQueue
from hpc_elastic.submit.living import Tasks, moved, tasks_of
from hpc_elastic.submit.outcome import cancellation

_log = logging.getLogger(__name__)

COMMANDS = "command"
"""In place of a task, in events that a command writes."""

_POLL_S = 0.5
_AGAIN_S = 5.0
"""A task that still runs so long after it was cancelled is cancelled once more."""
_MARGIN_S = 30.0
_KILL_S = 10.0


@dataclass(frozen=True)
class Standing:
    """What is to be cancelled.

    Attributes:
        run: The run.
        spec: Its description.
        result: How it ended, ``succeeded`` or ``failed``; None if it has left no result.
        left: Its tasks that have not ended.
    """

    run: RunDir
    spec: RunSpec
    result: str | None
    left: dict[str, TaskState]

    def __str__(self) -> str:
        """Return the tasks in words."""
        waiting = [t for t in self.left.values() if t.phase is Phase.PENDING]
        nodes = sorted({t.node for t in self.left.values() if t.phase is Phase.RUNNING})
        going = len(self.left) - len(waiting)
        where = f" (on {', '.join(filter(None, nodes))})" if any(nodes) else ""
        what = {f"{going} running{where}": going, f"{len(waiting)} waiting": len(waiting)}
        return ", ".join(text for text, count in what.items() if count) or "no task"


def look(path: Path) -> Standing:
    """Return how a run stands.

    Raises:
        RunDirectoryError: it is no run directory, or may not be read.
        SlurmError: Slurm does not answer.
    """
    run = RunDir(path)
    spec = run.load()
    return Standing(run, spec, read_result(run), tasks_of(spec).left())


def read_result(run: RunDir) -> str | None:
    """Return the status in result.json; None if there is none.

    Raises:
        RunDirectoryError: it is damaged, or may not be read.
    """
    try:
        result = read_json(run.result)
    except (OSError, ValueError) as e:
        raise RunDirectoryError(f"{run.result}: not readable: {e}") from e
    return None if result is None else str(result.get("status"))


def nothing_to_do(standing: Standing) -> str | None:
    """Return why a run need not be cancelled; None if it must be.

    Raises:
        RunDirectoryError: its tasks are not known, for their files are gone.
    """
    run, mark = standing.run, cancellation(standing.run)
    if standing.left:
        return None
    if standing.result is not None:
        return f"{run.path} has ended already: it {standing.result}"
    if mark is not None:
        return f"{run.path} was cancelled already{mark.by_whom}"
    if not Path(standing.spec.submission).is_dir():
        raise RunDirectoryError(f"the run's tasks are not known: {moved(standing.spec)}")
    return f"{run.path} has no task that runs or waits; there is nothing to cancel"


def bound_s(spec: RunSpec) -> float:
    """Return how long the tasks of a run may take to end, in seconds (pure)."""
    stop_s = spec.kill_wait_s if spec.launcher == "slurm" else _local_s(spec)
    return stop_s + _MARGIN_S


def _local_s(spec: RunSpec) -> float:
    return max(spec.kill_wait_s, spec.agent.stop_timeout_s)


def cancel(
    standing: Standing, *, wait_s: float, warn: Callable[[str], None], tasks: Tasks | None = None
) -> list[TaskState]:
    """Cancel a run, and wait until its tasks are gone.

    Args:
        standing: As `look` found it.
        wait_s: How long to wait, at most.
        warn: Is told what the user should know.
        tasks: Where its tasks are; None: where its launcher has them.

    Returns:
        The tasks that are left; none if all went as it should.

    Raises:
        RunDirectoryError: the run is somebody else's; nothing was done.
        SlurmError: Slurm refuses. What was cancelled by then stays so.
    """
    run, spec = standing.run, standing.spec
    mark(run, warn)
    left = _end_all(tasks or tasks_of(spec), spec, wait_s, warn)
    _let_others_start(run, spec)
    if read_result(run) is not None:
        run.cancelled.unlink(missing_ok=True)  # it came to its end meanwhile
    return left


def _let_others_start(run: RunDir, spec: RunSpec) -> None:
    """Let runs of the sweep start that stay away because this one had their nodes."""
    if spec.launcher != "slurm":
        return
    try:
        SweepQueue(run, spec, spec.partition, SlurmClient()).let_others_start(ends=True)
    except (SlurmError, OSError, RunDirectoryError) as e:
        _log.warning("other runs of the sweep may start minutes later: %s", e)


def mark(run: RunDir, warn: Callable[[str], None]) -> None:
    """Write down that the run is cancelled; the first who does so stays on record.

    Raises:
        RunDirectoryError: it may not be written to.
    """
    if is_there(run.cancelled):
        return
    who = {"user": user(), "host": socket.gethostname(), "time": time.time()}
    try:
        write_atomic(run.cancelled, json.dumps(who) + "\n")
    except PermissionError as e:
        owner = _owner(run.path)
        remedy = "only that user, or root, can cancel it"
        raise RunDirectoryError(f"{run.path} belongs to {owner}: {remedy}") from e
    except OSError as e:
        what = f"{run.cancelled} can not be written ({e.strerror})"
        warn(f"{what}: the tasks are cancelled all the same; look again whether one comes back")
        return
    EventLog(run.events(COMMANDS), COMMANDS).write("cancel", user=who["user"], host=who["host"])


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, OSError):
        return "another user"


def _end_all(
    tasks: Tasks, spec: RunSpec, wait_s: float, warn: Callable[[str], None]
) -> list[TaskState]:
    """Cancel what there is until nothing is; return what is left after the time."""
    began = time.monotonic()
    kill_at = began + _local_s(spec) + _KILL_S
    told: dict[str, float] = {}
    while True:
        now, left = time.monotonic(), _ask(tasks, warn)
        if left is not None:
            if not left:
                return []
            if now > began + wait_s:
                return list(left.values())
            due = to_tell(left.values(), told, now)
            tasks.end(due)
            told |= {task.task: now for task in due}
            if now > kill_at:
                tasks.kill(left.values())
        elif now > began + wait_s:
            raise SlurmError("Slurm does not answer: whether all tasks have ended is not known")
        time.sleep(_POLL_S)


def to_tell(left: Iterable[TaskState], told: dict[str, float], now: float) -> list[TaskState]:
    """Return the tasks to cancel now: those that were not yet, and those that are back (pure).

    Args:
        left: Tasks that have not ended.
        told: When each was cancelled last.
        now: On the same clock.
    """
    return [
        task
        for task in left
        if task.phase in (Phase.PENDING, Phase.RUNNING)
        and (task.task not in told or now - told[task.task] >= _wait_s(task))
    ]


def _wait_s(task: TaskState) -> float:
    return _AGAIN_S if task.phase is Phase.RUNNING else 2 * _POLL_S


def _ask(tasks: Tasks, warn: Callable[[str], None]) -> dict[str, TaskState] | None:
    try:
        return tasks.left()
    except SlurmError as e:
        warn(f"asking again: {e}")
        return None


def as_json(standing: Standing, left: Iterable[TaskState] | None) -> dict[str, Any]:
    """Return what `hpc-elastic cancel --json` prints.

    Args:
        standing: As it was before.
        left: What is left now; None if there was nothing to do.
    """
    return {
        "run_id": standing.spec.run_id,
        "run": str(standing.run.path),
        "result": standing.result,
        "cancelled": [] if left is None else sorted(standing.left),
        "left": sorted(task.task for task in left or ()),
    }
