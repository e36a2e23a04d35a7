"""The tasks of a run in Slurm's queue: their places, their names and their replacements.

Slurm refuses to requeue what was submitted with ``--no-requeue``, on a site's orders, once it has
ended. The same script is submitted again then, for the one element of its array (or for the
co-allocated job): the new task finds its run and its slot by its index, as the first one did, and
has a name of its own, hence logs of its own.

    <sweep>/.hpc_elastic/array-<k>.replaced/<index>.<n>   job id of the n-th task in that place
                                           /job.<n>       the same for a co-allocated job

Exactly one. Several peers may see that a task is lost. Each submits, with a start ten minutes
ahead, and then creates the next number by link(2): the peer whose link is made has replaced the
task, and releases it; the others cancel theirs. A peer that dies in between leaves a task that
starts ten minutes later: either the record names it, or it joins as one node more, and ends with
the run.

Each peer checks after its replacement whether the run is over, and cancels it then; the end of a
run, and its cancellation, cancel what has been recorded so far. So none is left in either order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.run import job_of, queue_name, task_name
from hpc_elastic.run.directory import ArrayFiles, RunDir, RunSpec, Submission
from hpc_elastic.shared_files import create_atomic, make_folder, read_text
from hpc_elastic.slurm import parsing
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.quarantine import excluded

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskPlace:
    """Element ``index`` of the sweep's array ``array``; None: a co-allocated job."""

    array: int
    index: int | None

    @property
    def label(self) -> str:
        """The name of its records, without their numbers."""
        return "job" if self.index is None else str(self.index)

    def queue_name(self, job_id: str) -> str:
        """Return squeue's name of the task in this place that has this job id."""
        return job_id if self.index is None else task_name(job_id, self.index)


def replacements(files: ArrayFiles) -> dict[str, list[str]]:
    """Return the job ids of the replacements of an array, by label, in their order."""
    try:
        names = [path.name.partition(".") for path in files.replaced.iterdir()]
    except FileNotFoundError:
        return {}
    found: dict[str, list[str]] = {}
    numbered = [(int(n), label) for label, _, n in names if label and n.isdecimal()]
    for n, label in sorted(numbered):
        text = read_text(files.replaced / f"{label}.{n}")
        found.setdefault(label, []).append(text.strip())
    return found


def places(spec: RunSpec) -> list[TaskPlace]:
    """Return the place of each slot of a run; co-allocated nodes have one and the same."""
    num_coallocated = spec.settings.num_coallocated
    return [
        TaskPlace(k, None if slot < num_coallocated else index)
        for slot, (k, index) in enumerate(spec.tasks)
    ]


def all_jobs(spec: RunSpec) -> dict[TaskPlace, list[str]]:
    """Return all job ids that each place of a run has had so far; none where none was submitted."""
    submission, numbers = Submission(Path(spec.submission)), {k for k, _ in spec.tasks}
    first = {k: submission.array(k).job_id for k in numbers}
    later = {k: replacements(submission.array(k)) for k in numbers}
    return {
        place: list(filter(None, (first[place.array], *later[place.array].get(place.label, ()))))
        for place in places(spec)
    }


def jobs_of(spec: RunSpec) -> list[str]:
    """Return the job ids, of arrays and co-allocated jobs, that a run has now."""
    return list(dict.fromkeys(jobs[-1] for jobs in all_jobs(spec).values() if jobs))


def slots_of(spec: RunSpec) -> dict[str, int]:
    """Return the slot of each of the run's tasks that was submitted, replacements included."""
    jobs = all_jobs(spec)
    return {
        task_name(jobs[place][-1], index, coallocated=place.index is None): slot
        for slot, (place, (_, index)) in enumerate(zip(places(spec), spec.tasks, strict=True))
        if jobs[place]
    }


def current_names(spec: RunSpec) -> list[str]:
    """Return the names of the run's tasks by slot, replacements included, as far as submitted."""
    return list(slots_of(spec))


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
                if label == "job" or label.isdecimal():
                    place = TaskPlace(number, None if label == "job" else int(label))
                    now[place.queue_name(job_id)] = place.queue_name(jobs[-1])
    return now


def list_followed(
    client: SlurmClient, submissions: Iterable[Submission], job_ids: Iterable[str]
) -> dict[str, TaskState]:
    """Return the tasks of submissions by their first names, each replaced one as its replacement.

    ``job_ids`` are the arrays and co-allocated jobs as they were at first. One call of squeue.
    """
    now = followed(submissions).items()
    listed = client.tasks([*job_ids, *(job_of(name) for _, name in now)])
    later = {first: replace(listed[name], task=first) for first, name in now if name in listed}
    return {**listed, **later}


def resubmit(run: RunDir, task: str, client: SlurmClient) -> str | None:
    """Submit another task in place of one that does not come back; once, for all peers.

    Returns squeue's name of the task in its place, by whichever peer; None if the run has ended, or
    the task has no part in it. Raises SlurmCommandError if sbatch failed or refused, and OSError if
    the record could not be written.
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
    record = files.replaced / f"{place.label}.{older + 1}"
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


def limit_of(spec: RunSpec, task: str) -> float | None:
    """Return the time limit of a task that returns to the queue; None if its limit is fixed."""
    if all(pool.restored_limit_s is None for pool in spec.pools):
        return None  # without a look at the submission's files
    found = _find(spec, task)
    if found is None:
        return None
    return spec.pool_of(places(spec).index(found[0])).restored_limit_s
