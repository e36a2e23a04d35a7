"""What the scheduler says of runs that others have submitted, for commands that look at them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_elastic.agent.gang import run_states
from hpc_elastic.errors import RunDirectoryError, SlurmError
from hpc_elastic.known_runs import user
from hpc_elastic.rundir import RunSpec, Submission
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.local_tasks import read_local_tasks
from hpc_elastic.slurm.replacement import current_names
from hpc_elastic.slurm.states import TaskState, job_of
from hpc_elastic.submit.living import moved


@dataclass(frozen=True)
class Queue:
    """What the schedulers of some runs list.

    Attributes:
        listed: The tasks, by the scheduler's names.
        silent: Why Slurm did not answer; None if it did, or had not to be asked.
        damaged: Why the tasks of a submission are not known: its files cannot be read, or are not
            where they were made.
    """

    listed: Mapping[str, TaskState] = field(default_factory=dict)
    silent: str | None = None
    damaged: Mapping[str, str] = field(default_factory=dict)

    def of(self, spec: RunSpec) -> dict[str, TaskState] | None:
        """Return the tasks of one of these runs that are listed; None: nobody knows."""
        if self.why_unknown(spec) is not None:
            return None
        return run_states(spec, self.listed)

    def why_unknown(self, spec: RunSpec) -> str | None:
        """Return why nobody knows of the tasks of one of these runs; None: they are known."""
        if spec.launcher == "local" or spec.submission in self.damaged:
            return self.damaged.get(spec.submission)
        return None if self.silent is None else f"Slurm does not answer: {self.silent}"


def ask(specs: Sequence[RunSpec], client: SlurmClient | None = None) -> Queue:
    """Ask for all tasks of these runs: Slurm once, and for local runs their own table.

    Of several jobs Slurm tells the caller's own only: those of others are asked for one by one.
    """
    listed: dict[str, TaskState] = {}
    damaged: dict[str, str] = {}
    for spec in specs:
        if not Path(spec.submission).is_dir():
            damaged[spec.submission] = moved(spec)
        elif spec.launcher == "local":
            try:
                listed |= local_tasks(Submission(Path(spec.submission)))
            except RunDirectoryError as e:
                damaged[spec.submission] = str(e)
    client = client or SlurmClient()
    try:
        for jobs in _calls([spec for spec in specs if spec.launcher == "slurm"]):
            listed |= client.tasks(jobs, once=True)
    except SlurmError as e:
        return Queue(listed, str(e), damaged)
    return Queue(listed, None, damaged)


def _calls(specs: Sequence[RunSpec]) -> list[list[str]]:
    """Return the jobs to ask for in each call."""
    me = user()
    mine, others = dict[str, None](), dict[str, None]()
    for spec in specs:
        owner = spec.provenance.get("user", me)
        (mine if owner == me else others).update(dict.fromkeys(_jobs(spec)))
    return [jobs for jobs in (list(mine), *([job] for job in others)) if jobs]


def _jobs(spec: RunSpec) -> Iterable[str]:
    return dict.fromkeys(job_of(name) for name in current_names(spec))


def local_tasks(submission: Submission) -> dict[str, TaskState]:
    """Return a local launcher's tasks in Slurm's words.

    Raises:
        RunDirectoryError: what it has written down can not be read.
    """
    return {name: entry.seen_as(name) for name, entry in read_local_tasks(submission).items()}
