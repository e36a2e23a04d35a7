"""Plan of a submission: the runs of a sweep as tasks of job arrays (pure).

A run of up to n nodes is n array tasks, its *slots*. Runs that ask Slurm for the same resources
share an array, so that a sweep is one sbatch call. The index of a task in its array is its position
in the queue, hence the two orders:

    queue_order=breadth_first  the min nodes of the first run, those of the second, and so on; then
                               the first further slot of every run, then the second
    queue_order=depth_first    all slots of the first run, then all of the second

Below its min nodes a run cannot train. If every run stood in the queue with its first node, a sweep
of more runs than there are nodes would hold all nodes, and no run could start.

Slurm numbers the tasks of an array from 0 to MaxArraySize - 1. Further tasks go to the next array,
in the same order; a run may lie across two arrays.

A run with ``coallocate_min`` has its min nodes in one co-allocated job, and an array for the others
that may start once that job has started. With breadth_first all co-allocated jobs stand in the
queue before any array of such a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from hpc_elastic._util import counted
from hpc_elastic.config.schema import Backend, LauncherSettings, RunSettings
from hpc_elastic.errors import ConfigError
from hpc_elastic.run.directory import Entry, Submission

T = TypeVar("T")

SWEEP_WIDE = ("wait", "queue_order", "code_snapshot", "dry_run", "poll_interval_s", "result_job")
"""Settings of the submission itself: one value for all runs of a sweep."""

_IN_NO_DIRECTIVE = {f.name for f in fields(LauncherSettings)} - {"preempt_signal", "signal_delay_s"}
"""Settings that no #SBATCH line depends on: runs that differ in them may share an array."""


@dataclass(frozen=True)
class RunRequest:
    """One run to be submitted; ``hydra_files`` are texts of ``.hydra/``, each in pieces."""

    dir: Path
    settings: RunSettings
    entry: Entry
    overrides: tuple[str, ...] = ()
    hydra_files: Mapping[str, Sequence[str]] = field(default_factory=dict)


def by_settings(runs: Sequence[RunRequest], function: Callable[[RunSettings], T]) -> list[T]:
    """Return the function of each run's settings; it is called once where runs share them."""
    found = {key: function(own) for key, own in {id(r.settings): r.settings for r in runs}.items()}
    return [found[id(run.settings)] for run in runs]


class Slot(NamedTuple):
    """One node of a run: position of the run in the plan, and number of the node."""

    run: int
    slot: int


@dataclass(frozen=True)
class PlannedArray:
    """One job array, or one co-allocated job of ``len(tasks)`` nodes.

    ``number`` is its k in the sweep. ``tasks`` are by index in the array, or by node id. ``after``
    is the number of the co-allocated job that has to start first.
    """

    number: int
    launcher: Backend
    tasks: tuple[Slot, ...]
    coallocated: bool = False
    after: int | None = None


@dataclass(frozen=True)
class Plan:
    """All that one submission hands to the scheduler: its runs and arrays, in order."""

    submission: Path
    runs: tuple[RunRequest, ...]
    arrays: tuple[PlannedArray, ...]

    @property
    def launcher(self) -> Backend:
        """The settings of the submission itself (see `SWEEP_WIDE`)."""
        return self.runs[0].settings.launcher

    @property
    def backend(self) -> Literal["slurm", "local"]:
        """The launcher that the plan is for."""
        return self.runs[0].settings.backend

    @property
    def scripts(self) -> list[Path]:
        """The batch script of each array; none with ``launcher=local``."""
        arrays = self.arrays if self.backend == "slurm" else ()
        return [Submission(self.submission).array(array.number).script for array in arrays]

    @cached_property
    def tasks(self) -> list[list[tuple[int, int]]]:
        """For each run the (array number, index) of each of its slots."""
        placed: list[dict[int, tuple[int, int]]] = [{} for _ in self.runs]
        for array in self.arrays:
            for index, (run, slot) in enumerate(array.tasks):
                placed[run][slot] = (array.number, index)
        return [[slots[slot] for slot in sorted(slots)] for slots in placed]

    def array_file(self, array: PlannedArray) -> dict[str, Any]:
        """Return the content of ``array-<k>.json``: run directory and slot by index."""
        runs = [{"dir": str(self.runs[t.run].dir), "slot": t.slot} for t in array.tasks]
        return {"coallocated": True, "runs": runs} if array.coallocated else {"runs": runs}

    def __str__(self) -> str:
        """Return a summary of the plan, one line for each array."""
        num_tasks = sum(len(array.tasks) for array in self.arrays)
        head = [counted(len(self.runs), "run"), counted(num_tasks, "task")]
        num_jobs = sum(array.coallocated for array in self.arrays)
        head += [counted(num_jobs, "co-allocated job")] if num_jobs else []
        head.append(counted(len(self.arrays) - num_jobs, "array"))
        lines = [", ".join(head)]
        for array in self.arrays:
            if array.coallocated:
                what = f"{counted(len(array.tasks), 'node')}, co-allocated"
            else:
                num_runs = len({task.run for task in array.tasks})
                what = f"{counted(len(array.tasks), 'task')} of {counted(num_runs, 'run')}"
                what += "" if array.after is None else f", once array {array.after} has started"
            lines.append(f"  array {array.number}: {what}")
        return "\n".join(lines)


def make_plan(
    runs: Sequence[RunRequest], submission: Path, *, max_array_size: int, first_array: int = 0
) -> Plan:
    """Lay runs out as job arrays; ConfigError if a setting of the submission differs."""
    first_launcher = runs[0].settings.launcher
    for other in (run.settings.launcher for run in runs[1:]):
        if type(other) is not type(first_launcher):
            raise ConfigError("launcher", "slurm,local", "a sweep has one launcher for all runs")
        for name in SWEEP_WIDE:
            values = [getattr(each, name, None) for each in (first_launcher, other)]
            if values[0] != values[1]:
                remedy = "all runs of a sweep are submitted together and need the same value"
                raise ConfigError(f"launcher.{name}", values, remedy)
    arrays: list[PlannedArray] = []
    jobs: dict[int, int] = {}
    for tasks, launcher, coallocated in _pieces(runs, max_array_size):
        number, first = first_array + len(arrays), tasks[0].run
        arrays.append(PlannedArray(number, launcher, tuple(tasks), coallocated, jobs.get(first)))
        if coallocated:
            jobs[first] = number
    return Plan(submission, tuple(runs), tuple(arrays))


class _Share(NamedTuple):
    """Slots of a run that request the same resources, beside those of its co-allocated job."""

    run: int
    slots: range
    launcher: Backend


def _pieces(runs: Sequence[RunRequest], size: int) -> Iterator[tuple[list[Slot], Backend, bool]]:
    """Yield the tasks of each array or co-allocated job, its settings, and which it is."""
    jobs_first = runs[0].settings.launcher.queue_order == "breadth_first"
    sizes = {number: run.settings.num_coallocated for number, run in enumerate(runs)}
    jobs = {run: [Slot(run, slot) for slot in range(n)] for run, n in sizes.items() if n}
    if jobs_first:
        yield from ((tasks, runs[run].settings.launcher, True) for run, tasks in jobs.items())
    for group in _same_resources(runs):
        # a co-allocated job has an array of its own beside it
        for part in [[share] for share in group] if group[0].run in jobs else [group]:
            first = part[0]
            if not jobs_first and first.run in jobs:
                yield jobs[first.run], first.launcher, True
            tasks = _in_order(part, runs)
            for at in range(0, len(tasks), size):
                yield tasks[at : at + size], first.launcher, False


def _same_resources(runs: Sequence[RunRequest]) -> Iterable[list[_Share]]:
    def shares(settings: RunSettings) -> list[tuple[str, range, Backend]]:
        found = []
        for slots, launcher in settings.shares:
            asked = {name: v for name, v in vars(launcher).items() if name not in _IN_NO_DIRECTIVE}
            found.append((repr(asked), slots[settings.num_coallocated :], launcher))
        return found

    groups: dict[str, list[_Share]] = {}
    for number, of_run in enumerate(by_settings(runs, shares)):
        for key, rest, launcher in of_run:
            groups.setdefault(key, []).append(_Share(number, rest, launcher))
    return groups.values()


def _in_order(group: Sequence[_Share], runs: Sequence[RunRequest]) -> list[Slot]:
    shares = [[Slot(share.run, slot) for slot in share.slots] for share in group]
    if group[0].launcher.queue_order == "depth_first":
        return [*chain(*shares)]

    def is_first(slot: Slot) -> bool:
        return slot.slot < runs[slot.run].settings.nodes.min

    further = [[slot for slot in slots if not is_first(slot)] for slots in shares]
    in_turn = (slot for nth in zip_longest(*further) for slot in nth if slot is not None)
    return [*filter(is_first, chain(*shares)), *in_turn]
