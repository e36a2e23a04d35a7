"""Requeue of a task by itself; replacement of one that Slurm does not requeue; avoided nodes.

`exit_action` decides; here the decision is carried out, from within the task.

The two minutes. When the last process of a requeued attempt has ended, and the epilog with it,
Slurm looks at the task's start time, and *only if it lies in the past* sets it to two minutes
ahead. So the attempt that ends sets the start of the next one: `scontrol requeue`, and then
`scontrol update starttime=now+D`, with D longer than it takes to end. Of 96 tries of array elements
with D = 3, 5, 10 and 30 s, after a preemption and without one, each started D seconds later, and
none was FAILED or had its credential revoked. Where D is too short (2 s and a process that ended
0.7 s later, 5 s and an epilog of 7 s), the task is held for the two minutes, as without a start
time: it is never worse than that, and a peer may release it then.

In a job of several nodes each agent does all this for the one job. One requeue is carried out; the
others fail because the job is pending; each postpones the start once more, so that the last agent
to end counts. Late ones find the job COMPLETING, with one restart more than their attempt: that too
distinguishes a requeue from a cancellation.

(Measured on Slurm 22.05; scontrol(1), slurm.conf(5) GraceTime.)
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, cast

from hpc_elastic.errors import LocalQueueError, RunDirectoryError, SlurmCommandError
from hpc_elastic.run.directory import ArrayFiles, RunDir, RunSpec, Submission, task_name
from hpc_elastic.shared_files import (
    create_atomic,
    is_there,
    make_folder,
    read_json,
    read_text,
    write_atomic,
)
from hpc_elastic.slurm import parsing
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.exit_action import ExitAction, ExitFacts, Reason, decide, row_of
from hpc_elastic.slurm.job_state import TaskState, job_of, queue_name

_log = logging.getLogger(__name__)

RETURN_DELAY_S = 10.0
"""Seconds from the moment in which a task requeues itself until it may start again.

Longer than it takes for its last process, and the site's epilog, to end. Without an epilog 3 s are
enough for a process that ends within one. Too long costs the difference, too short two minutes.
"""

PARENT_REQUEUES = "HPC_ELASTIC_PARENT_REQUEUES"
"""Set where the agent's parent requeues the task, as submitit does: nothing is done here then."""

_KILLED_WITHIN_S = 120.0
"""Longer than Slurm's KillWait (30 s by default) between its SIGTERM and its SIGKILL."""
_TRIES = 10
_AGAIN_S = 3.0, 9.0
"""Between two tries, at random: all tasks of a run may query a controller that just came back."""
_FAILURES = (SlurmCommandError, LocalQueueError)


class TaskQueue(Protocol):
    """Operations of a queue: `SlurmClient`, `LocalQueue` (launcher=local), `CombinedRequests`."""

    def tasks(self, job_ids: Iterable[str]) -> dict[str, TaskState]:
        """Return the tasks of these jobs by name."""

    def requeue(self, task: str) -> None:
        """Send a task back to the queue."""

    def postpone(
        self, tasks: Sequence[str], delay_s: float, *, time_limit_s: float | None = None
    ) -> None:
        """Let pending tasks not start before `delay_s` from now, and then run for so long."""

    def exclude(
        self, tasks: Sequence[str], hosts: Iterable[str], *, but: Iterable[str] = ()
    ) -> None:
        """Let pending tasks not start on some nodes, but on others again."""

    def cancel(self, tasks: Sequence[str], *, pending_only: bool = False) -> None:
        """Cancel tasks; with `pending_only`, those that have no node."""


def predict_exit_action(
    task: str, client: TaskQueue, *, attempt: int | None = None, reason: Reason = Reason.SIGNAL
) -> ExitAction | None:
    """Return how this task would exit now, and do nothing (its agent, after a notice).

    The arguments are those of `requeue_or_exit`.

    Returns:
        EXIT: it was cancelled, there is nothing to wait for; STAY: the notice means nothing;
        others: it comes back. None if unknown: Slurm does not answer.
    """
    try:
        return decide(_facts(task, client, attempt, reason, None))
    except _FAILURES as e:
        _log.warning("the meaning of the notice is unknown: %s", e)
        return None


def requeue_or_exit(
    task: str,
    client: TaskQueue,
    *,
    attempt: int | None = None,
    reason: Reason = Reason.SIGNAL,
    run: RunDir | None = None,
    note: Callable[[ExitFacts], None] = lambda facts: None,
) -> ExitAction:
    """Go back to the queue if the task is to come back; return how it exits.

    The task may end at once after that, and should within seconds. Where Slurm, or the run's
    directory, does not answer, that is tried again for about a minute; then this call waits until
    Slurm has killed the task: one that was preempted it requeues by itself.
    From here on the process ignores SIGTERM (if this is its main thread).

    Args:
        task: The task this process is: ``<array job id>_<index>``, a job id, or
            ``<job id>.<node id>``.
        client: The queue.
        attempt: The attempt of the task that this process is, None if unknown.
        reason: Why it exits.
        run: Its run: whether that has ended, which nodes it avoids, and where another task is
            submitted in place of one that Slurm will not requeue. None: none of that is done.
        note: Receives the facts before anything is done.

    Returns:
        REQUEUE, REQUEUED and REPLACE: the node comes back; EXIT: it does not; STAY: Slurm could
        not be reached, or the task is only suspended.
    """
    delay_s = RETURN_DELAY_S
    with _deaf_to_sigterm(for_good=True):
        try:
            return _retry(lambda: _carry_out(task, client, attempt, reason, delay_s, run, note))
        except (*_FAILURES, OSError) as e:
            _log.warning("not requeued by ourselves, waiting for the scheduler to do it: %s", e)
            time.sleep(_KILLED_WITHIN_S)
            return ExitAction.STAY


def requeue_after(
    task: str,
    client: TaskQueue,
    delay_s: float,
    *,
    attempt: int | None = None,
    run: RunDir | None = None,
) -> ExitAction:
    """Requeue a task that cannot use its node, to start in `delay_s` seconds at the earliest.

    The other arguments are those of `requeue_or_exit`, and what fails is tried again as there. A
    delay below `RETURN_DELAY_S` counts as that. The last process should end within it; if it takes
    longer, Slurm's two minutes follow. From here on the process ignores SIGTERM (if this is its
    main thread), unless this call fails.

    Returns:
        EXIT if the task was cancelled in the meantime, or its run has ended; else it comes back.

    Raises:
        SlurmCommandError: Slurm cannot be reached or refuses; the task still has its node. A
            SIGTERM that came during the call is lost.
        LocalQueueError: The local launcher does not answer; likewise.
        OSError: The run's directory cannot be read; likewise.
    """
    delay_s = max(delay_s, RETURN_DELAY_S)
    with _deaf_to_sigterm():
        return _retry(lambda: _carry_out(task, client, attempt, Reason.ASKED, delay_s, run))


@contextlib.contextmanager
def _deaf_to_sigterm(*, for_good: bool = False) -> Iterator[None]:
    """Ignore the SIGTERM that Slurm sends with a requeue; after an error, only if `for_good`.

    Off the main thread nothing is changed: handlers can be set there only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    except BaseException:
        if not for_good:
            signal.signal(signal.SIGTERM, handler)
        raise


def _retry(act: Callable[[], ExitAction]) -> ExitAction:
    """Do what may be done twice, until it works once; raise the last error."""
    for _ in range(_TRIES - 1):
        try:
            return act()
        except (*_FAILURES, OSError) as e:
            pause_s = random.uniform(*_AGAIN_S)
            _log.warning("to be tried again in %.0f s: %s", pause_s, e)
            time.sleep(pause_s)
    return act()


def _facts(
    task: str, client: TaskQueue, attempt: int | None, reason: Reason, run: RunDir | None
) -> ExitFacts:
    state = client.tasks([job_of(task)]).get(queue_name(task))
    if state is not None and state.state == "PENDING" and state.restarts == attempt:
        raise SlurmCommandError(["squeue"], 0, f"its answer is older than this attempt of {task}")
    if run is None:
        return ExitFacts(reason, state, attempt)
    try:
        spec = run.load()
    except RunDirectoryError as e:  # then it forbids nothing
        _log.warning("launcher.max_requeues is ignored: %s", e)
        return ExitFacts(reason, state, attempt, run_ended=run.is_over)
    left = spec.requeues_left(attempt)
    ended = run.is_over or not is_of(spec, task)
    return ExitFacts(reason, state, attempt, run_ended=ended, requeues_left=left)


def _carry_out(
    task: str,
    client: TaskQueue,
    attempt: int | None,
    reason: Reason,
    delay_s: float,
    run: RunDir | None,
    note: Callable[[ExitFacts], None] = lambda facts: None,
) -> ExitAction:
    """Do what is decided; set the time at which a task that comes back may start."""
    facts = _facts(task, client, attempt, reason, run)
    note(facts)
    how = decide(facts)
    _log.info("%s: %s, so %s", task, row_of(facts).name, how.value)
    if PARENT_REQUEUES in os.environ:
        return how
    if how is ExitAction.REQUEUE:
        try:
            client.requeue(task)
        except SlurmCommandError as e:
            if not parsing.is_refused(e):
                raise
            how = decide(replace(facts, refused=True))
            _log.warning("Slurm does not requeue %s, so %s: %s", task, how.value, e)
        else:
            if run is not None and run.is_over:
                _log.warning("%s: the run was cancelled meanwhile: not requeued", task)
                client.cancel([task])
                return ExitAction.EXIT
    if how is ExitAction.REPLACE:
        slurm = cast(SlurmClient, client)  # the local launcher refuses nothing
        made = None if run is None else resubmit(run, task, slurm)
        return ExitAction.EXIT if made is None else how
    if how in (ExitAction.REQUEUE, ExitAction.REQUEUED):
        try:
            client.postpone([task], delay_s, time_limit_s=_full_limit_s(run, task))
        except _FAILURES as e:
            _log.warning("%s may start again late, or too soon: %s", task, e)
        hosts, over = ([], []) if run is None else _avoided_nodes(run, task)
        try:
            if hosts or over:
                client.exclude([task], hosts, but=over)
        except _FAILURES as e:
            _log.warning("%s may start on %s again: %s", task, ", ".join(sorted(hosts)), e)
    return how


def _avoided_nodes(run: RunDir, task: str) -> tuple[list[str], list[str]]:
    """Return the nodes that a task avoids from now on, and those whose exclusion has ended."""
    known, now = _known_excluded(run), time.time()
    hosts = [host for host, exclusion in known.items() if exclusion.until > now]
    quarantine = f"{queue_name(task)}@"
    over = [h for h in known if h not in hosts and not is_there(run.avoided / (quarantine + h))]
    return hosts, over


def _full_limit_s(run: RunDir | None, task: str) -> float | None:
    """Return the limit that a task gets again; None if no limit of the run was changed.

    A task keeps the short limit with which it filled a hole (`time_slots`).
    """
    try:
        return None if run is None else limit_of(run.load(), task)
    except RunDirectoryError:
        return None


def limit_of(spec: RunSpec, task: str) -> float | None:
    """Return the time limit of a task that returns to the queue; None if its limit is fixed."""
    if all(share.restored_limit_s is None for _, share in spec.shares):
        return None  # without a look at the submission's files
    found = _find(spec, task)
    if found is None:
        return None
    return spec.of_slot(places(spec).index(found[0])).restored_limit_s


# ---- Another task in the place of one that Slurm will not requeue; and the nodes that a run avoids
# Slurm refuses to requeue what was submitted with ``--no-requeue``, on a site's orders, once it has
# ended. The same script is submitted again then, for the one element of its array (or for the
# co-allocated job): the new task finds its run and its slot by its index, as the first one did, and
# has a name of its own, hence logs of its own.
#
#     <sweep>/.hpc_elastic/array-<k>.replaced/<index>.<n>   job id of the n-th task in that place
#                                            /job.<n>       the same for a co-allocated job
#     <run>/excluded_nodes.json                             nodes that the run's tasks avoid
#
# Exactly one. Several peers may see that a task is lost. Each submits, with a start ten minutes
# ahead, and then creates the next number by link(2): the peer whose link is made has replaced the
# task, and releases it; the others cancel theirs. A peer that dies in between leaves a task that
# starts ten minutes later: either the record names it, or it joins as one node more, and ends with
# the run.
#
# Each peer checks after its replacement whether the run is over, and cancels it then; the end of a
# run, and its cancellation, cancel what has been recorded so far. So none is left in either order.


@dataclass(frozen=True)
class TaskPlace:
    """What a job stands for: one element of an array, or a co-allocated job.

    Attributes:
        array: The array's number k in the sweep.
        index: The index of the element; None for a co-allocated job.
    """

    array: int
    index: int | None

    @property
    def label(self) -> str:
        """The name of its records, without their numbers."""
        return "job" if self.index is None else str(self.index)

    def queue_name(self, job_id: str) -> str:
        """Return squeue's name of the task in this place that has this job id."""
        return job_id if self.index is None else task_name(job_id, self.index)


def folder(files: ArrayFiles) -> Path:
    """Return where the replacements of an array are recorded."""
    return files.stem.with_suffix(".replaced")


def replacements(files: ArrayFiles) -> dict[str, list[str]]:
    """Return the job ids of the replacements of an array, by label, in their order."""
    try:
        records = [path for path in folder(files).iterdir() if not path.name.startswith(".")]
    except FileNotFoundError:
        return {}
    found: dict[str, list[str]] = {}
    numbered = [path for path in records if path.suffix.removeprefix(".").isdecimal()]
    for path in sorted(numbered, key=lambda path: int(path.suffix.removeprefix("."))):
        found.setdefault(path.stem, []).append(read_text(path).strip())
    return found


def places(spec: RunSpec) -> list[TaskPlace]:
    """Return the place of each slot of a run; co-allocated nodes have one and the same."""
    num_coallocated = spec.min_nodes if spec.coallocate_min else 0
    return [
        TaskPlace(k, None if slot < num_coallocated else index)
        for slot, (k, index) in enumerate(spec.tasks)
    ]


def all_jobs(spec: RunSpec) -> dict[TaskPlace, list[str]]:
    """Return all job ids that each place of a run has had so far; none where none was submitted."""
    submission = Submission(Path(spec.submission))
    arrays = {k: submission.array(k) for k, _ in spec.tasks}
    first = {k: files.job_id for k, files in arrays.items()}
    later = {k: replacements(files) for k, files in arrays.items()}
    return {
        place: [
            job for job in (first[place.array], *later[place.array].get(place.label, [])) if job
        ]
        for place in places(spec)
    }


def jobs_of(spec: RunSpec) -> list[str | None]:
    """Return the job id that each slot of a run has now; None where nothing was submitted."""
    jobs = all_jobs(spec)
    return [jobs[place][-1] if jobs[place] else None for place in places(spec)]


def slots_of(spec: RunSpec) -> dict[str, int]:
    """Return the slot of each of the run's tasks that was submitted, replacements included."""
    rows = zip(places(spec), spec.tasks, jobs_of(spec), strict=True)
    return {
        task_name(job, index, coallocated=place.index is None): slot
        for slot, (place, (_, index), job) in enumerate(rows)
        if job
    }


def current_names(spec: RunSpec) -> list[str]:
    """Return the names of the run's tasks by slot, replacements included, as far as submitted."""
    return list(slots_of(spec))


def is_of(spec: RunSpec, task: str) -> bool:
    """Return whether a task has a part in the run: one from before it was resumed has none."""
    return spec.generation == 0 or is_recorded(spec, task)


def is_recorded(spec: RunSpec, task: str) -> bool:
    """Return whether a record names the job of a task; a submission that failed has none."""
    return _find(spec, task) is not None


def _find(spec: RunSpec, task: str) -> tuple[TaskPlace, list[str], int] | None:
    """Return a task's place, the job ids that it has had, and the number of those before it."""
    for place, jobs in all_jobs(spec).items():
        names = [place.queue_name(job) for job in jobs]
        if queue_name(task) in names:
            return place, jobs, names.index(queue_name(task))
    return None


def followed(submissions: Iterable[Submission]) -> dict[str, str]:
    """Return the present name of each replaced task, by its first name, both as in squeue."""
    now: dict[str, str] = {}
    for submission in submissions:
        for number, job_id in submission.job_ids().items():
            for label, jobs in replacements(submission.array(number)).items():
                if label != "job" and not label.isdecimal():
                    continue
                place = TaskPlace(number, None if label == "job" else int(label))
                now[place.queue_name(job_id)] = place.queue_name(jobs[-1])
    return now


def list_followed(
    client: SlurmClient, submissions: Iterable[Submission], job_ids: Iterable[str]
) -> dict[str, TaskState]:
    """Return the tasks of submissions by their first names, each replaced one as its replacement.

    Args:
        client: Runs Slurm's commands; one call of squeue.
        submissions: The submissions.
        job_ids: The job ids of their arrays and co-allocated jobs, as they were at first.

    Raises:
        SlurmCommandError: Slurm does not answer.
    """
    now = followed(submissions)
    listed = client.tasks([*job_ids, *map(job_of, now.values())])
    present = now.items()
    later = {first: replace(listed[name], task=first) for first, name in present if name in listed}
    return {**listed, **later}


def resubmit(run: RunDir, task: str, client: SlurmClient) -> str | None:
    """Submit another task in place of one that does not come back; once, for all peers.

    Args:
        run: The task's run.
        task: The task: its agent's name, or squeue's.
        client: Runs Slurm's commands.

    Returns:
        squeue's name of the task in its place, by whichever peer; None if the run has ended, or
        the task has no part in it.

    Raises:
        SlurmCommandError: sbatch failed or refused.
        OSError: The record could not be written.
    """
    spec = run.load()
    found = _find(spec, task)
    if found is None or run.is_over:
        return None
    place, jobs, older = found
    if older + 1 < len(jobs):
        return place.queue_name(jobs[-1])
    files = Submission(Path(spec.submission)).array(place.array)
    avoided = set(excluded(run))
    if avoided:  # the flag replaces the script's own line
        avoided |= parsing.excluded_in(read_text(files.script))
    made = client.resubmit(files.script, place.index, exclude=avoided, known=jobs)
    record = folder(files) / f"{place.label}.{older + 1}"
    try:
        make_folder(record.parent)
        job = made if create_atomic(record, made + "\n") else read_text(record).strip()
    except OSError:
        try:
            client.cancel([made])  # it has no record: no other process would cancel it
        except SlurmCommandError as e:
            _log.warning("job %s takes a node for nothing: scancel it: %s", made, e)
        raise
    if job != made or run.is_over:
        client.cancel([made])
        return place.queue_name(job) if job != made else None
    name = place.queue_name(made)
    _log.warning("%s is submitted in place of %s", name, task)
    try:
        client.release(name)
    except SlurmCommandError as e:
        _log.warning("%s starts in ten minutes only: %s", name, e)
    return name


@dataclass(frozen=True)
class Exclusion:
    """Why the run's tasks avoid a node, and until when (Unix seconds).

    One that is lifted stays known, once for each node: a task that ran then still avoids the node,
    until it is requeued.
    """

    why: str
    until: float
    is_lifted: bool = False


def excluded(run: RunDir) -> Mapping[str, Exclusion]:
    """Return the nodes that the run's tasks avoid; none if unreadable.

    An exclusion without an end, of an earlier version, has ended.
    """
    return {host: e for host, e in _known_excluded(run).items() if not e.is_lifted}


def _known_excluded(run: RunDir) -> Mapping[str, Exclusion]:
    try:
        known = {str(k): v for k, v in (read_json(run.excluded) or {}).items()}
        return {
            host: Exclusion(str(v["why"]), float(v["until"]), bool(v.get("is_lifted")))
            if isinstance(v, dict)
            else Exclusion(str(v), 0.0)
            for host, v in known.items()
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def remember_excluded(run: RunDir, hosts: Iterable[str], why: str, until: float) -> None:
    """Record nodes that the run's tasks are to avoid until a time.

    The leader does so, and every agent whose node fails its checks: so the file is read again, in
    case another one has written it at the same moment.
    """
    new = dict.fromkeys(hosts, Exclusion(why, until))
    for _ in range(5):
        known = _known_excluded(run).items()
        kept = {h: e for h, e in known if h not in new or (e.until >= until and not e.is_lifted)}
        _write_excluded(run, {**new, **kept})
        time.sleep(random.uniform(0.0, 0.2))
        if new.keys() <= excluded(run).keys():
            break


def forget_excluded(run: RunDir, now: float) -> None:
    """Record that the run's tasks may start again on nodes whose exclusion has ended."""
    known = _known_excluded(run).items()
    _write_excluded(run, {h: e if e.until > now else replace(e, is_lifted=True) for h, e in known})


def _write_excluded(run: RunDir, known: Mapping[str, Exclusion]) -> None:
    text = json.dumps({host: vars(exclusion) for host, exclusion in known.items()}, indent=1)
    write_atomic(run.excluded, text + "\n")


# ---- The node that a task was lost with: it starts there again only when that is rid of it
# Slurm gives up a node that does not answer (SlurmdTimeout), and requeues its tasks. Where the node
# was only cut off, or stood still, their last attempts live on and are ended when it is back. But
# it is given work in that same moment, and still has the job id of a task that comes back too soon:
# Slurm drains the node ("Duplicate jobid") then, and holds the task ("launch failed requeued
# held"), however long the node was away (measured on 22.05 and 26.05). So a task whose end was not
# observed avoids its last node, by ExcNodeList,
#
# - until that has been up for ``RID_S``, as the run's leaders observe it, or has no power; or
# - until its last attempt, which notices its requeue late, exits in good order.
#
#     <run>/avoided/<task>@<node>   that is why the task avoids the node; in it, since when that is
#                                   up again (Unix seconds)
#
# What a task avoids for other reasons has no such file, and stays as it is. While it waits, other
# tasks of its array that stand behind it do not start on the node either: of an array in which one
# element cannot start Slurm tries no other in that round (22.05 and 26.05).


RID_S = 60.0
"""Seconds that what is left of a task may run on a node that is back.

Twice the KillWait that Slurm has by default: our processes end on its SIGTERM, others at the
SIGKILL that follows.
"""


def quarantine_node(run: RunDir, task: str, node: str, client: SlurmClient) -> None:
    """Let a task that waits avoid its last node for now.

    Raises:
        SlurmCommandError: Slurm does not answer; the task may start there.
        OSError: The run's directory cannot be written; likewise.
    """
    name = queue_name(task)
    if node in (client.excluded(name) or ()) and node not in excluded(run):
        return  # by this, or because the user has excluded it
    make_folder(run.avoided)
    (run.avoided / f"{name}@{node}").touch(0o644)
    client.exclude([name], [node])
    _log.warning("%s does not start on %s until that is rid of it", name, node)


def lift_own_quarantine(run: RunDir, task: str, node: str, client: SlurmClient) -> None:
    """Let this task, which ends here now and has been requeued meanwhile, come here again.

    For its agent, once it has set the start of the next attempt (`requeue_or_exit`).
    """
    file = run.avoided / f"{queue_name(task)}@{node}"
    try:
        if is_there(file):
            _lift_quarantine(run, file, client)
    except (SlurmCommandError, OSError) as e:
        _log.warning("%s may not start on %s for another minute: %s", task, node, e)


def lift_quarantine(run: RunDir, tasks: Iterable[str], client: SlurmClient, now: float) -> None:
    """Let tasks start on the nodes that they avoid for now, where these are rid of them (leader).

    To be called again and again: the time that a node has been up counts from the first call, of
    any leader, that finds it so.

    Args:
        run: The run.
        tasks: Those of its tasks that are gone; others are handled when they are.
        client: Runs Slurm's commands, about nodes that one of these tasks avoids.
        now: Unix time. The next leader's clock may differ by seconds, which do not matter here.

    Raises:
        SlurmCommandError: Slurm does not answer; to be tried again.
        OSError: The run's directory cannot be read or written; likewise.
    """
    gone = set(map(queue_name, tasks))
    try:
        avoided = [file for file in run.avoided.iterdir() if file.name.partition("@")[0] in gone]
    except FileNotFoundError:
        return
    is_up = {node: client.is_up(node) for node in {file.name.partition("@")[2] for file in avoided}}
    is_off = {node: not up and client.is_off(node) for node, up in is_up.items()}
    for file in avoided:
        node = file.name.partition("@")[2]
        up = is_up[node]
        if is_off[node]:  # a cloud's instance that was taken back: nothing is left on it
            _lift_quarantine(run, file, client)
            continue
        try:
            since = float(read_text(file))
        except (FileNotFoundError, ValueError):
            since = None
        if (since is not None) != up:
            write_atomic(file, str(now) if up else "")
        elif since is not None and now - since >= RID_S:
            _lift_quarantine(run, file, client)


def _lift_quarantine(run: RunDir, file: Path, client: SlurmClient) -> None:
    """Let a task that waits start on a node, unless the run has come to avoid that for good."""
    task, _, node = file.name.partition("@")
    if node in excluded(run) or client.readmit(task, node):
        file.unlink(missing_ok=True)
