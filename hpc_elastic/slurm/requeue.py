"""How a task goes back to the queue: taken by Slurm, or given back by itself. The effects.

What is to be done in which case is in `exit_action`. Here it is done, from within the task.

The two minutes. When the last process of a requeued attempt has ended, and the epilog with it,
Slurm looks at the task's start time, and *only if it lies in the past* sets it to two minutes
ahead. So the attempt that ends says itself when the next one may start: `scontrol requeue`, and
then `scontrol update starttime=now+D`, with D longer than it takes to end. Of 96 tries of array
elements with D = 3, 5, 10 and 30 s, after a preemption and without one, each started D seconds
later, and none was FAILED or had its credential revoked. Where D is too short (2 s and a process
that ended 0.7 s later, 5 s and an epilog of 7 s), the task is held for the two minutes, as if
nothing had been said: it is never worse than that, and a peer may release it then.

In a job of several nodes each agent does all this for the one job. One requeue is carried out, the
others are told that the job is pending; each postpones the start once more, so that the last agent
to end counts. Those that come late find the job COMPLETING, but requeued once more than they know
of: that too tells a requeue from a cancellation.

(Measured on Slurm 22.05; scontrol(1), slurm.conf(5) GraceTime.)
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from hpc_elastic.shared_files import create_atomic, is_there, read_json, write_atomic
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.exit_action import ExitAction, ExitFacts, Reason, decide, row_of
from hpc_elastic.slurm.job_state import TaskState, job_of, queue_name
from hpc_elastic.slurm.parsing import is_refused

_log = logging.getLogger(__name__)

_KILLED_WITHIN_S = 120.0
"""Longer than Slurm's KillWait (30 s by default) between its SIGTERM and its SIGKILL."""

RETURN_DELAY_S = 10.0
"""When a task that was taken may start again, from the moment in which it requeues itself.

Longer than it takes for its last process, and the site's epilog, to end. Without an epilog 3 s are
enough for a process that ends within one. Too long costs the difference, too short two minutes.
"""


PARENT_REQUEUES = "HPC_ELASTIC_PARENT_REQUEUES"
"""Set where the agent's parent requeues the task, as submitit does: nothing is done here then."""

_TRIES = 10
_AGAIN_S = 3.0, 9.0
"""Between two tries, at random: all tasks of a run may ask a controller that has just come back."""

_COMES_BACK = (ExitAction.REQUEUE, ExitAction.REQUEUED)
_FAILURES = (SlurmCommandError, LocalQueueError)


class TaskQueue(Protocol):
    """Operations of a queue: `SlurmClient`, `LocalQueue` (launcher=local), `CombinedRequests`."""

    def tasks(self, job_ids: Iterable[str]) -> dict[str, TaskState]:
        """Return the tasks of these jobs by name."""

    def requeue(self, task: str) -> None:
        """Send a task back to the queue."""

    def postpone(self, tasks: Sequence[str], delay_s: float) -> None:
        """Let pending tasks not start before `delay_s` from now."""

    def exclude(self, tasks: Sequence[str], hosts: Iterable[str]) -> None:
        """Let pending tasks not start on some nodes."""

    def cancel(self, tasks: Sequence[str], *, pending_only: bool = False) -> None:
        """Cancel tasks; with `pending_only`, those that have no node."""


def foresee(
    task: str, client: TaskQueue, *, attempt: int | None = None, reason: Reason = Reason.SIGNAL
) -> ExitAction | None:
    """Ask Slurm what a notice means, and do nothing: how this task would go now (its agent).

    Args:
        task: As for `depart`.
        client: The queue.
        attempt: As for `depart`.
        reason: What the agent knows.

    Returns:
        EXIT: it was cancelled, there is nothing to wait for; STAY: the notice means nothing;
        others: it comes back. None: Slurm does not answer.
    """
    try:
        return decide(_ask(task, client, attempt, reason))
    except _FAILURES as e:
        _log.warning("what the notice means is not known: %s", e)
        return None


def depart(
    task: str,
    client: TaskQueue,
    *,
    attempt: int | None = None,
    reason: Reason = Reason.SIGNAL,
    run: RunDir | None = None,
    note: Callable[[ExitFacts], None] = lambda facts: None,
) -> ExitAction:
    """Go back to the queue if the task is to come back; return how it goes.

    The task may end at once after that, and should within seconds. Where Slurm, or the run's
    directory, does not answer, that is tried again for about a minute; then this call waits until
    Slurm has killed the task: one that was preempted it requeues by itself.
    From here on the process ignores SIGTERM (if this is its main thread).

    Args:
        task: The task this process is: ``<array job id>_<index>``, a job id, or
            ``<job id>.<node id>``.
        client: The queue.
        attempt: The attempt of the task that this process is, None if unknown.
        reason: Why it goes.
        run: Its run: whether that has ended, which nodes it avoids, and where another task is
            submitted in place of one that Slurm will not requeue. None: none of that is done.
        note: Is told what Slurm says before anything is done about it.

    Returns:
        REQUEUE, REQUEUED and REPLACE: the node comes back; EXIT: it does not; STAY: Slurm could
        not be reached, or the task is only suspended.
    """
    with _deaf_to_sigterm(for_good=True):
        try:
            return _patiently(lambda: _go(task, client, attempt, reason, RETURN_DELAY_S, run, note))
        except (*_FAILURES, OSError) as e:
            _log.warning("not requeued by ourselves, waiting for the scheduler to do it: %s", e)
            time.sleep(_KILLED_WITHIN_S)
            return ExitAction.STAY


def give_back(
    task: str,
    client: TaskQueue,
    delay_s: float,
    *,
    attempt: int | None = None,
    run: RunDir | None = None,
) -> ExitAction:
    """Give this task's node back: requeue the task, to start no sooner than after some time.

    For a task that holds a node it can not use. What fails is tried again, as in `depart`. Its last
    process should end within `delay_s`; if it takes longer, Slurm's two minutes follow. From here
    on the process ignores SIGTERM (if this is its main thread), unless this call fails.

    Args:
        task: As for `depart`.
        client: The queue.
        delay_s: From now; never taken for less than `RETURN_DELAY_S`.
        attempt: As for `depart`.
        run: As for `depart`.

    Returns:
        EXIT if the task was cancelled in the meantime, or its run has ended; else it comes back.

    Raises:
        SlurmCommandError: Slurm can not be reached or refuses; the task has its node still. A
            SIGTERM that came during the call is lost.
        LocalQueueError: The local launcher does not answer; likewise.
        OSError: The run's directory can not be read; likewise.
    """
    delay_s = max(delay_s, RETURN_DELAY_S)
    with _deaf_to_sigterm():
        return _patiently(lambda: _go(task, client, attempt, Reason.ASKED, delay_s, run))


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


def _patiently(act: Callable[[], ExitAction]) -> ExitAction:
    """Do what may be done twice, until it works once; at last raise why it does not."""
    for _ in range(_TRIES - 1):
        try:
            return act()
        except (*_FAILURES, OSError) as e:
            pause_s = random.uniform(*_AGAIN_S)
            _log.warning("to be tried again in %.0f s: %s", pause_s, e)
            time.sleep(pause_s)
    return act()


def _go(
    task: str,
    client: TaskQueue,
    attempt: int | None,
    reason: Reason,
    delay_s: float,
    run: RunDir | None,
    note: Callable[[ExitFacts], None] = lambda facts: None,
) -> ExitAction:
    facts = _ask(task, client, attempt, reason, run)
    note(facts)
    return _carry_out(task, client, facts, delay_s, run)


def _ask(
    task: str,
    client: TaskQueue,
    attempt: int | None,
    reason: Reason,
    run: RunDir | None = None,
) -> ExitFacts:
    state = client.tasks([job_of(task)]).get(queue_name(task))
    if run is None:
        return ExitFacts(reason, state, attempt)
    try:
        spec = run.load()
    except RunDirectoryError as e:  # then it forbids nothing
        _log.warning("launcher.max_requeues is not looked at: %s", e)
        return ExitFacts(reason, state, attempt, run_ended=run.is_over)
    left = spec.requeues_left(attempt)
    ended = run.is_over or not is_of(spec, task)
    return ExitFacts(reason, state, attempt, run_ended=ended, requeues_left=left)


def _carry_out(
    task: str, client: TaskQueue, facts: ExitFacts, delay_s: float, run: RunDir | None
) -> ExitAction:
    """Do what is decided; a task that comes back is told when it may start."""
    how = decide(facts)
    _log.info("%s: %s, so %s", task, row_of(facts).name, how.value)
    if PARENT_REQUEUES in os.environ:
        return how
    if how is ExitAction.REQUEUE and not _requeue(task, client):
        return _carry_out(task, client, replace(facts, refused=True), delay_s, run)
    if how is ExitAction.REPLACE:
        slurm = cast(SlurmClient, client)  # the local launcher refuses nothing
        made = None if run is None else resubmit(run, task, slurm)
        return ExitAction.EXIT if made is None else how
    if how is ExitAction.REQUEUE and run is not None and run.is_over:
        return _take_back(task, client)
    if how in _COMES_BACK:
        _start_after(task, client, delay_s)
        _keep_away(task, client, run)
    return how


def _requeue(task: str, client: TaskQueue) -> bool:
    """Requeue a task; return False if Slurm will not."""
    try:
        client.requeue(task)
    except SlurmCommandError as e:
        if not is_refused(e):
            raise
        _log.warning("Slurm does not requeue %s: %s", task, e)
        return False
    return True


def _take_back(task: str, client: TaskQueue) -> ExitAction:
    """Cancel a task that was requeued while its run was cancelled: it is not to come back."""
    _log.warning("%s: the run was cancelled meanwhile, so it does not come back", task)
    client.cancel([task])
    return ExitAction.EXIT


def _start_after(task: str, client: TaskQueue, delay_s: float) -> None:
    try:
        client.postpone([task], delay_s)
    except _FAILURES as e:
        _log.warning("%s may start again late, or too soon: %s", task, e)


def _keep_away(task: str, client: TaskQueue, run: RunDir | None) -> None:
    """Let the next attempt avoid the nodes that the run avoids."""
    hosts = excluded(run) if run is not None else {}
    try:
        if hosts:
            client.exclude([task], hosts)
    except _FAILURES as e:
        _log.warning("%s may start on %s again: %s", task, ", ".join(sorted(hosts)), e)


# ---- Another task in the place of one that Slurm will not requeue; and the nodes that a run avoids
# Slurm refuses to requeue what was submitted with ``--no-requeue``, on a site's orders, once it has
# ended. The same script is submitted again then, for the one element of its array (or for the
# co-allocated job): the new task finds its run and its slot by its index, as the first one did, and
# has a name of its own, hence logs of its own.
#
#     <sweep>/.hpc_elastic/array-<k>.replaced/<index>.<n>   job id of the n-th task in that place
#                                            /job.<n>       the same for a co-allocated job
#     <run>/excluded.json                                   nodes that the run's tasks avoid
#
# Exactly one. Several peers may see that a task is lost. Each submits, with a start ten minutes
# ahead, and then creates the next number by link(2): whose link is made has replaced the task,
# and releases it; the others cancel theirs. Who dies in between leaves a task that starts ten
# minutes later: either the record names it, or it joins as one node more, and goes with the run.
#
# Whoever makes a replacement looks afterwards whether the run is over, and takes it back then;
# the end of a run, and its cancellation, cancel what has been recorded so far. So none is left
# whichever comes first.


_JOB = "job"
_SUBMIT_TRIES = 5
_LAPSE_S = 0.2


@dataclass(frozen=True)
class TaskPlace:
    """What a job stands for: one element of an array, or a co-allocated job.

    Attributes:
        array: The array's number k in the sweep.
        index: Which element; None for a co-allocated job.
    """

    array: int
    index: int | None

    @property
    def label(self) -> str:
        """How its records are called."""
        return _JOB if self.index is None else str(self.index)

    def queue_name(self, job_id: str) -> str:
        """Return what squeue calls the task in this place that has this job id."""
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
    for path in sorted(records, key=_number):
        found.setdefault(path.stem, []).append(path.read_text().strip())
    return found


def _number(record: Path) -> int:
    return int(record.suffix.removeprefix("."))


def places(spec: RunSpec) -> list[TaskPlace]:
    """Return the place of each slot of a run; co-allocated nodes have one and the same."""
    num_coallocated = spec.min_nodes if spec.coallocate_min else 0
    return [
        TaskPlace(k, None if slot < num_coallocated else index)
        for slot, (k, index) in enumerate(spec.tasks)
    ]


def jobs_of(spec: RunSpec) -> list[str | None]:
    """Return the job id that each slot of a run has now; None where nothing was submitted."""
    submission = Submission(Path(spec.submission))
    numbers = dict.fromkeys(k for k, _ in spec.tasks)
    first = {k: submission.array(k).job_id for k in numbers}
    later = {k: replacements(submission.array(k)) for k in numbers}
    return [later[p.array].get(p.label, [first[p.array]])[-1] for p in places(spec)]


def current_names(spec: RunSpec) -> list[str]:
    """Return the names of the run's tasks by slot, replacements included, as far as submitted."""
    slots = zip(places(spec), spec.tasks, jobs_of(spec), strict=True)
    return [
        task_name(job, index, coallocated=place.index is None)
        for place, (_, index), job in slots
        if job
    ]


def is_of(spec: RunSpec, task: str) -> bool:
    """Tell whether a task has a part in the run: one from before it was resumed has none."""
    return spec.generation == 0 or _find(spec, queue_name(task)) is not None


def all_jobs(spec: RunSpec) -> dict[TaskPlace, list[str]]:
    """Return all job ids that each place of a run has had so far; none where none was submitted."""
    submission = Submission(Path(spec.submission))
    return {place: _jobs_at(submission, place) for place in dict.fromkeys(places(spec))}


def _jobs_at(submission: Submission, place: TaskPlace) -> list[str]:
    files = submission.array(place.array)
    jobs = [files.job_id, *replacements(files).get(place.label, [])]
    return [job for job in jobs if job]


def followed(submission: Submission) -> dict[str, str]:
    """Return what each replaced task is now, both as squeue prints them (login node).

    For whoever knows a submission by the names that it had at first.
    """
    now: dict[str, str] = {}
    for number, job_id in submission.job_ids().items():
        for label, jobs in replacements(submission.array(number)).items():
            place = TaskPlace(number, None if label == _JOB else int(label))
            now[place.queue_name(job_id)] = place.queue_name(jobs[-1])
    return now


def list_followed(
    client: SlurmClient, submission: Submission, job_ids: Iterable[str], *, is_own: bool = True
) -> dict[str, TaskState]:
    """Return what squeue lists of a submission, each replaced task as what stands in its place.

    Args:
        client: How to reach Slurm; it is asked once.
        submission: The submission.
        job_ids: The job ids of its arrays and co-allocated jobs, as they were at first.
        is_own: Whether this user has submitted it. Slurm is asked for each job of another one's.

    Raises:
        SlurmCommandError: Slurm does not answer.
    """
    now = followed(submission)
    listed = client.tasks([*job_ids, *map(job_of, now.values())], once=is_own)
    later = {
        first: dataclasses.replace(listed[name], task=first)
        for first, name in now.items()
        if name in listed
    }
    return {**listed, **later}


def resubmit(run: RunDir, task: str, client: SlurmClient) -> str | None:
    """Submit another task in place of one that does not come back, once whoever asks.

    Args:
        run: The task's run.
        task: The task: by its agent's name, or squeue's.
        client: How to reach Slurm.

    Returns:
        What squeue calls the task in its place, whoever made that; None if the run has ended, or
        the task is none of it.

    Raises:
        SlurmCommandError: sbatch failed or refused.
        OSError: the record could not be written.
    """
    spec = run.load()
    found = _find(spec, queue_name(task))
    if found is None or run.is_over:
        return None
    place, older, newer = found
    if newer is not None:
        return place.queue_name(newer)
    files = Submission(Path(spec.submission)).array(place.array)
    made = client.resubmit(files.script, place.index, exclude=excluded(run))
    try:
        job = _record(files, place, older, made)
    except OSError:
        _cancel_unrecorded(made, client)
        raise
    if job != made or run.is_over:
        client.cancel([made])
        return place.queue_name(job) if job != made else None
    _log.warning("%s is submitted in place of %s", place.queue_name(made), task)
    _release(place.queue_name(made), client)
    return place.queue_name(made)


def _cancel_unrecorded(job_id: str, client: SlurmClient) -> None:
    """Cancel a task that stands nowhere: nobody else would, and whoever tries again makes one."""
    try:
        client.cancel([job_id])
    except SlurmCommandError as e:
        _log.warning("job %s takes a node for nothing: scancel it: %s", job_id, e)


def _release(name: str, client: SlurmClient) -> None:
    try:
        client.release(name)
    except SlurmCommandError as e:
        _log.warning("%s starts in ten minutes only: %s", name, e)


def _find(spec: RunSpec, name: str) -> tuple[TaskPlace, int, str | None] | None:
    """Return a task's place, how many were there before it, and what is there after it."""
    submission = Submission(Path(spec.submission))
    for place in dict.fromkeys(places(spec)):
        files = submission.array(place.array)
        jobs = [files.job_id or "", *replacements(files).get(place.label, [])]
        names = [place.queue_name(job) for job in jobs]
        if name in names:
            at = names.index(name)
            return place, at, jobs[-1] if at + 1 < len(jobs) else None
    return None


def _record(files: ArrayFiles, place: TaskPlace, older: int, job_id: str) -> str:
    """Write down who replaces a task, unless that has been done; return the job id that holds."""
    path = folder(files) / f"{place.label}.{older + 1}"
    path.parent.mkdir(exist_ok=True)
    return job_id if create_atomic(path, job_id + "\n") else path.read_text().strip()


def excluded(run: RunDir) -> Mapping[str, str]:
    """Return the nodes that the run's tasks avoid, each with the reason; none if unreadable."""
    try:
        return {str(k): str(v) for k, v in (read_json(run.excluded) or {}).items()}
    except (OSError, ValueError):
        return {}


def remember_excluded(run: RunDir, hosts: Iterable[str], why: str) -> None:
    """Write down that the run's tasks are to avoid some nodes.

    The leader does so, and every agent whose node fails its checks: so it is looked at again
    whether another one has written the same file at the same moment.
    """
    new = dict.fromkeys(hosts, why)
    for _ in range(_SUBMIT_TRIES):
        write_atomic(run.excluded, json.dumps({**new, **excluded(run)}, indent=1) + "\n")
        time.sleep(random.uniform(0.0, _LAPSE_S))
        if new.keys() <= excluded(run).keys():
            break


# ---- The node that a task was lost with: it starts there again only when that is rid of it
# Slurm gives up a node that it does not hear (SlurmdTimeout), and requeues its tasks. Where the
# node was only cut off, or stood still, their last attempts live on and are ended when it is
# back. But it is given work in that same moment, and knows the job id still of a task that comes
# back too soon: Slurm drains the node ("Duplicate jobid") then, and holds the task ("launch
# failed requeued held"), however long the node was away (measured on 22.05 and 26.05). So a task
# whose end nobody has seen avoids its last node, by ExcNodeList,
#
# - until that has been up for ``RID_S``, as the run's leaders see it; or
# - until its last attempt, which learns of its fate at last, leaves in good order.
#
#     <run>/avoided/<task>@<node>   that is why the task avoids the node; in it, since when that is
#                                   up again (Unix seconds)
#
# What a task avoids for other reasons has no such file, and stays as it is. While it waits, other
# tasks of its array that stand behind it do not start on the node either: of an array of which
# one element can not start Slurm tries no other in that round (22.05 and 26.05).


RID_S = 60.0
"""How long what is left of a task may run on a node that is back.

Twice the KillWait that Slurm has by default: our processes end on its SIGTERM, others at the
SIGKILL that follows.
"""


def avoid(run: RunDir, task: str, node: str, client: SlurmClient) -> None:
    """Keep a task that waits away from its last node for now.

    Raises:
        SlurmCommandError: Slurm does not answer; the task may start there.
        OSError: the run's directory can not be written; likewise.
    """
    name = queue_name(task)
    if node in (client.excluded(name) or ()):
        return  # by this, or for good
    run.avoided.mkdir(exist_ok=True)
    _file(run, name, node).touch()
    client.exclude([name], [node])
    _log.warning("%s does not start on %s until that is rid of it", name, node)


def leave(run: RunDir, task: str, node: str, client: SlurmClient) -> None:
    """Let this task, which ends here now and has been requeued meanwhile, come here again.

    For its agent, once it has told Slurm when the next attempt may start (`requeue.depart`).
    """
    try:
        if is_there(_file(run, queue_name(task), node)):
            _readmit(run, queue_name(task), node, client)
    except (SlurmCommandError, OSError) as e:
        _log.warning("%s may not start on %s for another minute: %s", task, node, e)


def readmit(run: RunDir, tasks: Iterable[str], client: SlurmClient, now: float) -> None:
    """Let tasks start on the nodes that they avoid for now, where these are rid of them (leader).

    To be called again and again: how long a node has been up counts from the first call that finds
    it so, whoever made that.

    Args:
        run: The run.
        tasks: Those of its tasks that are gone; others are seen to when they are.
        client: How to reach Slurm. It is asked about nodes that one of these tasks avoids.
        now: Unix time. The next leader's clock may differ by seconds, which do not matter here.

    Raises:
        SlurmCommandError: Slurm does not answer; to be tried again.
        OSError: the run's directory can not be read or written; likewise.
    """
    gone = set(map(queue_name, tasks))
    avoided = [(task, node) for task, node in _avoided(run) if task in gone]
    is_up = {node: client.is_up(node) for node in {node for _, node in avoided}}
    for task, node in avoided:
        file = _file(run, task, node)
        since = _up_since(file)
        if (since is not None) != is_up[node]:
            write_atomic(file, str(now) if is_up[node] else "")
        elif since is not None and now - since >= RID_S:
            _readmit(run, task, node, client)


def _readmit(run: RunDir, task: str, node: str, client: SlurmClient) -> None:
    """Let a task that waits start on a node, unless the run has come to avoid that for good."""
    for_good = node in excluded(run)
    if for_good or client.readmit(task, node):
        _file(run, task, node).unlink(missing_ok=True)


def _avoided(run: RunDir) -> Iterator[tuple[str, str]]:
    try:
        names = [file.name for file in run.avoided.iterdir()]
    except FileNotFoundError:
        return
    for name in names:
        task, _, node = name.partition("@")
        yield task, node


def _up_since(file: Path) -> float | None:
    try:
        return float(file.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _file(run: RunDir, task: str, node: str) -> Path:
    return run.avoided / f"{task}@{node}"
