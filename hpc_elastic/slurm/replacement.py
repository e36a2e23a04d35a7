"""Another task in the place of one that Slurm will not requeue; and the nodes that a run avoids.

Slurm refuses to requeue what was submitted with ``--no-requeue``, on a site's orders, once it has
ended. The same script is submitted again then, for the one element of its array (or for the whole
gang): the new task finds its run and its slot by its index, as the first one did, and has a name of
its own, hence logs of its own.

    <sweep>/.hpc_elastic/array-<k>.replaced/<index>.<n>   job id of the n-th task in that place
                                           /gang.<n>      the same for a gang
    <run>/excluded.json                                   nodes that the run's tasks avoid

Exactly one. Several peers may see that a task is lost. Each submits, with a start ten minutes
ahead, and then creates the next number by link(2): whose link is made has replaced the task, and
releases it; the others cancel theirs. Who dies in between leaves a task that starts ten minutes
later: either the record names it, or it joins as one node more, and goes with the run.

Whoever makes a replacement looks afterwards whether the run is over, and takes it back then; the
end of a run, and its cancellation, cancel what has been recorded so far. So none is left whichever
comes first.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.files import create_atomic, read_json, write_atomic
from hpc_elastic.rundir import ArrayFiles, RunDir, RunSpec, Submission, task_name
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.states import TaskState, job_of, queue_name

_log = logging.getLogger(__name__)

_GANG = "gang"
_TRIES = 5
_LAPSE_S = 0.2


@dataclass(frozen=True)
class Place:
    """What a job stands for: one element of an array, or a whole gang.

    Attributes:
        array: The array's number k in the sweep.
        index: Which element; None for a gang.
    """

    array: int
    index: int | None

    @property
    def label(self) -> str:
        """How its records are called."""
        return _GANG if self.index is None else str(self.index)

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


def places(spec: RunSpec) -> list[Place]:
    """Return the place of each slot of a run; those of a gang's nodes are one and the same."""
    num_gang = spec.min_nodes if spec.gang else 0
    return [
        Place(k, None if slot < num_gang else index) for slot, (k, index) in enumerate(spec.tasks)
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
        task_name(job, index, gang=place.index is None) for place, (_, index), job in slots if job
    ]


def is_of(spec: RunSpec, task: str) -> bool:
    """Tell whether a task has a part in the run: one from before it was resumed has none."""
    return spec.generation == 0 or _find(spec, queue_name(task)) is not None


def all_jobs(spec: RunSpec) -> dict[Place, list[str]]:
    """Return all job ids that each place of a run has had so far; none where none was submitted."""
    submission = Submission(Path(spec.submission))
    return {place: _jobs_at(submission, place) for place in dict.fromkeys(places(spec))}


def _jobs_at(submission: Submission, place: Place) -> list[str]:
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
            place = Place(number, None if label == _GANG else int(label))
            now[place.queue_name(job_id)] = place.queue_name(jobs[-1])
    return now


def list_followed(
    client: SlurmClient, submission: Submission, job_ids: Iterable[str], *, is_own: bool = True
) -> dict[str, TaskState]:
    """Return what squeue lists of a submission, each replaced task as what stands in its place.

    Args:
        client: How to reach Slurm; it is asked once.
        submission: The submission.
        job_ids: The job ids of its arrays and gangs, as they were at first.
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


def replace(run: RunDir, task: str, client: SlurmClient) -> str | None:
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
    made = client.resubmit(str(files.script), place.index, exclude=excluded(run))
    try:
        job = _record(files, place, older, made)
    except OSError:
        _take_back(made, client)
        raise
    if job != made or run.is_over:
        client.cancel([made])
        return place.queue_name(job) if job != made else None
    _log.warning("%s is submitted in place of %s", place.queue_name(made), task)
    _release(place.queue_name(made), client)
    return place.queue_name(made)


def _take_back(job_id: str, client: SlurmClient) -> None:
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


def _find(spec: RunSpec, name: str) -> tuple[Place, int, str | None] | None:
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


def _record(files: ArrayFiles, place: Place, older: int, job_id: str) -> str:
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
    for _ in range(_TRIES):
        write_atomic(run.excluded, json.dumps({**new, **excluded(run)}, indent=1) + "\n")
        time.sleep(random.uniform(0.0, _LAPSE_S))
        if new.keys() <= excluded(run).keys():
            break
