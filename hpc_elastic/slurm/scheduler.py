"""The tasks of a run in their queue: Slurm's, or that of ``launcher=local``.

Leaders, agents, the launcher and the commands use `Scheduler`. It lists the tasks of one run by the
names of their agents, and cancels, kills, postpones, restarts and excludes. Which
task restarts is decided in `exit_action`. The queue below it is a `SlurmClient` or a
`local_queue.LocalQueue`; both have the operations of `requeue.TaskQueue`. `take_snapshot` lists the
tasks of many runs.

A **co-allocated job**, the minimum of a run as one job of several nodes, is one line in the queue.
It is submitted with ``--no-kill``, so it outlives the loss of a node. Slurm then takes that node
out of the job, and node i of the job's list is no longer the node with the id i. So the first
agents of the job record its nodes when they start. The batch script runs on the first node and may
be lost with it. Then nothing ends the job after the other agents, and Slurm keeps its nodes until
the time limit. So the agents of the next nodes cancel the job at the end of the run. (Measured on
22.05.)
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from hpc_elastic.errors import LocalQueueError, RunDirectoryError, SlurmCommandError, SlurmError
from hpc_elastic.run import job_of, node_of, queue_name
from hpc_elastic.run.directory import ArrayFiles, RunDir, RunSpec, Submission
from hpc_elastic.shared_files import is_there, read_json, read_text, write_atomic
from hpc_elastic.slurm import nodelist, quarantine, run_tasks
from hpc_elastic.slurm.client import RELEASE_DELAY_S, SlurmClient
from hpc_elastic.slurm.combined_requests import FEWEST, CombinedRequests
from hpc_elastic.slurm.environment import SlurmEnvironment
from hpc_elastic.slurm.exit_action import ExitAction, ExitFacts, Reason, decide
from hpc_elastic.slurm.job_state import Phase, TaskState
from hpc_elastic.slurm.local_queue import LocalQueue
from hpc_elastic.slurm.parsing import JobIdentity, is_refused
from hpc_elastic.slurm.requeue import TaskQueue
from hpc_elastic.slurm.run_tasks import current_names

_log = logging.getLogger(__name__)


def task_queue(
    spec: RunSpec, run: RunDir | None = None, task: str = "", attempt: int | None = None
) -> TaskQueue:
    """Return the queue that holds the tasks of a run.

    With ``run``, the requests of ``task`` are combined with those of tasks that leave their nodes
    at the same time; ``attempt`` is the number of its requeues.
    """
    queue = own_queue(spec)
    if run is None or spec.settings.nodes.max < FEWEST or isinstance(queue, LocalQueue):
        return queue
    return CombinedRequests(run.departing, queue, task, attempt)


def own_queue(spec: RunSpec) -> SlurmClient | LocalQueue:
    """Return the queue of the tasks of a run."""
    local = spec.settings.backend == "local"
    return LocalQueue(Submission(Path(spec.submission))) if local else SlurmClient()


class Scheduler:
    """The tasks of one run. All calls may block for seconds.

    Unless stated otherwise, methods raise `SlurmError` or `LocalQueueError` if the queue does not
    answer or refuses, and `OSError` if the files of the submission cannot be read.
    """

    def __init__(
        self, run: RunDir, spec: RunSpec, queue: SlurmClient | LocalQueue | None = None
    ) -> None:
        self._run = run
        self._spec = spec
        self._queue = queue or own_queue(spec)
        self._is_silent = False
        self._launch_failed_on: dict[tuple[str, int | None], str] = {}
        """Node that could not start an attempt which Slurm holds; "" if it is not known."""

    # ---- list

    def list_tasks(self) -> dict[str, TaskState]:
        """Return the tasks that the queue lists, by the names of their agents."""
        states = run_states(self._spec, self._list_jobs())
        return {name: self._with_node(state) for name, state in states.items()}

    def poll_tasks(self) -> dict[str, TaskState] | None:
        """Return `list_tasks`, or None if unknown: the queue does not answer (logged once)."""
        try:
            states = self.list_tasks()
        except (SlurmError, LocalQueueError) as e:
            if not self._is_silent:
                _log.warning("the scheduler does not answer; timeouts decide instead: %s", e)
            self._is_silent = True
            return None
        self._is_silent = False
        return None if isinstance(self._queue, LocalQueue) and not states else states

    def is_running(self, task: str) -> bool | None:
        """Return whether a task is RUNNING; None if unknown."""
        states = self.poll_tasks()
        return None if states is None else task in states and states[task].phase is Phase.RUNNING

    def list_live_tasks(self) -> dict[str, TaskState]:
        """Return the tasks that have not ended, and those that they replaced, by queue name.

        A co-allocated job is one task. Slurm is queried for each job alone: for several jobs it
        lists those of the caller only, and root may cancel runs of other users. Raises
        RunDirectoryError if a task is a process on another machine.
        """
        jobs = run_tasks.all_jobs(self._spec)
        names = [place.queue_name(job) for place, ids in jobs.items() for job in ids]
        if isinstance(self._queue, LocalQueue):
            self._queue.require_this_machine(names)
        listed: dict[str, TaskState] = {}
        for job in dict.fromkeys(map(job_of, names)):
            listed |= self._queue.tasks([job])
        found = {name: listed[name] for name in names if name in listed}
        return {name: state for name, state in found.items() if state.phase is not Phase.ENDED}

    # ---- end

    def require_own_jobs(self, tasks: Iterable[str]) -> None:
        """Refuse tasks that are none of this run, although its files name them.

        A job runs the batch script of its array, or a copy that the user has submitted by hand. A
        local process has the command line of its task. Tasks that have ended are passed over.
        Raises RunDirectoryError, which names the job or the process.
        """
        if isinstance(self._queue, LocalQueue):
            self._queue.require_agents(tasks)
            return
        submission = Submission(Path(self._spec.submission))
        wanted = set(map(job_of, map(queue_name, tasks)))
        arrays = {
            job: submission.array(place.array)
            for place, jobs in run_tasks.all_jobs(self._spec).items()
            for job in jobs
            if job in wanted
        }
        for job, found in self._queue.identities(arrays).items():
            if job in arrays and not _runs_array(found, arrays[job]):
                what = f"is `{found.name}`, with the batch script {found.script} in {found.cwd}"
                why = f"{arrays[job].job_id_file.parent} names job {job}, which {what}"
                remedy = f"nothing was cancelled; to cancel that job: scancel {job}"
                raise RunDirectoryError(f"{why}: it is no task of this run; {remedy}")

    def cancel_tasks(self, tasks: Iterable[TaskState]) -> None:
        """End tasks for good: SIGTERM, so that they can save. Pending tasks never start.

        Tasks whose processes are being ended are left alone. Slurm sends SIGKILL after KillWait;
        local processes need `kill_task`. Raises RunDirectoryError if the processes belong to
        another user.
        """
        self._queue.cancel([task.task for task in tasks if task.phase is not Phase.COMPLETING])

    def cancel_pending(self) -> None:
        """Remove the run's pending tasks from the queue."""
        self._queue.cancel(current_names(self._spec), pending_only=True)

    def kill_task(self, task: str) -> None:
        """Send SIGKILL to a task; it may be requeued. Raises as `require_killable`."""
        require_killable(task)
        if isinstance(self._queue, LocalQueue):
            self._queue.kill(task)
        else:
            self._queue.kill_steps(task)

    # ---- start

    def postpone_pending(self, delay_s: float) -> None:
        """Let no pending task start before `delay_s` seconds from now."""
        tasks = self.list_tasks().items()
        if pending := [name for name, state in tasks if state.phase is Phase.PENDING]:
            self._queue.postpone(pending, delay_s)

    def restart_tasks(
        self,
        tasks: Iterable[str],
        possibly_alive: Mapping[str, str] = {},
        failed_on: Mapping[str, Sequence[str]] = {},
    ) -> None:
        """Let tasks that were lost or have left start again as soon as a node is free.

        A task that Slurm holds is released. One that has ended is requeued, or replaced if Slurm
        refuses. One that runs, is being ended or was cancelled is left alone; call again later. A
        failure for one task does not keep the others from restarting: the first SlurmError,
        LocalQueueError or OSError (a replacement could not be recorded) is raised at the end.

        ``possibly_alive`` has the node on which a task's last attempt may still run, because its
        end was not observed: it avoids this node (`quarantine`), unless Slurm has observed the end.
        ``failed_on`` are nodes on which it failed before it joined: it avoids them too.
        """
        listed = self._list_jobs()
        own = set(current_names(self._spec))
        known = [name for name in tasks if name in own and queue_name(name) in listed]
        states = {queue_name(name): listed[queue_name(name)] for name in known}
        alive_on: dict[str, list[str]] = {name: [] for name in states}
        for name in filter(possibly_alive.__contains__, known):
            alive_on[queue_name(name)].append(possibly_alive[name])
        restarted: list[str] = []
        failures: list[Exception] = []
        for name, state in states.items():
            try:
                if self._is_requeued(name, state):
                    self._prepare_start(name, state, alive_on[name], failed_on.get(name, ()))
                    restarted.append(name)
            except (SlurmError, LocalQueueError, OSError) as e:
                failures.append(e)
        limits: dict[float | None, list[str]] = {}
        for name in restarted:
            limits.setdefault(run_tasks.limit_of(self._spec, name), []).append(name)
        for limit_s, names in limits.items():
            self._queue.postpone(names, RELEASE_DELAY_S, time_limit_s=limit_s)
        waiting = {name for name, state in states.items() if state.phase is Phase.PENDING}
        if starting := waiting.union(restarted):
            self._queue.exclude([*starting], quarantine.excluded(self._run))
        if failures:
            raise failures[0]

    def _is_requeued(self, name: str, state: TaskState) -> bool:
        """Requeue or replace a task that has ended; return whether it is held in the queue."""
        left = self._spec.requeues_left(state.restarts)
        facts = ExitFacts(Reason.LOST, state, run_ended=self._run.is_over, requeues_left=left)
        if state.phase is not Phase.ENDED or decide(facts) is not ExitAction.REQUEUE:
            return state.is_held or state.is_launch_held
        try:
            self._queue.requeue(name)
        except SlurmCommandError as e:
            if not is_refused(e) or isinstance(self._queue, LocalQueue):
                raise
            run_tasks.resubmit(self._run, name, self._queue)
            return False
        if self._run.is_over:  # cancelled since `facts` were read
            self._queue.cancel([name])
            return False
        return True

    def _prepare_start(
        self, name: str, state: TaskState, alive_on: Sequence[str], failed_on: Sequence[str]
    ) -> None:
        """Let a task of Slurm's avoid nodes, and release it if a node could not start it."""
        if isinstance(self._queue, LocalQueue):
            return
        was_unobserved = state.phase is Phase.PENDING or state.state == _NODE_FAIL
        for node in alive_on if was_unobserved else ():
            quarantine.quarantine_node(self._run, name, node, self._queue)
        self._queue.exclude([name], failed_on)
        if state.is_launch_held:
            self._queue.end_hold(name)

    # ---- nodes

    def readmit(self, tasks: Iterable[str]) -> None:
        """End exclusions, and let lost tasks start on nodes where nothing of them runs any more."""
        self.end_exclusions()
        if not isinstance(self._queue, LocalQueue):
            quarantine.lift_quarantine(self._run, tasks, self._queue, time.time())

    def exclude_nodes(self, hosts: Iterable[str], why: str, until: float) -> None:
        """Let no task of the run start on these nodes until a time, in Unix seconds.

        The exclusion is recorded first, for tasks that are requeued in the meantime. The next
        `end_exclusions` after that time ends it.
        """
        quarantine.remember_excluded(self._run, hosts, why, until)
        tasks = self.list_tasks().items()
        if waiting := [name for name, state in tasks if state.phase is not Phase.ENDED]:
            self._queue.exclude(waiting, hosts)

    def end_exclusions(self) -> None:
        """Let tasks start on nodes whose exclusion has ended and that are not in quarantine."""
        now = time.time()
        known = quarantine.excluded(self._run).items()
        over = {host for host, exclusion in known if exclusion.until <= now}
        if not over:
            return
        states = {} if isinstance(self._queue, LocalQueue) else self.list_tasks()
        waiting = [queue_name(n) for n, state in states.items() if state.phase is not Phase.ENDED]
        for host in sorted(over):
            avoiding = [n for n in waiting if not is_there(self._run.avoided / f"{n}@{host}")]
            self._queue.exclude(avoiding, (), but=[host])
        quarantine.forget_excluded(self._run, now)
        _log.info("the run may start on %s again", ", ".join(sorted(over)))

    def _list_jobs(self) -> dict[str, TaskState]:
        """Return what the queue lists of the run's jobs, by queue name; also of other runs."""
        return self._queue.tasks(run_tasks.jobs_of(self._spec))

    def _with_node(self, state: TaskState) -> TaskState:
        """Return a state; if Slurm holds the task, with the node that could not start it."""
        if not state.is_launch_held or isinstance(self._queue, LocalQueue):
            return state
        key = state.task, state.restarts
        if key not in self._launch_failed_on:
            self._launch_failed_on[key] = self._queue.refused_by(state.task) or ""
        return replace(state, node=self._launch_failed_on[key])


def _runs_array(job: JobIdentity, files: ArrayFiles) -> bool:
    if job.script == str(files.script):
        return True
    with contextlib.suppress(OSError):  # a copy, see `hpc-elastic submit --dry-run --output`
        if str(files.tasks) in read_text(Path(job.script).resolve(), errors="replace"):
            return True
    try:  # read from a pipe, or removed since
        lines = set(read_text(files.script, errors="replace").splitlines())
    except OSError:
        return False
    flags = {"job-name": job.name, "chdir": job.cwd}.items()
    return all(
        not lines.isdisjoint((f"#SBATCH --{flag}={value}", f"#SBATCH --{flag}='{value}'"))
        for flag, value in flags
    )


def require_killable(task: str) -> None:
    """Raise RunDirectoryError for a node of a co-allocated job: Slurm kills them together only."""
    if "." in task:
        what = f"{task} is a node of a co-allocated job, which Slurm kills as one"
        remedy = "preempt it, which the others survive, or end the run with hpc-elastic cancel"
        raise RunDirectoryError(f"{what}: {remedy}")


# ---- The tasks of many runs


@dataclass(frozen=True)
class QueueSnapshot:
    """The tasks of some runs at one moment.

    ``slurm_error`` is why Slurm did not answer; ``unreadable`` has the submission folders whose
    files are unreadable, or were moved, with the reason.
    """

    listed: Mapping[str, TaskState] = field(default_factory=dict)
    slurm_error: str | None = None
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def tasks_of(self, spec: RunSpec) -> dict[str, TaskState] | None:
        """Return the listed tasks of a run, by the names of their agents; None if unknown."""
        return None if self.why_unknown(spec) is not None else run_states(spec, self.listed)

    def why_unknown(self, spec: RunSpec) -> str | None:
        """Return why the tasks of a run are unknown; None if they are known."""
        if spec.settings.backend == "local" or spec.submission in self.unreadable:
            return self.unreadable.get(spec.submission)
        return None if self.slurm_error is None else f"Slurm does not answer: {self.slurm_error}"


def take_snapshot(specs: Sequence[RunSpec], client: SlurmClient | None = None) -> QueueSnapshot:
    """Return the tasks of runs: one call of squeue for all, one table for each local sweep.

    For several jobs squeue lists those of the caller only, so others are listed one by one.
    """
    from hpc_elastic.run.registry import user  # agents do without

    me, client = user(), client or SlurmClient()
    listed: dict[str, TaskState] = {}
    unreadable: dict[str, str] = {}
    own, others = dict[str, None](), dict[str, None]()
    local: dict[str, list[str]] = {}
    for spec in specs:
        if not Path(spec.submission).is_dir():
            unreadable[spec.submission] = moved(spec)
        jobs = list(map(job_of, current_names(spec)))
        if spec.settings.backend == "local":
            local.setdefault(spec.submission, []).extend(jobs)
        else:
            is_own = spec.provenance.get("user", me) == me
            (own if is_own else others).update(dict.fromkeys(jobs))
    for folder, jobs in local.items():
        if folder not in unreadable:
            try:
                listed |= LocalQueue(Submission(Path(folder))).tasks(jobs)
            except LocalQueueError as e:
                unreadable[folder] = str(e)
    try:
        for group in filter(None, [list(own), *([job] for job in others)]):
            listed |= client.tasks(group, once=len(specs) > 1)
    except SlurmError as e:
        return QueueSnapshot(listed, str(e), unreadable)
    return QueueSnapshot(listed, None, unreadable)


def moved(spec: RunSpec) -> str:
    """Return the error for a run whose submission folder does not exist (pure)."""
    remedy = "if the sweep directory was moved or renamed while the run goes on, move it back"
    return f"{spec.submission} does not exist: {remedy}"


# ---- Co-allocated jobs


NUM_RECORDERS = 4
"""Number of nodes of a co-allocated job, by their ids, that record its nodes and cancel it. One may
be lost."""

_ORPHANED_AFTER_S = 10.0
_POLL_S = 0.2
_NODE_FAIL = "NODE_FAIL"


@dataclass(frozen=True)
class JobNodes:
    """The nodes that a co-allocated job had in one attempt, by node id."""

    attempt: int
    hosts: tuple[str, ...]


def record_job_nodes(files: ArrayFiles, slurm: SlurmEnvironment) -> None:
    """Record the nodes of the job (its first agents, when they start)."""
    nodes = JobNodes(slurm.restart_count, tuple(slurm.hosts))
    if slurm.node_id < NUM_RECORDERS and read_job_nodes(files) != nodes:
        write_atomic(files.nodes, json.dumps(asdict(nodes)) + "\n")


def read_job_nodes(files: ArrayFiles) -> JobNodes | None:
    """Return the nodes that were recorded of a co-allocated job's last attempt; None if unknown."""
    try:
        raw = read_json(files.nodes) or {}
        return JobNodes(int(raw["attempt"]), tuple(map(str, raw["hosts"])))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def run_states(spec: RunSpec, listed: Mapping[str, TaskState]) -> dict[str, TaskState]:
    """Return the states of a run's tasks by agent; ``listed`` may have other runs' tasks."""
    given = None
    if spec.settings.num_coallocated > 0:  # its slots are the first
        given = read_job_nodes(Submission(Path(spec.submission)).array(spec.tasks[0][0]))
    return states_of(run_tasks.slots_of(spec), listed, given)


def states_of(
    slots: Mapping[str, int], listed: Mapping[str, TaskState], given: JobNodes | None = None
) -> dict[str, TaskState]:
    """Return the states of agents' tasks, where a co-allocated job is one line (pure)."""
    states: dict[str, TaskState] = {}
    nodes: list[TaskState] | None = None
    for task, slot in slots.items():
        state, node = listed.get(queue_name(task)), node_of(task)
        if state is None:
            continue
        if node is not None:
            nodes = _by_node(state, given) if nodes is None else nodes
            state = nodes[node] if node < len(nodes) else state
        states[task] = replace(state, task=task, slot=slot)
    return states


def _by_node(job: TaskState, given: JobNodes | None) -> list[TaskState]:
    """Return the state of a job for each of its nodes, by node id; none while it has no node."""
    try:
        now = nodelist.expand(job.node) if job.node else []
    except ValueError:
        now = []
    if given is None or job.restarts not in (given.attempt, None) or not now:
        return [replace(job, node=node) for node in now]
    lost = set(given.hosts).difference(now) if job.phase is Phase.RUNNING else ()
    return [
        replace(job, node=host, state=_NODE_FAIL if host in lost else job.state)
        for host in given.hosts
    ]


def mark_agent_ended(logs: Path, slurm: SlurmEnvironment) -> None:
    """Record that the agent beside the batch script has ended, for `cancel_if_orphaned`."""
    if slurm.node_id == 0:
        (logs / "ended").touch()


def cancel_if_orphaned(
    task: str, first_logs: Path, client: SlurmClient, *, wait_s: float = _ORPHANED_AFTER_S
) -> bool:
    """Cancel a co-allocated job that has lost its batch script (its next nodes, after the end).

    The script counts as lost if the agent beside it does not end within ``wait_s``: Slurm reports
    the node after minutes only. If that agent alone was killed, the job has nothing left to do
    either. ``first_logs`` is the log folder of the job's first task in this attempt. Returns
    whether the job was cancelled.
    """
    deadline = time.monotonic() + wait_s
    while not is_there(first_logs / "ended") and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if is_there(first_logs / "ended"):
        return False
    job = queue_name(task)
    _log.warning("the batch script of job %s was lost with its node: the job is cancelled", job)
    try:
        client.cancel([job])
    except SlurmError as e:
        _log.warning("job %s was not cancelled and holds its nodes: %s", job, e)
        return False
    return True
