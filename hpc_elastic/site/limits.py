"""Time limits of waiting tasks, fitted to the gaps that other jobs leave (``launcher.time_min``).

Backfill starts a task between other jobs only if its whole time limit fits there. On a busy cluster
most idle nodes are needed again within minutes, so a task with a limit of an hour does not get
them. sbatch's ``--time-min`` is meant for this and does not help: from Slurm 20.11 to 25.05.2 the
backfill scheduler gives such a task exactly the minimum, on an empty cluster too, and the task
keeps that limit after each requeue. So the run sets the limits itself:

- The owner of a pending job may set its limit to any value up to the partition's. (That of a
  running job can only be lowered.)
- Every user may read which nodes are idle, where and when the scheduler plans to start other jobs,
  and which nodes are reserved, unless the site hides it (PrivateData).

At each check the first waiting tasks get the lengths of the gaps, the longest first, since Slurm
tries tasks in the same order. The next ones get limits of `LADDER_S` that would fit on the busy
nodes, if these became free now: most jobs end before their limit, and whatever fits at that moment
starts, long before the next check. The others get the full limit. A task that returns to the queue
gets the full limit with the time of its next start (`requeue`).

A gap may be shorter than it seems, because the job that is to start there is hidden. So a node
that remains idle is offered shorter limits, one rung of `LADDER_S` after the other, and then the
longest one again.

Without a process of the run that watches the queue, nothing would fit the limits to gaps that come
later. Then the waiting tasks get limits from `LADDER_S`, so that one of them fits into any gap;
the run's leader is back as soon as it has started. With ``launcher.harvest=ladder`` the limits are
always these.

Measured on Slurm 22.05; read in the sources of ``sched/backfill`` (``time_min``) and of
``slurmctld/job_mgr.c`` (``_update_job``) of 22.05 to 26.05.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hpc_elastic.config.schema import SlurmSettings
from hpc_elastic.run import index_of, job_of, queue_name
from hpc_elastic.run.directory import Pool, RunSpec
from hpc_elastic.site.forecast import gap_ends
from hpc_elastic.site.nodes import NodeState
from hpc_elastic.slurm import parsing
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import Phase, TaskState
from hpc_elastic.slurm.run_tasks import current_names, jobs_of

_log = logging.getLogger(__name__)

LADDER_S = tuple(60.0 * minutes for minutes in (90, 56, 34, 22, 14, 8, 6, 4, 2))
"""Limits between the full one and the least, the longest first."""
CHECK_S = 15.0
"""Seconds between two checks while tasks wait."""
CHECK_SELDOM_S = 60.0
"""The same while none waits."""
_MOST = 20
"""Tasks whose limit differs from the full one, at most. Slurm keeps a record of each element that
was updated, and backfill plans for this many of an array (bf_max_job_array_resv)."""


@dataclass
class LimitFitter:
    """The decision about time limits (pure).

    ``time_min_s`` is the least limit with which a task is worth its start, ``pass_s`` the time to
    the next pass of backfill (bf_interval): the gap is shorter then. A node that is idle for two
    passes, although a task fits there, is offered a shorter limit.
    """

    time_s: float
    time_min_s: float
    pass_s: float = 30.0
    _offered: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Node -> the limit that fitted there, and for how many checks it was tried."""

    def limits(
        self,
        waiting: Sequence[str],
        gaps: Mapping[str, float],
        later: Iterable[float] = (),
        *,
        is_watched: bool = True,
    ) -> dict[str, float]:
        """Return the time limit of each waiting task, in the order in which Slurm tries these.

        ``gaps`` has the seconds for which each idle node is idle, ``later`` those for which each
        busy node would be if it became free now. Unless ``is_watched``, there are no further
        checks.
        """
        offers = {node: self._offer(node, length) for node, length in gaps.items()}
        fitting = [node for node, (limit_s, _) in offers.items() if limit_s >= self.time_min_s]
        fitting.sort(key=offers.__getitem__, reverse=True)
        placed = dict(zip(waiting[:_MOST], fitting, strict=False))
        self._offered = {node: offers[node] for node in placed.values()}
        found = {**dict.fromkeys(waiting, self.time_s), **{t: offers[placed[t]][0] for t in placed}}
        rest = waiting[len(placed) : _MOST]
        rungs = [self.time_s, *self._rungs_below(self.time_s)]
        if is_watched:
            fits = [[r for r in rungs if r <= length_s - self.pass_s] for length_s in later]
            longest = sorted((each[0] for each in fits if each), reverse=True)
            found |= zip(rest, longest, strict=False)
        else:
            for number, task in enumerate(reversed(rest)):  # the last one fits anywhere
                found[task] = rungs[-1 - number * len(rungs) // len(rest)]
        return found

    def _offer(self, node: str, length_s: float) -> tuple[float, int]:
        """Return the limit to be tried on a node, in whole minutes, and how often it was tried."""
        limit_s = self.time_s
        if length_s - self.pass_s < limit_s:
            limit_s = (length_s - self.pass_s) // 60 * 60
        last_s, num_tried = self._offered.get(node, (limit_s, 0))
        if num_tried * CHECK_S < 2 * self.pass_s:
            return min(limit_s, last_s), num_tried + 1
        shorter = self._rungs_below(last_s)
        return min(limit_s, shorter[0]) if shorter else limit_s, 1

    def _rungs_below(self, limit_s: float) -> list[float]:
        """Return the limits of `LADDER_S` that are shorter, the least one included."""
        rungs = [rung for rung in LADDER_S if self.time_min_s < rung < limit_s]
        return [*rungs, self.time_min_s] if limit_s > self.time_min_s else rungs


class TimeSlots:
    """Fits the limits of the waiting tasks of runs by Slurm's commands.

    At most four queries and a few updates a check, one more at the first, whatever the number of
    nodes. Methods raise `SlurmError` if Slurm does not answer, and `OSError` if the submission's
    files cannot be read.

    ``shares`` are runs of one submission, with the pool whose tasks are fitted; all pools have the
    same terms. ``partition`` counts if the runs name none. The leader of the only run ``leads``.
    Otherwise tasks of runs that have a node are left alone: their leaders fit them.
    """

    def __init__(
        self,
        shares: Sequence[tuple[RunSpec, Pool]],
        partition: str | None,
        client: SlurmClient,
        *,
        leads: bool = False,
    ) -> None:
        first = shares[0][1]
        assert isinstance(first.launcher, SlurmSettings)
        assert first.time_s is not None and first.time_min_s is not None
        self._shares = shares
        self._partition = first.launcher.partition or partition
        self._is_ladder = first.launcher.harvest == "ladder"
        self._client = client
        self._leads = leads
        # Slurm counts whole minutes, and rounds up
        self._fitter = LimitFitter(-(-first.time_s // 60) * 60, -(-first.time_min_s // 60) * 60)
        self._lock = threading.Lock()
        self._knows_pass = False
        self._ends: dict[str, float] = {}
        """Node -> when another job needs it, as listed last."""
        self._next_plan = self._next_check = 0.0
        self.has_fitted = False
        """Whether `fit_if_due` was called."""

    def fit_if_due(self) -> None:
        """Call `fit`, unless the last check was just now, or is not answered yet."""
        self.has_fitted = True
        if self._lock.locked() or time.monotonic() < self._next_check:
            return
        are_waiting = self.fit()
        self._next_check = time.monotonic() + (CHECK_S if are_waiting else CHECK_SELDOM_S)

    def fit(self) -> bool:
        """Set the limits of the waiting tasks; return whether any task waits."""
        with self._lock:
            jobs = dict.fromkeys(job for spec, _ in self._shares for job in jobs_of(spec))
            listed = self._client.tasks(jobs)
            waiting: list[TaskState] = []
            is_watched = False
            for spec, pool in self._shares:
                states = [listed.get(queue_name(name)) for name in current_names(spec)]
                is_running = any(state and state.phase is Phase.RUNNING for state in states)
                is_watched |= is_running and self._leads
                if is_running and not self._leads:
                    continue
                for state in states[pool.slots.start : pool.slots.stop]:
                    # a co-allocated job, which has no index, is never in a gap
                    if state and state.phase is Phase.PENDING and index_of(state.task) is not None:
                        waiting.append(state)
            if not waiting:
                return False
            waiting.sort(key=lambda state: state.is_held)  # those cannot start yet
            tasks = [state.task for state in waiting]
            if self._is_ladder:
                limits = self._fitter.limits(tasks, {}, is_watched=False)
            else:
                gaps, later = self._gaps(jobs, set(map(job_of, tasks)))
                limits = self._fitter.limits(tasks, gaps, later, is_watched=is_watched)
            self._set(waiting, limits)
            return True

    def _gaps(
        self, own: Iterable[str], waiting: Collection[str]
    ) -> tuple[dict[str, float], list[float]]:
        """Return the lengths of gaps on idle nodes, and of those that busy nodes would have.

        The plans of other jobs change with the passes of backfill. Without an idle node they are
        listed as often, and at most every other check.
        """
        if not self._knows_pass:
            self._fitter.pass_s = parsing.backfill_interval_s(self._client.config())
            self._knows_pass = True
        states = self._client.each_node(self._partition)
        known = {node: NodeState.parse(state) for node, state in states.items()}
        idle = {node for node, state in known.items() if state.is_idle}
        nodes = idle.union(node for node, state in known.items() if state.is_busy)
        if idle or time.monotonic() >= self._next_plan:
            queue = self._client.queue(only_waiting=True)
            moved = {name for job in queue if job.job in waiting for name in job.partitions}
            self._partition = ",".join(sorted(moved)) or self._partition
            self._ends = gap_ends(nodes, queue, own)
            self._next_plan = time.monotonic() + max(self._fitter.pass_s, 2 * CHECK_S)
        now = time.time()
        lengths = {node: end - now for node, end in self._ends.items() if node in nodes}
        gaps = {node: length_s for node, length_s in lengths.items() if node in idle}
        return gaps, [length_s for node, length_s in lengths.items() if node not in idle]

    def _set(self, waiting: Iterable[TaskState], limits: Mapping[str, float]) -> None:
        changed: dict[float, list[str]] = {}
        for state in waiting:
            if state.time_left_s != limits[state.task]:
                changed.setdefault(limits[state.task], []).append(state.task)
        for limit_s, tasks in changed.items():
            _log.info("time limit of %g min: %s", limit_s / 60, ", ".join(tasks))
            self._client.set_time_limit(tasks, limit_s)


def time_slots_of(specs: Iterable[RunSpec], client: SlurmClient) -> list[TimeSlots]:
    """Return what fits the time limits of some runs, for those whose limits are not fixed."""
    groups: dict[object, list[tuple[RunSpec, Pool]]] = {}
    for spec in specs:
        for pool in spec.pools:
            if pool.restored_limit_s is not None and isinstance(pool.launcher, SlurmSettings):
                key = pool.launcher.partition, pool.time_s, pool.time_min_s
                groups.setdefault(key, []).append((spec, pool))
    return [TimeSlots(group, None, client) for group in groups.values()]
