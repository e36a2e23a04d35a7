"""What the leader of a run reaches beyond the run directory: the scheduler, and torch's store."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from hpc_elastic.agent.tasks import RunTasks
from hpc_elastic.errors import LocalQueueError, RunDirectoryError, SlurmError
from hpc_elastic.rendezvous.handler import RoundStores
from hpc_elastic.rundir import RunDir
from hpc_elastic.slurm.states import TaskState
from hpc_elastic.slurm.sweep import SweepQueue

_log = logging.getLogger(__name__)

_FAILURES = (SlurmError, LocalQueueError, OSError)


class RunWorld:
    """`rendezvous.leader.World` of one run. A scheduler that fails is logged, and ends nothing."""

    def __init__(
        self, run: RunDir, tasks: RunTasks, stores: RoundStores, sweep: SweepQueue | None = None
    ) -> None:
        self._run = run
        self._tasks = tasks
        self._sweep = sweep
        self.make_store = stores.make

    def view(self) -> Mapping[str, TaskState] | None:
        """Ask how the tasks of the run are; None where nobody knows."""
        try:
            return self._tasks.view()
        except OSError as e:  # the submission's files, which name the jobs
            _log.warning("the run's tasks can not be looked up: %s", e)
            return None

    def cancel_pending(self) -> None:
        """Take back the run's tasks that are still in the queue; others may start in its place."""
        try:
            self._tasks.cancel_pending()
        except _FAILURES as e:
            _log.warning("pending tasks of the run were not cancelled: %s", e)
        self._let_others_start(ends=True)

    def waits_in_vain(self, lost: Mapping[str, int]) -> str | None:
        """Ask whether other runs of the sweep hold the nodes that this one lacks."""
        try:
            return None if self._sweep is None else self._sweep.waits_in_vain(lost)
        except (SlurmError, OSError, RunDirectoryError) as e:
            _log.warning("the other runs of the sweep can not be looked up: %s", e)
            return None

    def let_others_start(self, lost: Iterable[str]) -> None:
        """Let runs of the sweep start that stay away, if there are idle nodes for them."""
        self._let_others_start(lost)

    def _let_others_start(self, lost: Iterable[str] = (), *, ends: bool = False) -> None:
        try:
            if self._sweep is not None:
                self._sweep.let_others_start(lost, ends=ends)
        except (SlurmError, OSError, RunDirectoryError) as e:
            _log.warning("other runs of the sweep may start late: %s", e)

    def postpone_pending(self, delay_s: float) -> None:
        """Let none of the run's queued tasks start for a while."""
        try:
            self._tasks.postpone_pending(delay_s)
        except _FAILURES as e:
            _log.warning("pending tasks of the run were not postponed: %s", e)

    def clear_holds(
        self,
        tasks: Iterable[str],
        unseen: Mapping[str, str],
        failed_on: Mapping[str, Sequence[str]],
    ) -> None:
        """Let tasks that were lost or have left come back soon, by requeue or replacement."""
        try:
            self._tasks.bring_back(self._run, tasks, unseen, failed_on)
        except _FAILURES as e:
            _log.warning("tasks of the run may come back late, or not at all: %s", e)

    def readmit(self, tasks: Iterable[str]) -> None:
        """Let tasks start on the nodes that they were lost with, where these are rid of them."""
        try:
            self._tasks.readmit(self._run, tasks)
        except _FAILURES as e:
            _log.warning("tasks of the run avoid nodes that may be well again: %s", e)

    def exclude(self, hosts: Iterable[str], why: str) -> None:
        """Keep the run's tasks away from nodes that are blamed for something."""
        try:
            self._tasks.exclude(self._run, hosts, why)
        except _FAILURES as e:
            _log.warning("the run may start on %s again: %s", ", ".join(hosts), e)

    def log_of(self, task: str, attempt: int) -> str | None:
        """Return where an attempt's log is."""
        return str(self._run.attempt(task, attempt) / "agent.log")
