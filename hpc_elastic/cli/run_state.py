"""What a run is doing, in half a sentence, and whether it has ended."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from hpc_elastic.agent import tasks
from hpc_elastic.agent.tasks import RunTasks
from hpc_elastic.rundir import RunDir, read_json
from hpc_elastic.slurm.states import Phase, TaskState

_ASK_S = 5.0
"""Seconds between two questions to the scheduler."""
_GONE_S = 6.0
"""A result may be on its way through a network file system so long after the last task has gone."""


def doing(run: RunDir) -> str:
    """Return what a run is doing: ``it waits: 2 tasks PENDING (Resources)``.

    Raises:
        RunDirectoryError: it is no run directory.
    """
    result = _read(run, "result")
    if result:
        return f"it has ended: {result.get('status')}"
    states = _tasks(run).view()
    if states is None:
        return "the scheduler does not answer, so it is not known what its tasks do"
    return what_tasks_do(states.values(), _read(run, "status"))


def _tasks(run: RunDir) -> RunTasks:
    """Return the run's tasks; that the scheduler is silent is said here in other words."""
    logging.getLogger(tasks.__name__).setLevel(logging.ERROR)
    return tasks.tasks_of(run.load())


def what_tasks_do(states: Iterable[TaskState], status: Mapping[str, Any]) -> str:
    """Return the same from what is known of its tasks, and from status.json (pure)."""
    listed = list(states)
    counts = Counter(_in_words(state) for state in listed)
    found = ", ".join(f"{n} task{'s' if n > 1 else ''} {what}" for what, n in counts.items())
    if any(state.phase is Phase.RUNNING for state in listed):
        phase = str(status.get("phase") or "starting")
        return f"it is {phase}: {found}"
    if any(state.phase is not Phase.ENDED for state in listed):
        return f"it waits: {found}"
    return f"none of its tasks is left, and it has left no result{': ' + found if found else ''}"


def _in_words(state: TaskState) -> str:
    return f"{state.state} ({state.reason})" if state.reason else state.state


def _read(run: RunDir, what: str) -> dict[str, Any]:
    try:
        return read_json(getattr(run, what)) or {}
    except (OSError, ValueError):
        return {}


class Ending:
    """Tells when a run has ended, for whoever looks a few times a second.

    Args:
        run: The run.

    Raises:
        RunDirectoryError: it is no run directory.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._tasks = _tasks(run)
        self._ask_at = 0.0
        self._gone_since: float | None = None

    def has_come(self) -> bool:
        """Say whether it has left a result, or has lost all its tasks without one."""
        if self._run.result.exists():
            return True
        now = time.monotonic()
        if now >= self._ask_at:
            self._ask_at = now + _ASK_S
            self._ask(now)
        return self._gone_since is not None and now - self._gone_since > _GONE_S

    def _ask(self, now: float) -> None:
        states = self._tasks.view()
        if states is None:
            return
        if any(state.phase is not Phase.ENDED for state in states.values()):
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = now
