"""Order of a sweep's runs at the nodes, by Slurm's queue.

The runs of a sweep compete for the same nodes, and Slurm does not consider a run's minimum: it
starts one task of a run wherever a node is free. Two rules keep nodes from being held for nothing,
and from being idle while a run could use them:

- A run below its minimum gives its nodes back at once if it cannot get the rest
  (`why_blocked`): runs of the sweep that train hold it, or an earlier run can begin with its
  nodes.
- A run that trains, and one that ends, lets others start that stay away from the queue, as soon as
  there are idle nodes for their minimum (`let_start`).

The runs have an order, that of the sweep. A run gives way to an earlier one only, so two runs do
not take each other's nodes in turn. `QueuedRun`, `NodeSupply` and the two rules are pure;
`SweepQueue` queries Slurm and carries them out.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.run.directory import RunDir, RunSpec, Submission, task_name
from hpc_elastic.run.fencing import last_index
from hpc_elastic.shared_files import is_there
from hpc_elastic.slurm import nodelist
from hpc_elastic.slurm.client import RELEASE_DELAY_S, SlurmClient
from hpc_elastic.slurm.job_state import Phase, TaskState, remedy
from hpc_elastic.slurm.requeue import excluded, followed, list_followed

AWAY_S = 12.0
"""A task whose start lies further ahead stays away; one that requeues itself is back sooner."""

_LOST = {
    *("down", "drained", "draining", "drng", "drain", "fail", "failing", "error", "future"),
    *("inval", "maint", "unknown", "reboot", "perfctrs"),
}
"""States of nodes that will not come to a job that waits; any state with a mark ``*`` as well."""


@dataclass(frozen=True)
class QueuedRun:
    """One run of a sweep, as the queue shows it.

    Attributes:
        name: Its name in messages.
        min_nodes: Its minimum.
        tasks: Its tasks that Slurm lists, by slot; a co-allocated job is one of them.
        num_coallocated: Number of co-allocated nodes; 0 if none.
        has_started: Whether a task of it has ever run. Before that, a start that lies ahead is
            the user's.
        avoids: Nodes on which no task of it starts.
        lost: Tasks whose attempt was lost -> that attempt: Slurm may list it as running for
            minutes. Its node may come to the run again, unless it does not answer.
    """

    name: str
    min_nodes: int
    tasks: Mapping[str, TaskState]
    num_coallocated: int = 0
    has_started: bool = True
    avoids: frozenset[str] = frozenset()
    lost: Mapping[str, int] = field(default_factory=dict)

    @property
    def nodes(self) -> list[str]:
        """The nodes that it has."""
        return [
            node
            for name, state in self.tasks.items()
            if state.phase is Phase.RUNNING
            and (name not in self.lost or (state.restarts or 0) > self.lost[name])
            for node in nodelist.expand(state.node)
        ]

    @property
    def lacks(self) -> int:
        """Number of nodes that it lacks to its minimum."""
        return max(0, self.min_nodes - len(self.nodes))

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or was never submitted."""
        return all(state.phase is Phase.ENDED for state in self.tasks.values())

    @property
    def is_short(self) -> bool:
        """Whether it holds nodes, and too few to train."""
        return bool(self.nodes) and self.lacks > 0

    @property
    def away(self) -> list[str]:
        """Its tasks that wait, and may not start yet."""
        return [
            name
            for name, state in self.tasks.items()
            if self.has_started and state.is_held and (state.starts_in_s or 0.0) > AWAY_S
        ]

    @property
    def num_waiting(self) -> int:
        """Number of nodes for its tasks that may start as soon as a node is free.

        Of a run with a co-allocated job, only that counts: its other tasks may not start before it.
        Tasks that a user holds, or that wait for something else that no free node brings, do not
        count.
        """
        waiting = {
            name
            for name, state in self.tasks.items()
            if state.phase is Phase.COMPLETING
            or (state.phase is Phase.PENDING and remedy(state.reason) is None)
        }.difference(self.away)
        return sum(self.size(n) for n in waiting if not self.num_coallocated or "_" not in n)

    @property
    def is_limited(self) -> bool:
        """Whether its tasks wait for a limit of the user's or the array's, not for free nodes."""
        waiting = (s for s in self.tasks.values() if s.phase is Phase.PENDING)
        return any("Limit" in state.reason for state in waiting)

    def size(self, task: str) -> int:
        """Return the number of nodes of a task: one, or those of the co-allocated job."""
        return 1 if "_" in task else self.num_coallocated


@dataclass(frozen=True)
class NodeSupply:
    """The nodes that a run may get.

    Attributes:
        states: The state of each, in sinfo's words.
        are_whole: Whether a task gets whole nodes: then a node that a task has is not for others.
    """

    states: Mapping[str, str]
    are_whole: bool

    def num_idle(self, run: QueuedRun) -> int:
        """Return the number of idle nodes on which a run's tasks may start."""
        idle = {name for name, state in self.states.items() if state == "idle"}
        return 0 if run.is_limited else len(idle - run.avoids)

    def num_coming(self, run: QueuedRun, held: Set[str]) -> int:
        """Return the number that may come to a run, beside those that the sweep holds."""
        coming = {
            name
            for name, state in self.states.items()
            if "*" not in state and state.rstrip("~#%+@!^-$") not in _LOST
        }
        taken = run.avoids | held if self.are_whole else run.avoids
        return 0 if run.is_limited else len(coming - taken)


def why_blocked(runs: Sequence[QueuedRun], own: int, nodes: NodeSupply) -> str | None:
    """Return why a run cannot get its minimum; None if it may yet get it.

    Args:
        runs: The runs of the sweep in their order.
        own: The index of the run.
        nodes: The nodes that the run may get.
    """
    me = runs[own]
    if not me.is_short:
        return None
    short = [at for at, run in enumerate(runs) if run.is_short]
    first = _give_way(runs, short, nodes).get(own)
    if first is not None:
        return f"run {runs[first].name} of the sweep is earlier, and can begin with these nodes"
    later = sum(len(runs[at].nodes) for at in short if at > own)
    held = {node for run in runs for node in run.nodes}
    if me.lacks <= later + nodes.num_coming(me, held):
        return None
    return "other runs of the sweep hold the nodes that it lacks"


def _give_way(runs: Sequence[QueuedRun], short: Sequence[int], nodes: NodeSupply) -> dict[int, int]:
    """Return the runs with too few nodes that give way, each with the earlier one it gives way to.

    The first run gets what it lacks from the last ones, then the second, and so on.
    """
    gives_way: dict[int, int] = {}
    last, idle_spent = len(short), 0
    for place, at in enumerate(short):
        idle = min(runs[at].lacks, max(0, nodes.num_idle(runs[at]) - idle_spent))
        lacks, rest = runs[at].lacks - idle, last
        while lacks > 0 and rest - 1 > place:
            rest -= 1
            lacks -= len(runs[short[rest]].nodes)
        if lacks <= 0:
            gives_way |= dict.fromkeys(short[rest:last], at)
            last, idle_spent = rest, idle_spent + idle
    return gives_way


def let_start(
    runs: Sequence[QueuedRun],
    own: int,
    nodes: NodeSupply,
    *,
    ends: bool = False,
    lost: Set[str] = frozenset(),
) -> list[str]:
    """Return the tasks that stay away and are to start, since there are nodes for them.

    The minimum of each run in turn; then the further nodes of the run itself.

    Args:
        runs: The runs of the sweep in their order.
        own: The index of the run that calls this: it trains, or it ends.
        nodes: The nodes that they may get.
        ends: Whether it ends, so that its nodes are free soon.
        lost: Its tasks that were lost: other rules restart them.
    """
    me = runs[own]
    freed = len(me.nodes) if ends else 0
    taken = 0
    started: list[str] = []
    for run in (run for at, run in enumerate(runs) if at != own and run.lacks and not run.is_over):
        free = max(0, nodes.num_idle(run) + freed - taken)
        missing = run.lacks - run.num_waiting
        if missing > 0 and (run.lacks > free or not run.away):
            continue
        for task in run.away:
            if missing <= 0:
                break
            started.append(task)
            missing -= run.size(task)
        taken += min(free, run.lacks)
    if not ends and me.lacks == 0:
        away = [task for task in me.away if task not in lost]
        started += away[: max(0, nodes.num_idle(me) - taken)]
    return started


_log = logging.getLogger(__name__)

POLL_S = 10.0
"""Seconds between two checks of the first run that trains for others that stay away; the n-th run
checks n times as seldom, so that any number of runs queries Slurm no more than a few do."""
POLL_SELDOM_S = 30.0
"""The same, if none stayed away at the last check."""


class SweepQueue:
    """The queue as the leader of one run of a sweep sees it.

    Calls block for as long as Slurm does. They raise `SlurmError` where Slurm does not answer, and
    `OSError` where the submission's files cannot be read.
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
        self._checking = threading.Lock()
        self._next_check = 0.0

    @property
    def num_runs(self) -> int:
        """Number of runs that were submitted together."""
        return len(self._members())

    def why_blocked(self, lost: Mapping[str, int]) -> str | None:
        """Return why this run cannot get its minimum; None if it may yet get it.

        Args:
            lost: This run's tasks that were lost, each with its attempt.
        """
        found = self._runs()
        if found is None:
            return None
        runs, own = found
        runs[own] = replace(runs[own], lost=lost)
        return why_blocked(runs, own, self._nodes())

    def let_others_start(self, lost: Iterable[str] = (), *, ends: bool = False) -> None:
        """Let runs start that stay away, as far as there are idle nodes for their minimum.

        Args:
            lost: This run's tasks that were lost.
            ends: Whether this run has ended. If not, and the last check was too recent, nothing
                is done.
        """
        if not self._checking.acquire(blocking=ends):
            return  # Slurm has not answered yet
        try:
            found = self._runs() if ends or time.monotonic() >= self._next_check else None
            if found is None:
                return
            runs, own = found
            earlier = sum(run.lacks == 0 and not run.is_over for run in runs[:own])
            are_away = any(run.away for run in runs)
            every_s = POLL_S if are_away else POLL_SELDOM_S
            self._next_check = time.monotonic() + every_s * (1 + earlier)
            if not are_away:
                return
            names = let_start(runs, own, self._nodes(), ends=ends, lost=frozenset(lost))
            now = followed(self._submission)
            names = [now.get(name, name) for name in names]
            if names:
                _log.info("there are nodes for tasks that stayed away: %s", ", ".join(names))
                self._client.postpone(names, RELEASE_DELAY_S)
        finally:
            self._checking.release()

    def _runs(self) -> tuple[list[QueuedRun], int] | None:
        """Return the runs of the sweep in their order, and this one's index."""
        members = self._members()
        if self._run.path not in members:
            return None
        jobs = self._submission.job_ids()
        listed = list_followed(self._client, self._submission, jobs.values())
        runs = [self._queued(RunDir(path), names, listed) for path, names in members.items()]
        return runs, list(members).index(self._run.path)

    def _queued(
        self, run: RunDir, names: Iterable[str], listed: Mapping[str, TaskState]
    ) -> QueuedRun:
        """Return a run as the queue shows it; one whose directory was removed needs no node."""
        tasks = {task: listed[task] for task in names if task in listed}
        waits = any(state.phase is Phase.PENDING for state in tasks.values())
        try:
            if run.path not in self._specs:
                self._specs[run.path] = run.load()
            spec = self._specs[run.path]
            has_started = waits and last_index(run.rdzv) > 0
        except (RunDirectoryError, FileNotFoundError):
            if is_there(run.spec):
                raise
            return QueuedRun(run.path.name, 0, tasks)
        return QueuedRun(
            run.path.name,
            spec.min_nodes,
            tasks,
            spec.min_nodes if spec.coallocate_min else 0,
            has_started=has_started,
            avoids=frozenset(excluded(run) if waits else ()),
        )

    def _members(self) -> dict[Path, list[str]]:
        """Read the runs that were submitted together: directory -> queue names by slot."""
        found: dict[Path, dict[int, str]] = {}
        for array in self._submission.arrays():
            job = array.job_id
            if not job:
                continue
            try:
                content = json.loads(array.tasks.read_text())
                coallocated = bool(content.get("coallocated"))
                for index, task in enumerate(content["runs"]):
                    name = job if coallocated else task_name(job, index)
                    found.setdefault(Path(task["dir"]), {})[int(task["slot"])] = name
            except (ValueError, KeyError, TypeError) as e:
                raise RunDirectoryError(f"{array.tasks}: not readable: {e}") from e
        return {
            run: list(dict.fromkeys(slots[n] for n in sorted(slots)))
            for run, slots in found.items()
        }

    def _nodes(self) -> NodeSupply:
        return NodeSupply(self._client.each_node(self._partition), self._spec.whole_nodes)
