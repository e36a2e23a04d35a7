"""What will be submitted: runs become tasks of job arrays (pure).

A run of up to n nodes is n array tasks, its *slots*. Runs that ask Slurm for the same resources
share an array, so that a sweep is one sbatch call. The index of a task in its array is its place
in the queue, hence the two orders:

    queue_order=breadth_first  the min nodes of the first run, those of the second, and so on; then
                               the first further slot of every run, then the second
    queue_order=depth_first    all slots of the first run, then all of the second

Below its min nodes a run can not train. If every run stood in the queue with its first node, a
sweep of more runs than there are nodes would hold all of them, and no run could begin.

Slurm numbers the tasks of an array from 0 to MaxArraySize - 1 at most: what does not fit goes to
the next array, in the same order, and a run may lie across two.

A run with ``coallocate_min`` has its min nodes in one job of their own and an array for the others,
which may start once that job has. With queue_order=breadth_first all gangs stand in the queue
before any such array.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from hpc_elastic._util import counted
from hpc_elastic.config.schema import LauncherSettings, LocalSettings, RunSettings, SlurmSettings
from hpc_elastic.errors import ConfigError

SWEEP_WIDE = ("wait", "queue_order", "code_snapshot", "dry_run", "poll_interval_s")
"""Settings of the submission itself: one value for all runs of a sweep."""

_OF_THE_RUN = {field.name for field in fields(LauncherSettings)} - {
    "preempt_signal",
    "signal_delay_s",
}
"""Settings that no #SBATCH line depends on: runs that differ in them may share an array."""


@dataclass(frozen=True)
class PlannedRun:
    """One run as it will be submitted.

    Attributes:
        dir: Absolute path of the run directory.
        settings: What was asked for, checked.
        overrides: The user's overrides of this run, for people to recognise it by.
    """

    dir: Path
    settings: RunSettings
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Slot:
    """One node of a run: the run's place in the plan, and which of its nodes."""

    run: int
    slot: int


@dataclass(frozen=True)
class PlannedArray:
    """One job array, or one gang.

    Attributes:
        number: Its number k in the sweep.
        launcher: Its settings.
        tasks: Its tasks by index in the array, or by node id in the gang.
        gang: Whether it is one job of so many nodes.
        after: Number of the gang that it may not start before; None if it need not wait.
    """

    number: int
    launcher: SlurmSettings | LocalSettings
    tasks: tuple[Slot, ...]
    gang: bool = False
    after: int | None = None


@dataclass(frozen=True)
class Plan:
    """All that one submission hands to the scheduler.

    Attributes:
        submission: Absolute path of the sweep's ``.hpc_elastic``.
        runs: The runs, in the order of the sweep.
        arrays: The job arrays, in the order of their submission.
    """

    submission: Path
    runs: tuple[PlannedRun, ...]
    arrays: tuple[PlannedArray, ...]

    @property
    def launcher(self) -> SlurmSettings | LocalSettings:
        """Return the settings by which the submission itself goes (see `SWEEP_WIDE`)."""
        return self.runs[0].settings.launcher

    @property
    def backend(self) -> Literal["slurm", "local"]:
        """Return which launcher the plan is for."""
        return "slurm" if isinstance(self.launcher, SlurmSettings) else "local"

    def tasks(self) -> list[list[tuple[int, int]]]:
        """Return for each run the (array number, index) of each of its slots."""
        placed: list[dict[int, tuple[int, int]]] = [{} for _ in self.runs]
        for array in self.arrays:
            for index, task in enumerate(array.tasks):
                placed[task.run][task.slot] = (array.number, index)
        return [[slots[slot] for slot in sorted(slots)] for slots in placed]

    def array_file(self, array: PlannedArray) -> dict[str, Any]:
        """Return the content of ``array-<k>.json``: run directory and slot by index."""
        runs = [{"dir": str(self.runs[t.run].dir), "slot": t.slot} for t in array.tasks]
        return {"gang": True, "runs": runs} if array.gang else {"runs": runs}

    def __str__(self) -> str:
        """Return the plan in words, one line for each array."""
        num_tasks = sum(len(array.tasks) for array in self.arrays)
        head = [counted(len(self.runs), "run"), counted(num_tasks, "task")]
        num_gangs = sum(array.gang for array in self.arrays)
        head += [counted(num_gangs, "gang")] if num_gangs else []
        head.append(counted(len(self.arrays) - num_gangs, "array"))
        return "\n".join([", ".join(head), *(_describe(array) for array in self.arrays)])


def make_plan(
    runs: Sequence[PlannedRun],
    submission: Path,
    *,
    max_array_size: int,
    first_array: int = 0,
) -> Plan:
    """Lay the runs of one submission out as job arrays.

    Args:
        runs: The runs in the order of the sweep, at least one.
        submission: Absolute path of the sweep's ``.hpc_elastic``.
        max_array_size: Slurm's MaxArraySize: more tasks than this need another array.
        first_array: Number of the first array; a sweep submitted in batches goes on counting.

    Raises:
        ConfigError: a setting of the whole submission differs between runs.
    """
    _require_one_submission(runs)
    arrays: list[PlannedArray] = []
    gangs: dict[int, int] = {}
    for tasks, gang in _pieces(runs, max_array_size):
        number, first = first_array + len(arrays), tasks[0].run
        launcher = runs[first].settings.launcher
        arrays.append(PlannedArray(number, launcher, tuple(tasks), gang, gangs.get(first)))
        if gang:
            gangs[first] = number
    return Plan(submission, tuple(runs), tuple(arrays))


def has_gang(settings: RunSettings) -> bool:
    """Return whether the min part of a run is one job."""
    return isinstance(settings.launcher, SlurmSettings) and settings.launcher.coallocate_min


def _require_one_submission(runs: Sequence[PlannedRun]) -> None:
    first = runs[0].settings.launcher
    for other in (run.settings.launcher for run in runs[1:]):
        if type(other) is not type(first):
            raise ConfigError("launcher", "slurm,local", "a sweep has one launcher for all runs")
        for name in SWEEP_WIDE:
            if getattr(other, name) != getattr(first, name):
                values = [getattr(first, name), getattr(other, name)]
                remedy = "all runs of a sweep are submitted together and need the same value"
                raise ConfigError(f"launcher.{name}", values, remedy)


def _pieces(runs: Sequence[PlannedRun], size: int) -> Iterator[tuple[list[Slot], bool]]:
    """Yield the tasks of each array or gang, and which of the two it is, in the queue's order."""
    gangs_first = runs[0].settings.launcher.queue_order == "breadth_first"
    if gangs_first:
        gangs = (number for number, run in enumerate(runs) if has_gang(run.settings))
        yield from ((_gang(number, runs), True) for number in gangs)
    for group in _same_resources(runs):
        if not has_gang(runs[group[0]].settings):
            yield from ((tasks, False) for tasks in _chunks(list(_in_order(group, runs)), size))
            continue
        for number in group:
            if not gangs_first:
                yield _gang(number, runs), True
            yield from ((tasks, False) for tasks in _chunks(list(_in_order([number], runs)), size))


def _gang(number: int, runs: Sequence[PlannedRun]) -> list[Slot]:
    return [Slot(number, slot) for slot in range(runs[number].settings.nodes.min)]


def _same_resources(runs: Sequence[PlannedRun]) -> Iterable[list[int]]:
    groups: dict[str, list[int]] = {}
    for number, run in enumerate(runs):
        groups.setdefault(_resources(run.settings.launcher), []).append(number)
    return groups.values()


def _resources(launcher: SlurmSettings | LocalSettings) -> str:
    asked = {f.name: getattr(launcher, f.name) for f in fields(launcher)}
    return repr({name: value for name, value in asked.items() if name not in _OF_THE_RUN})


def _in_order(group: Sequence[int], runs: Sequence[PlannedRun]) -> Iterator[Slot]:
    """Return the slots of some runs that are no gang's, in the queue's order."""
    slots = {run: _array_slots(runs[run].settings) for run in group}
    if runs[group[0]].settings.launcher.queue_order == "depth_first":
        yield from (Slot(run, slot) for run in group for slot in slots[run])
        return
    least = {run: runs[run].settings.nodes.min for run in group}
    yield from (Slot(run, slot) for run in group for slot in slots[run] if slot < least[run])
    further = [[Slot(run, slot) for slot in slots[run] if slot >= least[run]] for run in group]
    yield from (slot for nth in zip_longest(*further) for slot in nth if slot is not None)


def _array_slots(settings: RunSettings) -> range:
    return range(settings.nodes.min if has_gang(settings) else 0, settings.nodes.max)


def _chunks(tasks: list[Slot], size: int) -> Iterator[list[Slot]]:
    return (tasks[start : start + size] for start in range(0, len(tasks), size))


def _describe(array: PlannedArray) -> str:
    runs = {task.run for task in array.tasks}
    if array.gang:
        return f"  array {array.number}: a gang, {counted(len(array.tasks), 'node')} at once"
    tasks = counted(len(array.tasks), "task")
    after = "" if array.after is None else f", once array {array.after} has started"
    return f"  array {array.number}: {tasks} of {counted(len(runs), 'run')}{after}"
