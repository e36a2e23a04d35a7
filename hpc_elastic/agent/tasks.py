"""The tasks of a run, as the scheduler sees them: Slurm, or the local launcher's table."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from hpc_elastic.agent.gang import run_states
from hpc_elastic.errors import SlurmCommandError, SlurmError
from hpc_elastic.rundir import RunDir, RunSpec, Submission
from hpc_elastic.slurm import last_nodes, replacement
from hpc_elastic.slurm.client import RELEASE_DELAY_S, SlurmClient
from hpc_elastic.slurm.decision import Departure, Facts, Reason, decide
from hpc_elastic.slurm.local_tasks import read_local_tasks
from hpc_elastic.slurm.outputs import is_refused
from hpc_elastic.slurm.replacement import current_names
from hpc_elastic.slurm.states import Phase, TaskState, queue_name

_log = logging.getLogger(__name__)

_NONE: Mapping[str, str] = MappingProxyType({})


class RunTasks(Protocol):
    """What the leader asks of the scheduler. All calls may block for seconds."""

    def view(self) -> Mapping[str, TaskState] | None:
        """Return every task of the run that the scheduler knows, by name; None: nobody knows."""

    def is_running(self, task: str) -> bool | None:
        """Tell whether a task is RUNNING; None where nobody knows."""

    def cancel_pending(self) -> None:
        """Take the run's tasks that have not started yet out of the queue.

        Raises:
            SlurmError: they may still be there.
        """

    def postpone_pending(self, delay_s: float) -> None:
        """Let the run's tasks that have not started yet not start before so long from now.

        Raises:
            SlurmError: they may start earlier.
        """

    def bring_back(
        self, run: RunDir, tasks: Iterable[str], unseen: Mapping[str, str] = _NONE
    ) -> None:
        """Let tasks that were lost or have left come back as soon as a node is free.

        Slurm's two minutes are ended; one that Slurm has ended is requeued, or replaced by another
        task where that is refused. One that still runs, is being ended or was cancelled is left
        alone: ask again later.

        Args:
            run: Where the run's tasks are recorded.
            tasks: Names as in `view`; others are passed over.
            unseen: Those of them whose end nobody has seen, each with the node where it may run
                still: it does not start there, unless Slurm has seen it (`slurm.last_nodes`).

        Raises:
            SlurmError: some are as they were.
            OSError: a replacement could not be recorded.
        """

    def readmit(self, run: RunDir, tasks: Iterable[str]) -> None:
        """Let tasks start on their last nodes again, where these are rid of them.

        Args:
            run: Where it is recorded which do not.
            tasks: Names as in `view`, of those that are gone.

        Raises:
            SlurmError: to be tried again.
            OSError: likewise.
        """

    def exclude(self, run: RunDir, hosts: Iterable[str], why: str) -> None:
        """Keep the run's tasks away from nodes: those that wait now, and the others later.

        Args:
            run: Where that is recorded.
            hosts: The nodes.
            why: What they are blamed for, for people.

        Raises:
            SlurmError: those that wait may start there.
            OSError: the others may.
        """


def tasks_of(spec: RunSpec) -> RunTasks:
    """Return the tasks of a run."""
    return SlurmTasks(spec) if spec.launcher == "slurm" else LocalTasks(spec)


class SlurmTasks:
    """Tasks of one or more job arrays, and of the gang where the run has one."""

    def __init__(self, spec: RunSpec, client: SlurmClient | None = None) -> None:
        self._spec = spec
        self._client = client or SlurmClient()
        self._silent = False

    def view(self) -> Mapping[str, TaskState] | None:
        """Ask squeue once; a Slurm that does not answer is logged once."""
        try:
            return self._ask()
        except SlurmError as e:
            if not self._silent:
                _log.warning("Slurm does not answer; going by time-outs instead: %s", e)
            self._silent = True
            return None

    def is_running(self, task: str) -> bool | None:
        """Ask squeue once."""
        return _is_running(self.view(), task)

    def cancel_pending(self) -> None:
        """Cancel with one scancel; tasks that run are left alone."""
        self._client.cancel(current_names(self._spec), pending_only=True)

    def postpone_pending(self, delay_s: float) -> None:
        """Ask squeue once, then tell the tasks that it calls pending."""
        pending = [n for n, state in self._ask().items() if state.phase is Phase.PENDING]
        if pending:
            self._client.postpone(pending, delay_s)

    def bring_back(
        self, run: RunDir, tasks: Iterable[str], unseen: Mapping[str, str] = _NONE
    ) -> None:
        """Ask squeue once, then do for each task what is to be done, whatever fails for another."""
        listed = self._listed()
        known = self._known(tasks, listed)
        states = {queue_name(name): listed[queue_name(name)] for name in known}
        last: dict[str, list[str]] = {name: [] for name in states}
        for name in known:
            last[queue_name(name)] += [unseen[name]] if name in unseen else []
        back: list[str] = []
        failures: list[SlurmError | OSError] = []
        for name, state in states.items():
            try:
                if self._is_back(run, name, state):
                    for node in last[name] if _may_still_run(state) else ():
                        last_nodes.avoid(run, name, node, self._client)
                    back.append(name)
            except (SlurmError, OSError) as e:
                failures.append(e)
        if back:
            self._client.postpone(back, RELEASE_DELAY_S)
        waiting = {name for name, state in states.items() if state.phase is Phase.PENDING}
        if waiting.union(back):
            self._client.exclude([*waiting.union(back)], replacement.excluded(run))
        if failures:
            raise failures[0]

    def _is_back(self, run: RunDir, name: str, state: TaskState) -> bool:
        """Requeue or replace a task that has ended; return whether it is held in the queue."""
        left = self._spec.requeues_left(state.restarts)
        facts = Facts(Reason.LOST, state, run_ended=run.is_over, requeues_left=left)
        if state.phase is not Phase.ENDED or decide(facts) is not Departure.REQUEUE:
            return state.is_held
        try:
            self._client.requeue(name)
        except SlurmCommandError as e:
            if not is_refused(e):
                raise
            replacement.replace(run, name, self._client)
            return False
        if run.is_over:  # cancelled meanwhile: it is not to come back
            self._client.cancel([name])
            return False
        return True

    def readmit(self, run: RunDir, tasks: Iterable[str]) -> None:
        """Ask about nodes only where one of these tasks avoids one for now."""
        last_nodes.readmit(run, tasks, self._client, time.time())

    def exclude(self, run: RunDir, hosts: Iterable[str], why: str) -> None:
        """Write it down first: a task that is requeued in the meantime looks there."""
        replacement.remember_excluded(run, hosts, why)
        waiting = [n for n, state in self._ask().items() if state.phase is not Phase.ENDED]
        if waiting:
            self._client.exclude(waiting, hosts)

    def _ask(self) -> dict[str, TaskState]:
        """Return the state of each task of the run, the nodes of its gang one by one.

        Raises:
            SlurmError: squeue does not answer.
        """
        return run_states(self._spec, self._listed())

    def _listed(self) -> dict[str, TaskState]:
        """Return what squeue lists of the run's jobs, other runs' tasks among it."""
        jobs = dict.fromkeys(job for job in replacement.jobs_of(self._spec) if job)
        listed = self._client.tasks(jobs)
        self._silent = False
        return listed

    def _known(self, tasks: Iterable[str], listed: Mapping[str, TaskState]) -> list[str]:
        """Return those tasks that are the run's, and that squeue lists."""
        own = set(current_names(self._spec))
        return [name for name in tasks if name in own and queue_name(name) in listed]


class LocalTasks:
    """Tasks that the local launcher runs as processes of this machine."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._submission = Submission(Path(spec.submission))

    def view(self) -> Mapping[str, TaskState] | None:
        """Read the launcher's table, and see which of its processes live."""
        try:
            table = read_local_tasks(self._submission)
            names = current_names(self._spec)
        except (OSError, ValueError):
            return None
        return {name: table[name].seen_as(name) for name in names if name in table} or None

    def is_running(self, task: str) -> bool | None:
        """Look the task up in the table."""
        return _is_running(self.view(), task)

    def cancel_pending(self) -> None:
        """Do nothing: the local launcher starts no task of a run that has ended."""

    def postpone_pending(self, delay_s: float) -> None:
        """Do nothing: the local launcher's queue has no times."""

    def bring_back(
        self, run: RunDir, tasks: Iterable[str], unseen: Mapping[str, str] = _NONE
    ) -> None:
        """Do nothing: what has ended on this machine has ended for good."""

    def readmit(self, run: RunDir, tasks: Iterable[str]) -> None:
        """Do nothing: no task avoids anything."""

    def exclude(self, run: RunDir, hosts: Iterable[str], why: str) -> None:
        """Do nothing: there is one machine."""


def _may_still_run(state: TaskState) -> bool:
    """Whether an attempt may live that Slurm counts as gone: it has given up the node perhaps."""
    return state.phase is Phase.PENDING or state.state == "NODE_FAIL"


def _is_running(view: Mapping[str, TaskState] | None, task: str) -> bool | None:
    if view is None:
        return None
    return task in view and view[task].phase is Phase.RUNNING
