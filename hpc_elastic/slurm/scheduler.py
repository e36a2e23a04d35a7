"""The local launcher's queue, as agents and commands see it: its table, and requests to it.

The launcher is a small scheduler (`hpc_elastic.launcher.local`). It writes down its tasks:

    <sweep>/.hpc_elastic/local-tasks.json
        {task name: {"state": "PENDING|RUNNING|COMPLETING|ENDED", "node", "restarts", "begin",
                     "reason", "pid", "started", "exit_code", "host", "launcher",
                     "launcher_started"}}

and carries out what agents and commands ask for, in the order of the files' names:

    <sweep>/.hpc_elastic/local-requests/<n>.json   {"do": "requeue|postpone", "task", ...}

It removes a request once the table shows what has become of it. `LocalQueue` has the methods of
`SlurmClient` that a task needs in order to go back to the queue.

A pid alone may be another process's by now, so each stands beside the time at which its process
was made, in clock ticks since the machine was booted (in Unix seconds it would change with the
clock): the task's, and the launcher's, without which nothing starts. A launcher that was killed
can not write down what became of its tasks. So a reader on the same machine looks for the
processes themselves; elsewhere the table's word is taken.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from hpc_elastic.errors import LocalQueueError, RunDirectoryError, SlurmCommandError, SlurmError
from hpc_elastic.run.directory import ArrayFiles, RunDir, RunSpec, Submission
from hpc_elastic.shared_files import is_there, read_json, write_atomic
from hpc_elastic.slurm import nodelist, requeue
from hpc_elastic.slurm.client import RELEASE_DELAY_S, SlurmClient
from hpc_elastic.slurm.combined_requests import FEWEST, CombinedRequests
from hpc_elastic.slurm.environment import SlurmEnvironment
from hpc_elastic.slurm.exit_action import ExitAction, ExitFacts, Reason, decide
from hpc_elastic.slurm.job_state import LAUNCHER_ENDED, Phase, TaskState, job_of, queue_name
from hpc_elastic.slurm.parsing import is_refused
from hpc_elastic.slurm.requeue import Scheduler, current_names

if TYPE_CHECKING:
    import psutil

_START_TIME = 19
"""Its place in /proc/<pid>/stat, behind the name of the process; proc(5) counts it as the 22nd."""
_POLL_S = 0.02
_numbers = itertools.count()


def node_name(slot: int) -> str:
    """Return the name of a run's node on this machine (pure)."""
    return f"local-{slot}"


@dataclass(frozen=True)
class LocalEntry:
    """One task, as its launcher has written it down.

    Attributes:
        state: ``PENDING``; ``RUNNING``; ``COMPLETING``: its process is to end, or has ended, and
            what it has left behind is being ended; ``ENDED``.
        pid: Its process; None while it waits.
        started: When that was made.
        exit_code: Of a process that has ended, minus the number of a signal that ended it; None of
            one that never started.
        host: The machine.
        launcher: The process that starts what is PENDING.
        launcher_started: When that was made.
        node: The name of its node.
        restarts: How often the task went back to the queue.
        begin: It does not start before this time: monotonic seconds of this machine; None: it may.
        reason: Why it waits, if not for a place.
    """

    state: str
    pid: int | None
    started: int | None
    exit_code: int | None
    host: str
    launcher: int | None
    launcher_started: int | None
    node: str = ""
    restarts: int = 0
    begin: float | None = None
    reason: str = ""

    @property
    def is_here(self) -> bool:
        """Return whether its processes are of this machine."""
        return self.host == socket.gethostname()

    @property
    def process(self) -> psutil.Process | None:
        """Return its process, if that is on this machine, and lives."""
        return same_process(self.pid, self.started) if self.is_here else None

    @property
    def is_orphaned(self) -> bool:
        """Return whether its launcher is dead: what is not running does not start any more."""
        return self.is_here and same_process(self.launcher, self.launcher_started) is None

    def seen_as(self, name: str) -> TaskState:
        """Return its state in the words of `slurm.job_state`."""
        orphaned = self.is_orphaned
        match self.state:
            case "ENDED":
                return self._ended(name)
            case "PENDING" if not orphaned:
                return self._waiting(name)
            case "RUNNING" | "COMPLETING" if not self.is_here or self.process is not None:
                reason = LAUNCHER_ENDED if orphaned else ""
                return TaskState(name, self.state, reason, self.node, self.restarts)
            case _ if orphaned:
                return TaskState(name, "CANCELLED", LAUNCHER_ENDED, restarts=self.restarts)
        # its launcher has yet to see that its process has ended
        return TaskState(name, "COMPLETING", node=self.node, restarts=self.restarts)

    def _ended(self, name: str) -> TaskState:
        if self.exit_code is None:
            return TaskState(name, "CANCELLED", restarts=self.restarts)
        if self.exit_code == 0:
            return TaskState(name, "COMPLETED", restarts=self.restarts)
        code = self.exit_code
        why = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return TaskState(name, "FAILED", why, restarts=self.restarts)

    def _waiting(self, name: str) -> TaskState:
        in_s = None if self.begin is None or not self.is_here else self.begin - time.monotonic()
        if in_s is not None and in_s > 0:
            return TaskState(name, "PENDING", "BeginTime", restarts=self.restarts, starts_in_s=in_s)
        return TaskState(name, "PENDING", self.reason or "Resources", restarts=self.restarts)


class LocalQueue:
    """A local launcher's queue, for those who ask it for something: agents, and commands.

    Args:
        submission: The sweep's ``.hpc_elastic``.
        timeout_s: How long the launcher may take to carry out a request.
    """

    def __init__(self, submission: Submission, timeout_s: float = 10.0) -> None:
        self._submission = submission
        self._timeout_s = timeout_s

    def tasks(self, job_ids: Iterable[str], *, once: bool = False) -> dict[str, TaskState]:
        """Return all tasks of these jobs by name.

        Raises:
            LocalQueueError: the table can not be read.
        """
        wanted = set(job_ids)
        found = {n: entry for n, entry in self._entries().items() if job_of(n) in wanted}
        return {name: entry.seen_as(name) for name, entry in found.items()}

    def requeue(self, task: str) -> None:
        """Send a task back to the queue: it starts again once its process has ended.

        One that is on its way there already is no error. A process that does not end in time is
        killed.

        Raises:
            LocalQueueError: the launcher has ended, or does not answer.
        """
        entry = self._entries().get(task)
        if entry is not None:
            self._ask([{"do": "requeue", "task": task, "restarts": entry.restarts}])

    def postpone(self, tasks: Sequence[str], delay_s: float) -> None:
        """Let tasks that wait, or are on their way to the queue, not start for so long.

        It replaces what an earlier call said, longer or shorter.

        Raises:
            LocalQueueError: the launcher has ended, or does not answer.
        """
        begin = time.monotonic() + delay_s
        self._ask([{"do": "postpone", "task": task, "begin": begin} for task in tasks])

    def cancel(self, tasks: Sequence[str], *, pending_only: bool = False) -> None:
        """Do nothing: the launcher starts no task of a run that has ended or is cancelled."""

    def exclude(self, tasks: Sequence[str], hosts: Iterable[str]) -> None:
        """Do nothing: the launcher looks itself which nodes a run avoids."""

    def _entries(self) -> dict[str, LocalEntry]:
        try:
            return read_local_tasks(self._submission)
        except RunDirectoryError as e:
            raise LocalQueueError(str(e)) from e

    def _ask(self, requests: Sequence[dict[str, Any]]) -> None:
        """Leave requests for the launcher, and wait until they were carried out."""
        try:
            self._submission.local_requests.mkdir(exist_ok=True)
            files = [self._leave(request) for request in requests]
        except OSError as e:
            raise LocalQueueError(f"the launcher can not be asked: {e}") from e
        deadline = time.monotonic() + self._timeout_s
        while any(map(is_there, files)):
            if any(e.is_orphaned for n, e in self._entries().items() if n == requests[0]["task"]):
                self._withdraw(files, LAUNCHER_ENDED)
            if time.monotonic() > deadline:
                self._withdraw(files, f"the launcher has not answered for {self._timeout_s:g} s")
            time.sleep(_POLL_S)

    def _leave(self, request: dict[str, Any]) -> Path:
        name = f"{time.time_ns():020}-{os.getpid()}-{next(_numbers)}.json"
        file = self._submission.local_requests / name
        write_atomic(file, json.dumps(request))
        return file

    @staticmethod
    def _withdraw(files: Iterable[Path], why: str) -> None:
        for file in files:
            file.unlink(missing_ok=True)
        raise LocalQueueError(why)


def read_local_tasks(submission: Submission) -> dict[str, LocalEntry]:
    """Return the table of a submission by task name; empty if nothing was started from it yet.

    Raises:
        RunDirectoryError: it can not be read.
    """
    try:
        table = read_json(submission.local_tasks) or {}
        return {name: LocalEntry(**entry) for name, entry in table.items()}
    except (OSError, ValueError, TypeError) as e:
        raise RunDirectoryError(f"{submission.local_tasks} can not be read: {e}") from e


def started(pid: int) -> int | None:
    """Return when the process with a pid was made, in ticks since boot; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[_START_TIME])


def same_process(pid: int | None, made: int | None) -> psutil.Process | None:
    """Return a process by its pid and the time at which it was made; None if it is gone."""
    if pid is None or made is None or started(pid) != made:
        return None
    import psutil  # an agent of Slurm's needs it not

    try:
        process = psutil.Process(pid)
        return process if process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


# ---- A gang: the min part of a run as one job of several nodes, each with its agent
# To Slurm it is one job with one state. It is submitted with ``--no-kill``, so that it outlives
# the loss of a node, and Slurm then takes that node out of the job: node i of the job's list is
# no longer the node whose id is i. So the first nodes write down what the job was given.
#
# The batch script runs on the first node, and may die with it: the other agents go on, but
# nothing is left that would end the job after them, and Slurm would keep its nodes for as long as
# its time limit allows. The next few agents see to that. (Both measured on Slurm 22.05.)


_log = logging.getLogger(__name__)

DEPUTIES = 4
"""So many nodes, by their ids, do what must be done once for the gang, lest one may be lost."""

_ORPHANED_AFTER_S = 10.0
_STATES_POLL_S = 0.2
_LOST = "NODE_FAIL"


@dataclass(frozen=True)
class GangNodes:
    """The nodes that a gang was given in one attempt, by node id."""

    attempt: int
    hosts: tuple[str, ...]


def record(files: ArrayFiles, slurm: SlurmEnvironment) -> None:
    """Write down which nodes the gang has (its first agents, at their start).

    Raises:
        SlurmEnvironmentError: the node list of the step does not parse.
    """
    nodes = GangNodes(slurm.restart_count, tuple(slurm.hosts))
    if slurm.node_id < DEPUTIES and recorded(files) != nodes:
        text = json.dumps({"attempt": nodes.attempt, "hosts": nodes.hosts})
        write_atomic(files.nodes, text + "\n")


def recorded(files: ArrayFiles) -> GangNodes | None:
    """Return which nodes the gang had when it last started; None if nobody has written it down."""
    try:
        raw = read_json(files.nodes) or {}
        return GangNodes(int(raw["attempt"]), tuple(map(str, raw["hosts"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def run_states(spec: RunSpec, listed: Mapping[str, TaskState]) -> dict[str, TaskState]:
    """Return the states of a run's tasks out of what the scheduler lists, its gang's node by node.

    Args:
        spec: The run.
        listed: What the scheduler says, by its own names; of other runs' tasks, too.
    """
    return states_of(requeue.current_names(spec), listed, _gang_of(spec))


def _gang_of(spec: RunSpec) -> dict[str, GangNodes]:
    """Return the recorded nodes of the gang, whose slots are the first, by the job it is now."""
    job = requeue.jobs_of(spec)[0] if spec.coallocate_min else None
    if job is None:
        return {}
    nodes = recorded(Submission(Path(spec.submission)).array(spec.tasks[0][0]))
    return {job: nodes} if nodes else {}


def states_of(
    tasks: Iterable[str],
    listed: Mapping[str, TaskState],
    gangs: Mapping[str, GangNodes] | None = None,
) -> dict[str, TaskState]:
    """Return the states of tasks out of what squeue lists, where a gang is one line (pure).

    Args:
        tasks: Names of tasks, of both kinds.
        listed: What squeue says, by its own names.
        gangs: What is recorded of the gangs' nodes, by job id.

    Returns:
        By name, in the order given; without the tasks that squeue does not list.
    """
    states: dict[str, TaskState] = {}
    split: dict[str, Sequence[TaskState]] = {}
    for task in tasks:
        job, _, node_id = task.partition(".")
        if job not in listed:
            continue
        if not node_id:
            states[task] = listed[job]
            continue
        if job not in split:
            split[job] = _by_node(listed[job], (gangs or {}).get(job))
        nodes, at = split[job], int(node_id)
        states[task] = replace(nodes[at] if at < len(nodes) else listed[job], task=task)
    return states


def _by_node(job: TaskState, given: GangNodes | None) -> list[TaskState]:
    """Return a job's state as those of its nodes, by node id; without any where it has none."""
    now = _expanded(job.node)
    if given is None or job.restarts not in (given.attempt, None) or not now:
        return [replace(job, node=node) for node in now]
    runs = job.phase is Phase.RUNNING
    kept = set(now)
    return [
        replace(job, node=host, state=_LOST if runs and host not in kept else job.state)
        for host in given.hosts
    ]


def _expanded(nodes: str) -> list[str]:
    try:
        return nodelist.expand(nodes) if nodes else []
    except ValueError:
        return []


def mark_end(logs: Path, slurm: SlurmEnvironment) -> None:
    """Tell the deputies that the agent beside the batch script has ended by itself."""
    if slurm.node_id == 0:
        (logs / "ended").touch()


def end_if_orphaned(
    task: str,
    first_logs: Path,
    client: SlurmClient,
    *,
    wait_s: float = _ORPHANED_AFTER_S,
) -> bool:
    """Cancel the gang's job if its batch script is gone (deputies, once the run has ended).

    It is taken for gone where the agent beside it does not end as well: Slurm's own word on the
    node comes after minutes only. Where just that agent was killed, the job had nothing more to do.

    Args:
        task: This task.
        first_logs: Log folder of the gang's first task, in this attempt.
        client: How to reach Slurm.
        wait_s: How long the agents of a run take to end, at most.

    Returns:
        Whether the job was cancelled.
    """
    deadline = time.monotonic() + wait_s
    while not is_there(first_logs / "ended"):
        if time.monotonic() >= deadline:
            return _cancel(queue_name(task), client)
        time.sleep(_STATES_POLL_S)
    return False


def _cancel(job: str, client: SlurmClient) -> bool:
    _log.warning("the batch script of job %s is gone with its node: the job is cancelled", job)
    try:
        client.cancel([job])
    except SlurmError as e:
        _log.warning("job %s was not cancelled and holds its nodes: %s", job, e)
        return False
    return True


# ---- The tasks of a run, as the scheduler sees them: Slurm, or the local launcher's table


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
                still: it does not start there, unless Slurm has seen it (`slurm.requeue`).
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
    return CombinedRequests(run.departing, SlurmClient(), task, attempt)


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
                        requeue.avoid(run, name, node, self._client)
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
            self._client.exclude([*waiting.union(back)], requeue.excluded(run))
        if failures:
            raise failures[0]

    def _is_back(self, run: RunDir, name: str, state: TaskState) -> bool:
        """Requeue or replace a task that has ended; return whether it is held in the queue."""
        left = self._spec.requeues_left(state.restarts)
        facts = ExitFacts(Reason.LOST, state, run_ended=run.is_over, requeues_left=left)
        if state.phase is not Phase.ENDED or decide(facts) is not ExitAction.REQUEUE:
            return state.is_held or state.is_launch_held
        try:
            self._client.requeue(name)
        except SlurmCommandError as e:
            if not is_refused(e):
                raise
            requeue.resubmit(run, name, self._client)
            return False
        if run.is_over:  # cancelled meanwhile: it is not to come back
            self._client.cancel([name])
            return False
        return True

    def readmit(self, run: RunDir, tasks: Iterable[str]) -> None:
        """Ask about nodes only where one of these tasks avoids one for now."""
        requeue.readmit(run, tasks, self._client, time.time())

    def exclude(self, run: RunDir, hosts: Iterable[str], why: str) -> None:
        """Write it down first: a task that is requeued in the meantime looks there."""
        requeue.remember_excluded(run, hosts, why)
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
        jobs = dict.fromkeys(job for job in requeue.jobs_of(self._spec) if job)
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
            facts = ExitFacts(Reason.LOST, state, run_ended=run.is_over, requeues_left=left)
            if state.phase is Phase.ENDED and decide(facts) is ExitAction.REQUEUE:
                self._queue.requeue(name)
                back.append(name)
        if back:
            self._queue.postpone(back, RELEASE_DELAY_S)

    def readmit(self, run: RunDir, tasks: Iterable[str]) -> None:
        """Do nothing: no task avoids a node for a while only."""

    def exclude(self, run: RunDir, hosts: Iterable[str], why: str) -> None:
        """Write it down: the launcher looks there."""
        requeue.remember_excluded(run, hosts, why)

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


# ---- What is left of a run: its tasks that run or may still start, and how to end them
# For the commands that steer a run from outside. Slurm is asked about each of the run's jobs by
# itself: asked for several, it would tell of the caller's own only (`SlurmClient.tasks`), and
# root may steer others' runs. Processes of ``launcher=local`` are known by pid and start time,
# never by name.


class Tasks(Protocol):
    """The tasks of one run."""

    def left(self) -> dict[str, TaskState]:
        """Return those that have not ended, by name; a gang is one, by its job id.

        Raises:
            SlurmError: Slurm does not answer, so nobody knows.
            RunDirectoryError: they can not be seen from this machine.
        """
        ...

    def end(self, tasks: Iterable[TaskState]) -> None:
        """Tell tasks to end, and let them save what they have; those that wait never start.

        Raises:
            SlurmError: Slurm refuses.
            RunDirectoryError: they belong to somebody else.
        """
        ...

    def kill(self, tasks: Iterable[TaskState]) -> None:
        """End at once what was told to end and has not; Slurm does so by itself."""
        ...


def live_tasks(spec: RunSpec) -> Tasks:
    """Return the tasks of a run."""
    return SlurmJobs(spec) if spec.launcher == "slurm" else LocalProcesses(spec)


def moved(spec: RunSpec) -> str:
    """Say that the folder is gone in which the tasks of a run are written down (pure)."""
    remedy = "if the sweep directory was moved or renamed while the run goes on, move it back"
    return f"{spec.submission} is not there any more: {remedy}"


def kill_node(spec: RunSpec, task: str) -> None:
    """Kill the processes of one node at once, without notice; its task may come back.

    Args:
        spec: The run.
        task: The node's task, by its agent's name.

    Raises:
        SlurmError: Slurm refuses, or does not answer.
        RunDirectoryError: the processes are another user's, or `require_killable`.
    """
    require_killable(task)
    if spec.launcher == "slurm":
        SlurmClient().kill_steps(task)
    else:
        LocalProcesses(spec).kill([TaskState(task, "RUNNING")])


def require_killable(task: str) -> None:
    """Refuse a node of a gang.

    Raises:
        RunDirectoryError: it cannot be killed alone.
    """
    if "." in task:
        remedy = "preempt it, which the others survive, or end the run with hpc-elastic cancel"
        raise RunDirectoryError(f"{task} is a node of a gang, which Slurm kills as one: {remedy}")


class SlurmJobs:
    """The tasks of a run that are Slurm's.

    Args:
        spec: The run.
        client: The caller of Slurm's commands.
    """

    def __init__(self, spec: RunSpec, client: SlurmClient | None = None) -> None:
        self._spec = spec
        self._client = client or SlurmClient()

    def left(self) -> dict[str, TaskState]:
        """Ask squeue once for each job; those that it has forgotten have ended."""
        jobs = requeue.all_jobs(self._spec)
        names = [place.queue_name(job) for place, ids in jobs.items() for job in ids]
        listed: dict[str, TaskState] = {}
        for job in dict.fromkeys(map(job_of, names)):
            listed |= self._client.tasks([job])
        found = {name: listed[name] for name in names if name in listed}
        return {n: state for n, state in found.items() if state.phase is not Phase.ENDED}

    def end(self, tasks: Iterable[TaskState]) -> None:
        """Cancel them by name, with one scancel; those that are being ended already are left."""
        self._client.cancel([t.task for t in tasks if t.phase is not Phase.LEAVING])

    def kill(self, tasks: Iterable[TaskState]) -> None:
        """Do nothing: Slurm kills after its KillWait."""


class LocalProcesses:
    """The tasks of a run that are processes of this machine."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._submission = Submission(Path(spec.submission))

    def left(self) -> dict[str, TaskState]:
        """Read the launcher's table, and see which of its processes live."""
        entries = self._entries()
        for name, entry in entries.items():
            if entry.state != "ENDED" and not entry.is_here:
                where, remedy = entry.host, f"call this command on {entry.host}"
                why = f"{name} is a process on {where}, not on this machine: {remedy}"
                raise RunDirectoryError(why)
        states = {name: entry.seen_as(name) for name, entry in entries.items()}
        return {n: state for n, state in states.items() if state.phase is not Phase.ENDED}

    def end(self, tasks: Iterable[TaskState]) -> None:
        """Send SIGTERM to each agent; the launcher starts no further task of a cancelled run."""
        for process in self._processes(tasks):
            _signal(process, signal.SIGTERM)

    def kill(self, tasks: Iterable[TaskState]) -> None:
        """Send SIGKILL to the agents and to all that they have started."""
        import psutil

        for process in self._processes(tasks):
            family = [process]
            with contextlib.suppress(psutil.Error):
                family += process.children(recursive=True)
            for member in family:
                _signal(member, signal.SIGKILL)

    def _entries(self) -> dict[str, LocalEntry]:
        table = read_local_tasks(self._submission)
        names = self._spec.task_names(self._submission.job_ids())
        return {name: table[name] for name in names if name in table}

    def _processes(self, tasks: Iterable[TaskState]) -> list[psutil.Process]:
        entries = self._entries()
        found = (entries[task.task].process for task in tasks if task.task in entries)
        return [process for process in found if process is not None]


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    import psutil

    try:
        process.send_signal(number)  # psutil looks once more whether the pid is still its own
    except psutil.NoSuchProcess:
        pass
    except psutil.AccessDenied as e:
        who = f"process {process.pid} is another user's"
        raise RunDirectoryError(f"{who}: only that user, or root, can end it") from e
