"""The other tasks of a run, as the scheduler sees them: Slurm, or the local launcher's table."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Protocol

from hpc_elastic.errors import SlurmError
from hpc_elastic.rundir import RunSpec
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.states import Phase

_log = logging.getLogger(__name__)


class RunTasks(Protocol):
    """What the leader asks of the scheduler. All calls may block for seconds."""

    def running(self) -> frozenset[str] | None:
        """Return the tasks of the run that are RUNNING; None where nobody knows."""

    def is_running(self, task: str) -> bool | None:
        """Tell whether a task is RUNNING; None where nobody knows."""

    def cancel_pending(self) -> None:
        """Take the run's tasks that have not started yet out of the queue."""


def tasks_of(spec: RunSpec) -> RunTasks:
    """Return the tasks of a run."""
    return SlurmTasks(spec) if spec.launcher == "slurm" else LocalTasks(spec)


def job_ids(spec: RunSpec) -> dict[int, str]:
    """Return the job id of each array of the run that has been submitted, by array number."""
    files = {k: Path(spec.submission) / f"array-{k}.jobid" for k, _ in spec.tasks}
    return {k: path.read_text().strip() for k, path in files.items() if path.exists()}


def task_names(spec: RunSpec) -> list[str]:
    """Return the names of the run's tasks, as far as their arrays have been submitted."""
    jobs = job_ids(spec)
    return [f"{jobs[k]}_{i}" for k, i in spec.tasks if k in jobs]


class SlurmTasks:
    """Tasks of a job array (or several, where one would exceed MaxArraySize)."""

    def __init__(self, spec: RunSpec, client: SlurmClient | None = None) -> None:
        self._spec = spec
        self._client = client or SlurmClient()
        self._silent = False

    def running(self) -> frozenset[str] | None:
        """Ask squeue once; a Slurm that does not answer is logged once."""
        try:
            states = self._client.tasks(job_ids(self._spec).values())
        except SlurmError as e:
            if not self._silent:
                _log.warning("Slurm does not answer; going by time-outs instead: %s", e)
            self._silent = True
            return None
        self._silent = False
        running = {name for name, state in states.items() if state.phase is Phase.RUNNING}
        return frozenset(running.intersection(task_names(self._spec)))

    def is_running(self, task: str) -> bool | None:
        """Ask squeue once."""
        running = self.running()
        return None if running is None else task in running

    def cancel_pending(self) -> None:
        """Cancel with one scancel; tasks that run are left alone."""
        self._client.cancel(task_names(self._spec), pending_only=True)


class LocalTasks:
    """Tasks that the local launcher runs as processes of this machine."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._table = Path(spec.submission) / "local-tasks.json"

    def running(self) -> frozenset[str] | None:
        """Read the launcher's table, and see which of its processes live."""
        try:
            table = json.loads(self._table.read_text())
            names = task_names(self._spec)
        except (OSError, ValueError):
            return None
        return frozenset(n for n in names if n in table and _lives(table[n]))

    def is_running(self, task: str) -> bool | None:
        """Look the task up in the table."""
        running = self.running()
        return None if running is None else task in running

    def cancel_pending(self) -> None:
        """Do nothing: the local launcher starts no task of a run that has ended."""


def _lives(entry: dict[str, object]) -> bool:
    if entry["state"] != "RUNNING":
        return False
    try:
        os.kill(int(str(entry["pid"])), 0)
    except ProcessLookupError:
        return False
    return True
