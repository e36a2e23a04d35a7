"""The runs of one sweep in Slurm's queue: what `turns` decides, asked and carried out."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.fence import last_record
from hpc_elastic.files import is_there
from hpc_elastic.rundir import ArrayFiles, RunDir, RunSpec, Submission, task_name
from hpc_elastic.slurm import turns
from hpc_elastic.slurm.client import RELEASE_DELAY_S, SlurmClient
from hpc_elastic.slurm.replacement import excluded, followed, list_followed
from hpc_elastic.slurm.states import Phase, TaskState

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 10.0
"""How often the first run that trains looks whether others may start that stay away; the n-th n
times as seldom, so that any number of runs asks Slurm no more than a few do."""
LOOK_SELDOM_S = 30.0
"""The same, where at the last look none stayed away."""


@dataclass(frozen=True)
class _Member:
    """A run of the sweep: its directory, and its names in the queue in the order of its slots."""

    run: RunDir
    tasks: tuple[str, ...]


class SweepQueue:
    """The queue as the leader of one run of a sweep sees it.

    Calls block for as long as Slurm does. They raise `SlurmError` where Slurm does not answer, and
    `OSError` where the submission's files can not be read.
    """

    def __init__(
        self, run: RunDir, spec: RunSpec, partition: str | None, client: SlurmClient
    ) -> None:
        self._run = run
        self._spec = spec
        self._partition = spec.partition or partition
        self._client = client
        self._submission = Submission(Path(spec.submission))
        self._specs: dict[Path, RunSpec] = {}
        self._looking = threading.Lock()
        self._next_look = 0.0

    @property
    def num_runs(self) -> int:
        """How many runs were submitted together."""
        return len(self._members())

    def waits_in_vain(self, lost: Mapping[str, int]) -> str | None:
        """Return why this run waits in vain for its minimum; None if it may yet get it.

        Args:
            lost: This run's tasks that were lost, each with its attempt.
        """
        found = self._runs()
        if found is None:
            return None
        runs, own = found
        runs[own] = replace(runs[own], lost=lost)
        return turns.waits_in_vain(runs, own, self._nodes())

    def let_others_start(self, lost: Iterable[str] = (), *, ends: bool = False) -> None:
        """Let runs start that stay away, as far as there are idle nodes for their minimum.

        Args:
            lost: This run's tasks that were lost.
            ends: Whether this run has ended. If not, and it was asked too recently, nothing is
                done.
        """
        if not self._looking.acquire(blocking=ends):
            return  # Slurm has not answered yet
        try:
            if ends or time.monotonic() >= self._next_look:
                self._let_others_start(frozenset(lost), ends=ends)
        finally:
            self._looking.release()

    def _let_others_start(self, lost: frozenset[str], *, ends: bool) -> None:
        found = self._runs()
        if found is None:
            return
        runs, own = found
        earlier = sum(run.lacks == 0 and not run.is_over for run in runs[:own])
        are_away = any(run.away for run in runs)
        every_s = LOOK_EVERY_S if are_away else LOOK_SELDOM_S
        self._next_look = time.monotonic() + every_s * (1 + earlier)
        if not are_away:
            return
        names = turns.let_start(runs, own, self._nodes(), ends=ends, lost=lost)
        now = followed(self._submission)
        names = [now.get(name, name) for name in names]
        if names:
            _log.info("there are nodes for tasks that stayed away: %s", ", ".join(names))
            self._client.postpone(names, RELEASE_DELAY_S)

    # ---- what there is ------------------------------------------------------------------

    def _runs(self) -> tuple[list[turns.QueuedRun], int] | None:
        """Return the runs of the sweep in their order, and this one's place among them."""
        members = self._members()
        own = next((i for i, m in enumerate(members) if m.run.path == self._run.path), None)
        if own is None:
            return None
        jobs = self._submission.job_ids()
        listed = list_followed(self._client, self._submission, jobs.values())
        return [self._queued(member, listed) for member in members], own

    def _queued(self, member: _Member, listed: Mapping[str, TaskState]) -> turns.QueuedRun:
        """Return a run as the queue shows it; one whose directory was removed wants nothing."""
        name = member.run.path.name
        tasks = {task: listed[task] for task in member.tasks if task in listed}
        waits = any(state.phase is Phase.PENDING for state in tasks.values())
        try:
            spec = self._spec_of(member.run)
            has_started = waits and last_record(member.run.rdzv) > 0
        except (RunDirectoryError, FileNotFoundError):
            if is_there(member.run.spec):
                raise
            return turns.QueuedRun(name, 0, tasks)
        return turns.QueuedRun(
            name,
            spec.min_nodes,
            tasks,
            spec.min_nodes if spec.gang else 0,
            has_started=has_started,
            avoids=frozenset(excluded(member.run) if waits else ()),
        )

    def _members(self) -> list[_Member]:
        """Read which runs were submitted together, and which tasks each has."""
        found: dict[Path, dict[int, str]] = {}
        for array in self._submission.arrays():
            job = array.job_id
            if job:
                for run, slot, name in _tasks_of(array, job):
                    found.setdefault(run, {})[slot] = name
        return [
            _Member(RunDir(run), tuple(dict.fromkeys(slots[n] for n in sorted(slots))))
            for run, slots in found.items()
        ]

    def _spec_of(self, run: RunDir) -> RunSpec:
        if run.path not in self._specs:
            self._specs[run.path] = run.load()
        return self._specs[run.path]

    def _nodes(self) -> turns.Nodes:
        return turns.Nodes(self._client.each_node(self._partition), self._spec.whole_nodes)


def _tasks_of(array: ArrayFiles, job: str) -> Iterable[tuple[Path, int, str]]:
    """Yield the run, the slot and the name in the queue of each task of an array or gang."""
    try:
        content = json.loads(array.tasks.read_text())
        gang = bool(content.get("gang"))
        for index, task in enumerate(content["runs"]):
            name = job if gang else task_name(job, index)
            yield Path(task["dir"]), int(task["slot"]), name
    except (ValueError, KeyError, TypeError) as e:
        raise RunDirectoryError(f"{array.tasks}: not readable: {e}") from e
