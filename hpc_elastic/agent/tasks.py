"""The tasks of a run, as the scheduler sees them: Slurm, or the local launcher's table."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from hpc_elastic.agent.gang import run_states
from hpc_elastic.errors import LocalQueueError, SlurmCommandError, SlurmError
from hpc_elastic.rundir import RunDir, RunSpec, Submission
from hpc_elastic.slurm import last_nodes, replacement
from hpc_elastic.slurm.client import RELEASE_DELAY_S, SlurmClient
from hpc_elastic.slurm.decision import Departure, Facts, Reason, decide
from hpc_elastic.slurm.local_tasks import LocalQueue
from hpc_elastic.slurm.outputs import is_refused
from hpc_elastic.slurm.replacement import current_names
from hpc_elastic.slurm.requeue import Scheduler
from hpc_elastic.slurm.states import Phase, TaskState, job_of, queue_name
from hpc_elastic.slurm.together import FEWEST, Together

_log = logging.getLogger(__name__)

_NONE: Mapping[str, str] = MappingProxyType({})
_NOWHERE: Mapping[str, Sequence[str]] = MappingProxyType({})


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
        self,
        run: RunDir,
        tasks: Iterable[str],
        unseen: Mapping[str, str] = _NONE,
        failed_on: Mapping[str, Sequence[str]] = _NOWHERE,
    ) -> None:
        """Let tasks that were lost or have left come back as soon as a node is free.

        Slurm's two minutes are ended, and so is its hold of a task that a node could not start. One
        that Slurm has ended is requeued, or replaced by another task where that is refused. One
        that still runs, is being ended or was cancelled is left
        alone: ask again later.

        Args:
            run: Where the run's tasks are recorded.
            tasks: Names as in `view`; others are passed over.
            unseen: Those of them whose end nobody has seen, each with the node where it may run
                still: it does not start there, unless Slurm has seen it (`slurm.last_nodes`).
            failed_on: Those of them that failed before they joined, each with the nodes where they
                did: they do not start there.

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


def scheduler_of(
    spec: RunSpec, run: RunDir | None = None, task: str = "", attempt: int | None = None
) -> Scheduler:
    """Return the scheduler of a run's tasks.

    Args:
        spec: Of the run.
        run: The run of a task that is to leave its node, perhaps with all others: what Slurm is
            asked is asked together then.
        task: That task.
        attempt: How often it was requeued.
    """
    if spec.launcher == "local":
        return LocalQueue(Submission(Path(spec.submission)))
    if run is None or spec.max_nodes < FEWEST:
        return SlurmClient()
    return Together(run.departing, SlurmClient(), task, attempt)


def tasks_of(spec: RunSpec) -> RunTasks:
    """Return the tasks of a run."""
    return SlurmTasks(spec) if spec.launcher == "slurm" else LocalTasks(spec)


class SlurmTasks:
    """Tasks of one or more job arrays, and of the gang where the run has one."""

    def __init__(self, spec: RunSpec, client: SlurmClient | None = None) -> None:
        self._spec = spec
        self._client = client or SlurmClient()
        self._silent = False
        self._held: dict[tuple[str, int | None], str] = {}
        """The node that could not start an attempt that Slurm holds; "" where that is not clear."""

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
        self,
        run: RunDir,
        tasks: Iterable[str],
        unseen: Mapping[str, str] = _NONE,
        failed_on: Mapping[str, Sequence[str]] = _NOWHERE,
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
                    self._client.exclude([name], failed_on.get(name, ()))
                    if state.is_launch_held:
                        self._client.end_hold(name)
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
            return state.is_held or state.is_launch_held
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
        states = run_states(self._spec, self._listed())
        return {name: self._with_node(state) for name, state in states.items()}

    def _listed(self) -> dict[str, TaskState]:
        """Return what squeue lists of the run's jobs, other runs' tasks among it."""
        jobs = dict.fromkeys(job for job in replacement.jobs_of(self._spec) if job)
        listed = self._client.tasks(jobs)
        self._silent = False
        return listed

    def _with_node(self, state: TaskState) -> TaskState:
        """Return a task's state; if Slurm holds it, with the node that could not start it."""
        key = state.task, state.restarts
        if state.is_launch_held and key not in self._held:
            self._held[key] = self._client.refused_by(state.task) or ""
        return replace(state, node=self._held[key]) if state.is_launch_held else state

    def _known(self, tasks: Iterable[str], listed: Mapping[str, TaskState]) -> list[str]:
        """Return those tasks that are the run's, and that squeue lists."""
        own = set(current_names(self._spec))
        return [name for name in tasks if name in own and queue_name(name) in listed]


class LocalTasks:
    """Tasks that the local launcher runs as processes of this machine."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._queue = LocalQueue(Submission(Path(spec.submission)))

    def view(self) -> Mapping[str, TaskState] | None:
        """Read the launcher's table, and see which of its processes live."""
        try:
            return self._listed() or None
        except (LocalQueueError, OSError, ValueError):
            return None

    def is_running(self, task: str) -> bool | None:
        """Look the task up in the table."""
        return _is_running(self.view(), task)

    def cancel_pending(self) -> None:
        """Do nothing: the local launcher starts no task of a run that has ended."""

    def postpone_pending(self, delay_s: float) -> None:
        """Tell the launcher of those that wait."""
        waiting = [n for n, state in self._listed().items() if state.phase is Phase.PENDING]
        if waiting:
            self._queue.postpone(waiting, delay_s)

    def bring_back(
        self,
        run: RunDir,
        tasks: Iterable[str],
        unseen: Mapping[str, str] = _NONE,
        failed_on: Mapping[str, Sequence[str]] = _NOWHERE,
    ) -> None:
        """Requeue what has ended; the launcher starts it once nothing of its last attempt runs."""
        listed = self._listed()
        states = {name: listed[name] for name in tasks if name in listed}
        back = [name for name, state in states.items() if state.is_held]
        for name, state in states.items():
            left = self._spec.requeues_left(state.restarts)
            facts = Facts(Reason.LOST, state, run_ended=run.is_over, requeues_left=left)
            if state.phase is Phase.ENDED and decide(facts) is Departure.REQUEUE:
                self._queue.requeue(name)
                back.append(name)
        if back:
            self._queue.postpone(back, RELEASE_DELAY_S)

    def readmit(self, run: RunDir, tasks: Iterable[str]) -> None:
        """Do nothing: no task avoids a node for a while only."""

    def exclude(self, run: RunDir, hosts: Iterable[str], why: str) -> None:
        """Write it down: the launcher looks there."""
        replacement.remember_excluded(run, hosts, why)

    def _listed(self) -> dict[str, TaskState]:
        """Return the run's tasks that the launcher lists."""
        names = current_names(self._spec)
        listed = self._queue.tasks(map(job_of, names))
        return {name: listed[name] for name in names if name in listed}


def _may_still_run(state: TaskState) -> bool:
    """Whether an attempt may live that Slurm counts as gone: it has given up the node perhaps."""
    return state.phase is Phase.PENDING or state.state == "NODE_FAIL"


def _is_running(view: Mapping[str, TaskState] | None, task: str) -> bool | None:
    if view is None:
        return None
    return task in view and view[task].phase is Phase.RUNNING
