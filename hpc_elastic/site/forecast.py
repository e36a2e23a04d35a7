"""Forecast of the starts of a run's tasks, from what an ordinary user may read of Slurm. Pure.

A run is one task for each node, so it grows whenever one node is free for one task. There are two
sources:

- **The nodes' outlook**: a node is free at once, or when the last job on it reaches its time limit,
  and not while backfill has planned a waiting job there. It includes the queue as far as backfill
  has planned it, and no other rule of the cluster.
- **``sbatch --test-only``**: Slurm's own estimate, for the run's own time limit. It includes
  features of nodes, reservations and the jobs of users that are hidden. Waiting jobs of a higher
  priority are included as their node time divided by the nodes of the partition, which delays every
  estimate by as much, also one for a gap that backfill fills at once (22.05 to 26.05). So the later
  of both counts only where no job waits; else the test counts for nodes with an unknown time only.

Both count time limits, so a job that ends early lets a run start sooner. Unknown are: nodes whose
jobs are hidden or have no time limit; nodes that are planned for a job without a visible plan; and
waiting jobs that backfill has not planned. `Outlook` counts them. Neither source includes a
preemption, or a job that is submitted later.

`expected_start` is the forecast for the waiting tasks of a submitted run: Slurm's own plan. With
fitted time limits (`site.limits`) the next gap is sooner.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_elastic._util import counted, duration
from hpc_elastic.config.parse import time_limit_s
from hpc_elastic.config.schema import SlurmSettings
from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.run.directory import RunSpec
from hpc_elastic.site import queue_model
from hpc_elastic.site.nodes import NodeState
from hpc_elastic.site.queue_model import Demand, RunTimes, StartTimes
from hpc_elastic.slurm import run_tasks
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import WAITS_FOR_NODES, Phase, TaskState, remedy
from hpc_elastic.slurm.nodelist import expand
from hpc_elastic.slurm.parsing import (
    RESERVED,
    Partition,
    QueuedJob,
    backfill_interval_s,
    selected,
)

SAME_S = 60.0
"""Starts less far apart are one: backfill makes a pass each half minute."""
FAR_S = 30 * 86_400.0
"""Without time limits Slurm expects an end in a year: a time further ahead than this is unknown."""
LIMITS_S = tuple(60.0 * minutes for minutes in (1440, 720, 480, 240, 120, 60, 30, 20, 10))
"""Shorter time limits that are tried beside a run's own."""
_MOST_SHAPES = 4
NO_RESERVE_S = 60.0
"""How long a gap must be for tasks of a QOS with NoReserve, which backfill takes for jobs of a
minute. They start with their whole time limit."""

_AHEAD = ("", *WAITS_FOR_NODES)
"""The same, and of jobs that Slurm has not looked at."""


# ---- the nodes


@dataclass(frozen=True)
class NodeOutlook:
    """One node that takes jobs.

    ``gaps`` are its spans without a job in Unix seconds, in order; the last one is infinite. None
    if it is unknown when the node is free. ``is_planned``: it is idle, and backfill has planned a
    waiting job there.
    """

    gaps: tuple[tuple[float, float], ...] | None
    is_busy: bool = False
    is_planned: bool = False

    def windows(self, limit_s: float) -> list[tuple[float, float]]:
        """Return the spans in which a task with this time limit may start; none if unknown."""
        return [
            (begin, math.inf if end == math.inf else end - limit_s)
            for begin, end in self.gaps or ()
            if end - begin >= limit_s
        ]


@dataclass(frozen=True)
class Outlook:
    """The nodes of the wanted partitions that take jobs, and the queue before them.

    ``num_out`` take no jobs: out of service, or in a reservation. ``num_waiting`` jobs, of array
    elements each, wait for nodes; of ``num_unplanned`` of these no planned start is visible.
    """

    nodes: Mapping[str, NodeOutlook]
    num_out: int = 0
    num_waiting: int = 0
    num_unplanned: int = 0

    @property
    def num_idle(self) -> int:
        """Number of idle nodes, those included that are planned for a waiting job."""
        return sum(not node.is_busy for node in self.nodes.values())

    @property
    def num_planned(self) -> int:
        """Number of idle nodes that are planned for a waiting job."""
        return sum(node.is_planned for node in self.nodes.values())

    @property
    def num_busy(self) -> int:
        """Number of nodes with a job."""
        return sum(node.is_busy for node in self.nodes.values())

    def num_unknown(self, *, busy: bool) -> int:
        """Return how many busy nodes, or idle and planned ones, are free at an unknown time."""
        return sum(node.gaps is None and node.is_busy == busy for node in self.nodes.values())


def ahead_of(jobs: Iterable[QueuedJob], own: Iterable[str]) -> list[QueuedJob]:
    """Return the jobs that a run's tasks may not delay: what is planned for these ends a gap.

    The run's own (``own``: their ids) are left out, and jobs behind all of these in the same queue,
    since backfill plans those around a task that starts now.
    """
    jobs, own = list(jobs), set(own)
    others = [job for job in jobs if job.job not in own]
    if not (mine := [job for job in jobs if job.job in own and job.waits]):
        return others
    return [job for job in others if not (job.waits and all(map(job.is_behind, mine)))]


def gap_ends(
    nodes: Iterable[str], waiting: Iterable[QueuedJob], own: Iterable[str]
) -> dict[str, float]:
    """Return when each node is needed by another job that waits; infinite if never (Unix seconds).

    Backfill plans in steps of a minute (bf_resolution), and rounds down. The run's own jobs end no
    gap (``own``: their ids).
    """
    ends = dict.fromkeys(nodes, math.inf)
    for job in ahead_of(waiting, own):
        if job.starts_at is not None:
            for node in ends.keys() & set(job.nodes):
                ends[node] = min(ends[node], job.starts_at // 60 * 60)
    return ends


def outlook(
    states: Mapping[str, str],
    jobs: Iterable[QueuedJob],
    now: float,
    *,
    partitions: Sequence[str] = (),
    are_jobs_hidden: bool = False,
) -> Outlook:
    """Return the outlook of some nodes, whose states are in sinfo's words, in Unix seconds.

    ``jobs`` are of all partitions, since those of others use the same nodes, and have the
    reservations. ``partitions`` are the wanted ones, for the waiting jobs. ``are_jobs_hidden``: a
    node with a visible job may have others.
    """
    ends: dict[str, list[float | None]] = {}
    plans: dict[str, list[tuple[float, float]]] = {}
    num_waiting = num_unplanned = 0
    for job in jobs:
        if not job.waits:
            for node in job.nodes:
                ends.setdefault(node, []).append(job.ends_at)
            continue
        if job.reason in _AHEAD and set(job.partitions) & set(partitions):
            num_waiting += job.num_tasks
            # of an array, squeue has the plan of one element
            num_unplanned += job.num_tasks - (job.starts_at is not None)
        begin = max(now, job.starts_at or now)
        for node in job.nodes if job.starts_at is not None else ():
            end = math.inf if job.limit_s is None else begin + job.limit_s
            plans.setdefault(node, []).append((begin, end))
    nodes: dict[str, NodeOutlook] = {}
    num_out = 0
    for name, text in states.items():
        state = NodeState.parse(text)
        planned, occupied = sorted(plans.get(name, ())), ends.get(name, [])
        if state.is_idle:
            is_planned = bool(planned) or state.is_planned
            is_known = bool(planned) or not is_planned
            gaps = _gaps(now, planned) if is_known else None
            nodes[name] = NodeOutlook(gaps, is_planned=is_planned)
        elif state.is_busy:
            is_complete = bool(occupied) and not (are_jobs_hidden and state.word == "mixed")
            known = [end for end in occupied if end is not None and end - now < FAR_S]
            is_known = is_complete and len(known) == len(occupied)
            free_at = max([now, *known])
            is_ending = state.word == "completing"
            gaps = _gaps(free_at, planned) if is_known or is_ending else None
            nodes[name] = NodeOutlook(gaps, is_busy=True)
        else:
            num_out += 1
    return Outlook(nodes, num_out, num_waiting, num_unplanned)


def _gaps(
    free_at: float, planned: Sequence[tuple[float, float]]
) -> tuple[tuple[float, float], ...]:
    """Return the spans of a node without a job, from when it is free on."""
    gaps: list[tuple[float, float]] = []
    at = free_at
    for begin, end in planned:
        if begin > at:
            gaps.append((at, begin))
        at = max(at, end)
    return (*gaps, *([(at, math.inf)] if at < math.inf else []))


# ---- the shapes of a request


@dataclass(frozen=True)
class Shape:
    """One time limit of the tasks (infinite without one), and when Slurm starts them at the latest.

    Attributes:
        sizes: The numbers of nodes that the run may have; the first one is its minimum.
        starts: When the first, second and each further node is free, in Unix seconds, as far as
            known.
        together: When the minimum is free at the same time, if it is one job; None if unknown.
        tested: Number of nodes -> when Slurm starts a job of as many, by ``sbatch --test-only``.
        is_queue_empty: Whether no job waits, so that no start is earlier than as tested.
        learned: Number of nodes -> when the run has them by how long jobs really run.
    """

    limit_s: float
    sizes: Sequence[int]
    starts: tuple[float, ...]
    together: float | None = None
    tested: Mapping[int, float] = field(default_factory=dict)
    is_queue_empty: bool = False
    learned: Mapping[int, StartTimes] = field(default_factory=dict)

    def start_of(self, number: int) -> float | None:
        """Return when the run has this many nodes; None if unknown."""
        if number <= len(self.starts):
            counts = self.tested.items() if self.is_queue_empty else ()
            return max(self.starts[number - 1], *(at for n, at in counts if n <= number), 0.0)
        return min((at for nodes, at in self.tested.items() if nodes >= number), default=None)

    @property
    def starts_at(self) -> float | None:
        """When the run has its minimum; None if unknown."""
        at = self.start_of(self.sizes[0])
        return at if at is None or self.together is None else max(at, self.together)

    @property
    def growth(self) -> list[tuple[int, float]]:
        """The sizes of the run and when it has them, if known; starts within `SAME_S` are one."""
        first, steps = self.starts_at, list[tuple[int, float]]()
        for number in self.sizes:
            at = self.start_of(number)
            if at is None or first is None:
                break
            at = max(at, first)
            if steps and at - steps[-1][1] < SAME_S:
                steps[-1] = (number, steps[-1][1])
            else:
                steps.append((number, at))
        return steps


@dataclass(frozen=True)
class TaskTerms:
    """What the tasks of a run, or of one of its pools, ask for.

    The time limit is infinite without one. ``gap_s`` is the shortest gap in which a task starts;
    None: as long as its limit. The ``number`` of tasks is that of the run where it is None, and all
    ``nodes`` are allowed.
    """

    limit_s: float
    gap_s: float | None = None
    number: int | None = None
    nodes: frozenset[str] | None = None

    def windows(self, found: Outlook, limit_s: float) -> dict[str, list[tuple[float, float]]]:
        """Return the spans in which a task may start by node, with this time limit at most."""
        planned_s = min(limit_s, self.limit_s, self.gap_s or math.inf)
        allowed = found.nodes if self.nodes is None else found.nodes.keys() & self.nodes
        spans = {name: found.nodes[name].windows(planned_s) for name in sorted(allowed)}
        return {name: windows for name, windows in spans.items() if windows}


def shapes(
    found: Outlook,
    pools: Sequence[TaskTerms],
    sizes: Sequence[int],
    now: float,
    *,
    coallocated: bool = False,
) -> list[Shape]:
    """Return a run's own time limit, and shorter ones, the longest first, that let it start sooner.

    A shorter one may also give it more nodes. It counts for the ``pools`` with a longer limit.
    ``coallocated``: the minimum of the run is one job.
    """
    kept: list[Shape] = []
    own_s = max(pool.limit_s for pool in pools)
    for limit_s in (own_s, *(shorter for shorter in LIMITS_S if shorter < own_s)):
        windows: dict[str, list[tuple[float, float]]] = {}
        starts: list[tuple[float, str, int]] = []
        for number, pool in enumerate(pools):
            spans = pool.windows(found, limit_s)
            starts += [(at, node, number) for node, ((at, _), *_) in spans.items()]
            windows = {**spans, **windows}
        together = _together(windows, sizes[0]) if coallocated else None
        shape = Shape(limit_s, sizes, _first(starts, pools, sizes[-1], now), together)
        if not kept or _is_better(shape, kept[-1], now):
            kept.append(shape)
    return kept[:_MOST_SHAPES]


def _first(
    starts: Iterable[tuple[float, str, int]], pools: Sequence[TaskTerms], most: int, now: float
) -> tuple[float, ...]:
    """Return the first starts, one for each node, and no more for each pool than it has tasks."""
    left = [most if pool.number is None else pool.number for pool in pools]
    taken: dict[str, float] = {}
    for at, node, number in sorted(starts):
        if at - now < FAR_S and left[number] and node not in taken:
            taken[node] = at
            left[number] -= 1
    return tuple(taken.values())[:most]


def _together(windows: Mapping[str, Sequence[tuple[float, float]]], number: int) -> float | None:
    """Return the first time at which a number of nodes may start a task; None if there is none."""
    spans = [span for each in windows.values() for span in each]
    changes = [change for begin, end in spans for change in ((begin, 0), (end, 1))]
    free = 0
    for at, is_end in sorted(changes):
        free += -1 if is_end else 1
        if free == number and not is_end:
            return at
    return None


def _is_better(shape: Shape, other: Shape, now: float) -> bool:
    """Return whether a shorter time limit gives the run an earlier start, or more nodes at once."""
    mine, others = (s.start_of(s.sizes[0]) or math.inf for s in (shape, other))
    if others - mine >= SAME_S:
        return True
    at_once = [sum(at - now < SAME_S for at in s.starts) for s in (shape, other)]
    return at_once[0] > at_once[1] and at_once[0] >= shape.sizes[0]


def soonest(found: Sequence[Shape]) -> Shape | None:
    """Return the shape with the earliest start, by the learned ones if all have them."""
    middles = [start.p50 for shape in found if (start := shape.learned.get(shape.sizes[0]))]
    ats = middles if len(middles) == len(found) else [shape.starts_at for shape in found]
    known = [(at, shape) for at, shape in zip(ats, found, strict=True) if at is not None]
    if not known:
        return None
    first = min(at for at, _ in known)
    return next(shape for at, shape in known if at - first < SAME_S)


# ---- the starts by how long jobs really run


def learned_starts(
    found: Outlook,
    jobs: Sequence[QueuedJob],
    terms: TaskTerms,
    sizes: Sequence[int],
    runs: RunTimes,
    now: float,
    *,
    partitions: Collection[str] = (),
    own: Collection[str] = (),
    coallocated: bool = False,
    pass_s: float = queue_model.PASS_S,
) -> dict[int, StartTimes]:
    """Return when a run has each of its sizes, as far as that is known; none without a record.

    ``own`` are the ids of its jobs. If none of them waits, its tasks come behind all jobs that wait
    in its ``partitions``. ``coallocated``: the minimum of the run is one job. ``pass_s``: between
    two passes of backfill.
    """
    nodes = {name for name, node in found.nodes.items() if node.gaps is not None}
    number = 1 if coallocated else min(len(nodes), sizes[-1])
    if runs.num_ended < queue_model.LEAST_ENDED or not number:
        return {}
    task = Demand(sizes[0] if coallocated else 1, terms.limit_s, least_s=terms.gap_s or math.inf)
    last: dict[str, QueuedJob] = {}  # of each node the job whose limit ends last
    for job in sorted(jobs, key=lambda job: job.ends_at or 0.0):
        if not job.waits and job.state != "COMPLETING" and job.ends_at:
            last |= dict.fromkeys(nodes.intersection(job.nodes), job)
    demands: list[Demand] = []
    places: list[int] = []
    for job in sorted(jobs, key=lambda job: (job.state == "PENDING", -job.priority)):
        here = nodes.intersection(job.nodes)
        limit_s, survival = job.limit_s or FAR_S, runs.survival_of(job)
        if not job.waits:
            here = {name for name in here if last.get(name) is job}
            began_at = (job.ends_at or now) - limit_s
            survival = None if job.job in own else survival
            demands += [Demand(len(here), limit_s, survival, began_at)] if here else []
            continue
        if job.state == RESERVED:
            begins_at = max(now, job.starts_at or now)
            demands += [Demand(len(here), limit_s, None, begins_at)] if here else []
            continue
        starts_at = job.starts_at if job.reason == "BeginTime" else None
        if starts_at is None and not (here or job.reason in _AHEAD):
            continue  # it waits for something else than nodes
        if job.job in own:
            demand, most = task, number - len(places)
        else:
            is_other = set(partitions).isdisjoint(job.partitions)
            size = len(here) if is_other else min(job.num_nodes, len(nodes))
            demand, most = Demand(size, limit_s, survival), queue_model.MOST_WAITING if size else 0
        more = [replace(demand, not_before=starts_at or now)] * min(job.num_tasks, most)
        places += range(len(demands), len(demands) + len(more)) if job.job in own else ()
        demands += more
    if not places:
        places += range(len(demands), len(demands) + number)
        demands += [task] * number
    draws = queue_model.sample_starts(len(nodes), demands, places, now, pass_s)
    size_of = {sizes[0]: 0} if coallocated else {n: n - 1 for n in sizes if n <= len(places)}
    times = {n: StartTimes.of(draw[i] for draw in draws) for n, i in size_of.items()}
    return {n: start for n, start in times.items() if start.p90 - now < FAR_S}


# ---- the waiting tasks of a submitted run


@dataclass(frozen=True)
class ExpectedStart:
    """The start of the next waiting task of a run, in Unix seconds; None where unknown or unasked.

    ``at`` is when Slurm expects it, or ``why`` is the reason. ``not_before`` is None if it may
    start at any time. ``learned`` is the start by how long jobs really run, and ``learned_from``
    says from what, or why not. With a time limit of ``shorter_s`` a task could start at
    ``shorter_at``, which is sooner.
    """

    at: float | None = None
    not_before: float | None = None
    why: str | None = None
    learned: StartTimes | None = None
    learned_from: str | None = None
    shorter_s: float | None = None
    shorter_at: float | None = None


def expected_start(tasks: Iterable[TaskState], now: float) -> ExpectedStart | None:
    """Return when the next of a run's tasks is expected to start; None if none of them waits."""
    waiting = [task for task in tasks if task.phase is Phase.PENDING]
    if not waiting:
        return None
    planned, later = list[float](), list[float]()
    for task in waiting:
        if task.starts_in_s is not None:
            (later if task.reason in ("", "BeginTime") else planned).append(task.starts_in_s)
    if planned and min(planned) < FAR_S:
        return ExpectedStart(at=now + max(0.0, min(planned)))
    if planned:
        what = f"Slurm plans it in {duration(min(planned))}: jobs before it have no time limit"
        return ExpectedStart(why=what)
    if len(later) == len(waiting):
        return ExpectedStart(
            not_before=now + max(0.0, min(later)), why="it is back in the queue, with a delay"
        )
    counts = Counter(task.reason or task.state for task in waiting)
    reasons = ", ".join(f"{counted(num, 'task')} {reason}" for reason, num in counts.items())
    remedies = {remedy(task.reason) for task in waiting}
    if None not in remedies:
        what = "; ".join(sorted(filter(None, remedies)))
        return ExpectedStart(why=f"no task can start ({reasons}): {what}")
    return ExpectedStart(why=f"Slurm has planned no start ({reasons})")


# ---- the gaps of a submitted run


def without_excluded(states: Mapping[str, str], launcher: Any) -> dict[str, str]:
    """Return the nodes that ``launcher.exclude`` does not name, with their states (pure)."""
    left_out = set(expand(launcher.exclude or ""))
    return {node: state for node, state in states.items() if node not in left_out}


def task_terms(
    launcher: SlurmSettings, partitions: Sequence[Partition], no_reserve: Container[str | None]
) -> TaskTerms:
    """Return the terms of a pool's tasks in some partitions (pure).

    A QOS in ``no_reserve`` has that flag. It counts before ``time_min``: backfill takes its tasks
    for jobs of a minute, whatever their time limit is.
    """
    given = launcher.sbatch.get("time", launcher.time)
    if given is None:
        defaults = [p.default_time_s or p.max_time_s or math.inf for p in partitions]
        limit_s: float | None = min(defaults, default=math.inf)
    else:
        limit_s = time_limit_s(str(given))
    gap_s = NO_RESERVE_S if launcher.qos in no_reserve else time_limit_s(launcher.time_min or "")
    return TaskTerms(math.inf if limit_s is None else limit_s, gap_s)


def no_reserve_qos(launchers: Sequence[Any], client: SlurmClient) -> frozenset[str]:
    """Return the QOS that are known to have the flag NoReserve, if a pool has a QOS."""
    with suppress(SlurmCommandError):  # no accounting, or it is private
        if any(launcher.qos is not None for launcher in launchers):
            return frozenset(qos.name for qos in client.all_qos() if "NoReserve" in qos.flags)
    return frozenset()


def next_start(
    spec: RunSpec, expected: ExpectedStart, client: SlurmClient | None = None
) -> ExpectedStart:
    """Return the start of the next waiting task, in gaps too, and by how long jobs really run.

    Slurm's plan for a task with a fitted time limit is for the limit that it has at present, and
    its run will set the limit that fits (`site.limits`): ``at`` is the begin of the next gap if
    that is sooner. At most seven of Slurm's commands are called, one more for each further pool.
    Raises SlurmCommandError if Slurm does not answer, and OSError or ValueError if the run's files
    cannot be read.
    """
    launchers: list[Any] = [own for _, own in spec.settings.shares]
    if spec.settings.backend == "local" or any(own.constraint for own in launchers):
        return expected
    client = client or SlurmClient(env=dict(os.environ))
    partitions, own = client.all_partitions(), set(run_tasks.jobs_of(spec))
    jobs = client.queue()
    ahead, now, starts = ahead_of(jobs, own), time.time(), list[float]()
    no_reserve = no_reserve_qos(launchers, client)
    for launcher in launchers:
        chosen = selected(partitions, launcher.partition)
        names = [partition.name for partition in chosen]
        listed = client.each_node(",".join(names) or launcher.partition)
        states = without_excluded(listed, launcher)
        terms = task_terms(launcher, chosen, no_reserve)
        if launcher.time_min:
            windows = terms.windows(outlook(states, ahead, now), terms.limit_s)
            starts += [begin for (begin, _), *_ in windows.values()]
    at = min(starts, default=math.inf if expected.at is None else expected.at)
    expected = replace(expected, at=None if at == math.inf else min(at, expected.at or at))
    if len(launchers) > 1:
        return expected
    runs = RunTimes(*client.job_runs(), now)
    found = outlook(states, jobs, now)
    learned = learned_starts(
        found, jobs, terms, (1,), runs, now, partitions=names, own=own,
        pass_s=backfill_interval_s(client.config()),
    )  # fmt: skip
    note = runs.describe_record(is_learned=bool(learned))
    expected = replace(expected, learned=learned.get(1), learned_from=note)
    if launcher.time_min:
        return expected
    best = soonest(shapes(outlook(states, ahead, now), [terms], (1,), now))
    if best is None or best.limit_s == terms.limit_s:
        return expected
    sooner, middle = best.starts_at, expected.learned.p50 if expected.learned else expected.at
    if sooner is None or (middle is not None and sooner >= middle - SAME_S):
        return expected
    return replace(expected, shorter_s=best.limit_s, shorter_at=sooner)
