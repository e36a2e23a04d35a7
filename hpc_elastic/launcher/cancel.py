"""Cancel a run: all of its tasks and nothing else; it does not come back.

A task may be requeueing itself at this moment, and another may be submitting a replacement. So the
mark ``<run>/cancelled`` is written first. A process that brings a task back checks for the mark
afterwards, and cancels the task again (`slurm.requeue`, `slurm.scheduler`); a task that starts
although the mark exists ends at once. Tasks that appear in the queue again are cancelled again
until none is left.

The tasks get what ``scancel`` gives them: SIGTERM, and SIGKILL after Slurm's KillWait. Within that
time the run saves a checkpoint, as before any other end of a node. Local processes get as long as
their workers may take to stop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_elastic.errors import RunDirectoryError, SlurmError
from hpc_elastic.launcher.run_handle import mark_cancelled, read_result_status
from hpc_elastic.run.directory import RunDir, RunSpec
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import Phase, TaskState
from hpc_elastic.slurm.scheduler import Scheduler, moved
from hpc_elastic.slurm.sweep_queue import SweepQueue

_log = logging.getLogger(__name__)

_POLL_S = 0.5
_CANCEL_AGAIN_S = 5.0
"""A task that still runs this long after it was cancelled is cancelled once more."""
_MARGIN_S = 30.0
_KILL_S = 10.0


@dataclass(frozen=True)
class CancelTarget:
    """A run to be cancelled.

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

    @classmethod
    def read(cls, path: Path) -> CancelTarget:
        """Return the present state of a run.

        Raises:
            RunDirectoryError: The folder is no run directory, or is unreadable.
            SlurmError: Slurm does not answer.
        """
        run = RunDir(path)
        spec = run.load()
        return cls(run, spec, read_result_status(run), Scheduler(run, spec).list_live_tasks())

    def __str__(self) -> str:
        """Return a summary of the tasks."""
        waiting = [t for t in self.left.values() if t.phase is Phase.PENDING]
        nodes = sorted({t.node for t in self.left.values() if t.phase is Phase.RUNNING})
        running = len(self.left) - len(waiting)
        where = f" (on {', '.join(filter(None, nodes))})" if any(nodes) else ""
        what = {f"{running} running{where}": running, f"{len(waiting)} waiting": len(waiting)}
        return ", ".join(text for text, count in what.items() if count) or "no task"

    def to_json(self, left: Iterable[TaskState] | None) -> dict[str, Any]:
        """Return what `hpc-elastic cancel --json` prints.

        Args:
            left: The tasks that are left now; None if there was nothing to do.
        """
        return {
            "run_id": self.spec.run_id,
            "run": str(self.run.path),
            "result": self.result,
            "cancelled": [] if left is None else sorted(self.left),
            "left": sorted(task.task for task in left or ()),
        }


def nothing_to_do(target: CancelTarget) -> str | None:
    """Return why a run need not be cancelled; None if it must be.

    Raises:
        RunDirectoryError: Its tasks are unknown, because their files are gone.
    """
    run, mark = target.run, target.run.cancellation()
    if target.left:
        return None
    if target.result is not None:
        return f"{run.path} has ended already: it {target.result}"
    if mark is not None:
        return f"{run.path} was cancelled already{mark.by_whom}"
    if not Path(target.spec.submission).is_dir():
        raise RunDirectoryError(f"the run's tasks are unknown: {moved(target.spec)}")
    return f"{run.path} has no task that runs or waits; there is nothing to cancel"


def time_limit_s(spec: RunSpec) -> float:
    """Return the seconds that the tasks of a run may take to end (pure)."""
    stop_s = spec.kill_wait_s if spec.launcher == "slurm" else _local_stop_s(spec)
    return stop_s + _MARGIN_S


def cancel(
    target: CancelTarget,
    *,
    wait_s: float,
    warn: Callable[[str], None],
    scheduler: Scheduler | None = None,
) -> list[TaskState]:
    """Cancel a run, and wait until its tasks are gone.

    Args:
        target: The run, as it was read.
        wait_s: Most seconds to wait.
        warn: Receives messages for the user.
        scheduler: The scheduler of its tasks; None: that of its launcher.

    Returns:
        The tasks that are left; none if all have ended.

    Raises:
        RunDirectoryError: The run belongs to another user; nothing was done.
        SlurmError: Slurm refuses. Tasks that were cancelled stay so.
    """
    run, spec = target.run, target.spec
    mark_cancelled(run, warn)
    left = _end_tasks(scheduler or Scheduler(run, spec), spec, wait_s, warn)
    if spec.launcher == "slurm":  # other runs of the sweep may stay away until its nodes are free
        try:
            SweepQueue(run, spec, spec.partition, SlurmClient()).let_others_start(ends=True)
        except (SlurmError, OSError, RunDirectoryError) as e:
            _log.warning("other runs of the sweep may start minutes later: %s", e)
    if read_result_status(run) is not None:
        run.cancelled.unlink(missing_ok=True)  # it has ended by itself in the meantime
    return left


def _end_tasks(
    scheduler: Scheduler, spec: RunSpec, wait_s: float, warn: Callable[[str], None]
) -> list[TaskState]:
    """Cancel tasks until there are none; return those that are left after the time."""
    started = time.monotonic()
    kill_at = started + _local_stop_s(spec) + _KILL_S
    cancelled_at: dict[str, float] = {}
    while True:
        now = time.monotonic()
        try:
            left = scheduler.list_live_tasks()
        except SlurmError as e:
            if now > started + wait_s:
                what = "Slurm does not answer: whether all tasks have ended is unknown"
                raise SlurmError(what) from e
            warn(f"trying again: {e}")
        else:
            if not left:
                return []
            if now > started + wait_s:
                return list(left.values())
            due = to_cancel(left.values(), cancelled_at, now)
            scheduler.cancel_tasks(due)
            cancelled_at |= {task.task: now for task in due}
            for name in left if spec.launcher == "local" and now > kill_at else ():
                scheduler.kill_task(name)  # Slurm does so itself
        time.sleep(_POLL_S)


def to_cancel(
    left: Iterable[TaskState], cancelled_at: dict[str, float], now: float
) -> list[TaskState]:
    """Return the tasks to cancel now: those that were not yet, and those that are back (pure).

    Args:
        left: Tasks that have not ended.
        cancelled_at: When each was cancelled last.
        now: On the same clock.
    """

    def is_due(task: TaskState) -> bool:
        pause_s = _CANCEL_AGAIN_S if task.phase is Phase.RUNNING else 2 * _POLL_S
        return task.task not in cancelled_at or now - cancelled_at[task.task] >= pause_s

    return [task for task in left if task.phase in (Phase.PENDING, Phase.RUNNING) and is_due(task)]


def _local_stop_s(spec: RunSpec) -> float:
    return max(spec.kill_wait_s, spec.agent.stop_timeout_s)
