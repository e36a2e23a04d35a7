"""Order of a user's runs at the nodes, by Slurm's queue.

Runs that request the same nodes are *siblings*: those of one sweep, and the user's other runs.
They compete, and Slurm does not consider a run's minimum: it starts one task of a run wherever a
node is free. Three rules keep nodes from being held for nothing, and from being idle while a run
could use them:

- A run below its minimum gives its nodes back at once if it cannot get the rest
  (`why_blocked`): siblings that train hold it, or an earlier one can begin with its nodes.
- A run that trains, and one that ends, lets siblings start that stay away from the queue, as soon
  as there are idle nodes for their minimum (`let_start`).
- A run that trains lets siblings stay away that would start for nothing: those that train hold what
  they lack (`keep_away`). A sibling may come back as soon as other users' nodes would suffice.

With ``sweep_growth=soonest`` a fourth rule divides the nodes that may come next (`site.value`): a
run that gets none of them holds its pending tasks (`rendezvous.group_change`), and one that has
no nodes either waits for its turn (`deferred_runs`).

The runs have an order: that of their submissions, and that of a sweep. A run gives way to an
earlier one only, so two runs do not take each other's nodes in turn. `QueuedRun`, `NodeSupply` and
the rules are pure; `SweepQueue` queries Slurm and carries them out.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hpc_elastic.errors import DamagedFileError, RunDirectoryError
from hpc_elastic.run import index_of, job_of, task_name
from hpc_elastic.run.directory import SUBMISSION, RunDir, RunSpec, Submission
from hpc_elastic.run.fencing import last_index
from hpc_elastic.shared_files import is_there, names_listed, parse_json, read_json, read_text
from hpc_elastic.site.nodes import NodeState
from hpc_elastic.site.value import NodeDemand, share_nodes
from hpc_elastic.slurm import nodelist
from hpc_elastic.slurm.client import RELEASE_DELAY_S, SlurmClient
from hpc_elastic.slurm.job_state import Phase, TaskState, Wait, remedy, wait_of
from hpc_elastic.slurm.parsing import QueuedJob
from hpc_elastic.slurm.quarantine import excluded
from hpc_elastic.slurm.run_tasks import followed, list_followed

AWAY_S = 12.0
"""A task whose start lies further ahead stays away; one that requeues itself is back sooner."""

KEPT_AWAY_S = 300.0
"""For how long siblings stay away that would start for nothing; a run that ends lets them start."""
RENEW_S = 45.0
"""They stay away for longer if the start of one lies no further ahead; more than `POLL_S`."""


@dataclass(frozen=True)
class QueuedRun:
    """One of the siblings, as the queue shows it.

    Attributes:
        tasks: Its tasks that Slurm lists, by slot; a co-allocated job is one of them.
        has_started: Whether a task of it has ever run. Before that, a start that lies ahead is
            the user's.
        lost: Tasks whose attempt was lost -> that attempt: Slurm may list it as running for
            minutes. Its node may come to the run again, unless it does not answer.
        demand: Its progress, if the next nodes go where they help most; without its nodes.
    """

    name: str
    min_nodes: int
    tasks: Mapping[str, TaskState]
    num_coallocated: int = 0
    has_started: bool = True
    avoids: frozenset[str] = frozenset()
    lost: Mapping[str, int] = field(default_factory=dict)
    demand: NodeDemand | None = None

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
    def waiting(self) -> list[str]:
        """Its tasks that may start as soon as a node is free.

        Of a run with a co-allocated job, only that counts: its other tasks may not start before it.
        Tasks that a user holds, or that no free node lets start, do not count.
        """
        away = self.away
        return [
            name
            for name, state in self.tasks.items()
            if name not in away
            and (not self.num_coallocated or "_" not in name)
            and (
                state.phase is Phase.COMPLETING
                or (state.phase is Phase.PENDING and remedy(state.reason) is None)
            )
        ]

    @property
    def num_waiting(self) -> int:
        """Number of nodes for the tasks that wait."""
        return sum(map(self.size, self.waiting))

    @property
    def limit(self) -> str | None:
        """The limit of the user's or the array's that its tasks wait for; None: free nodes."""
        waiting = (s.reason for s in self.tasks.values() if s.phase is Phase.PENDING)
        return next((reason for reason in waiting if wait_of(reason) is Wait.OWN_LIMIT), None)

    def size(self, task: str) -> int:
        """Return the number of nodes of a task: one, or those of the co-allocated job."""
        return self.num_coallocated if index_of(task) is None else 1


@dataclass(frozen=True)
class NodeSupply:
    """The nodes that a run may get; ``states`` are in sinfo's words.

    If they ``are_whole``, a task gets whole nodes: then a node that a task has is not for others.
    """

    states: Mapping[str, str]
    are_whole: bool

    @cached_property
    def _free(self) -> set[str]:
        known = ((name, NodeState.parse(state)) for name, state in self.states.items())
        return {name for name, state in known if state.is_idle and not state.is_planned}

    @cached_property
    def _coming(self) -> set[str]:
        return {n for n, state in self.states.items() if not NodeState.parse(state).is_lost}

    def num_idle(self, run: QueuedRun) -> int:
        """Return the number of idle nodes, none planned for another job, where tasks may start."""
        return 0 if run.limit else len(self._free - run.avoids)

    def num_coming(self, run: QueuedRun, held: Set[str]) -> int:
        """Return the number that may come to a run, beside those that the sweep holds."""
        taken = run.avoids | held if self.are_whole else run.avoids
        return 0 if run.limit else len(self._coming - taken)


def why_blocked(runs: Sequence[QueuedRun], own: int, nodes: NodeSupply) -> str | None:
    """Return why a run cannot get its minimum; None if it may yet get it (``own``: its index)."""
    me = runs[own]
    if not me.is_short:
        return None
    short = [at for at, run in enumerate(runs) if run.is_short]
    first = _give_way(runs, short, nodes).get(own)
    if first is not None:
        return f"run {runs[first].name} is earlier, and can begin with these nodes"
    later = sum(len(runs[at].nodes) for at in short if at > own)
    held = {node for run in runs for node in run.nodes}
    if me.lacks <= later + nodes.num_coming(me, held):
        return None
    if me.limit is not None:
        return f"a limit of the user's jobs, {me.limit}, is reached with fewer nodes than it needs"
    return "other runs of the user hold the nodes that it lacks"


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
    withheld: Set[str] = frozenset(),
    deferred: Set[int] = frozenset(),
) -> list[str]:
    """Return the tasks away that are to start: each run's minimum, then run ``own``'s others.

    Run ``own`` trains, or it ``ends``, so that its nodes are free soon. ``withheld`` are its tasks
    that do not start: lost ones, since other rules restart them, and those that it holds.
    ``deferred`` are runs that do not start now, although they could (`deferred_runs`).
    """
    me = runs[own]
    freed = len(me.nodes) if ends else 0
    taken = 0
    started: list[str] = []
    for at, run in enumerate(runs):
        if at == own or at in deferred or not run.lacks or run.is_over:
            continue
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
        away = [task for task in me.away if task not in withheld]
        started += away[: max(0, nodes.num_idle(me) - taken)]
    return started


def keep_away(
    runs: Sequence[QueuedRun], nodes: NodeSupply, deferred: Set[int] = frozenset()
) -> list[str]:
    """Return the tasks that would soon start for nothing, and are to stay away for longer.

    All of them once one is about to start: that is one command for all.
    """
    held = {node for run in runs if run.lacks == 0 for node in run.nodes}
    kept: list[TaskState] = []
    for at, run in enumerate(runs):
        is_blocked = not run.num_waiting and run.lacks > nodes.num_coming(run, held)
        if run.nodes or not (is_blocked or (at in deferred and run.has_started)):
            continue
        waiting = [name for name in run.waiting if run.tasks[name].phase is Phase.PENDING]
        kept += [run.tasks[name] for name in (*run.away, *waiting)]
    is_due = any((state.starts_in_s or 0.0) < RENEW_S for state in kept)
    return [state.task for state in kept] if is_due else []


def divide_next_nodes(runs: Sequence[QueuedRun]) -> list[int]:
    """Return how many of the nodes that may come next each run gets (`site.value`)."""
    demands = {
        at: replace(run.demand, nodes=len(run.nodes))
        for at, run in enumerate(runs)
        if run.demand is not None and not run.is_over
    }
    # tasks for a quarter of the runs' nodes, and for two at least, are in the queue
    num_next = max(2, sum(demand.nodes for demand in demands.values()) // 4)
    shares = dict(zip(demands, share_nodes([*demands.values()], num_next), strict=True))
    return [shares.get(at, 0) for at in range(len(runs))]


def deferred_runs(runs: Sequence[QueuedRun], shares: Sequence[int]) -> frozenset[int]:
    """Return the indices of the runs without nodes that get none of the next ones either."""
    return frozenset(
        at
        for at, (run, share) in enumerate(zip(runs, shares, strict=True))
        if run.demand is not None and not run.nodes and not run.is_over and not share
    )


POLL_S = 10.0
"""Seconds between two checks of the first run that trains for siblings that stay away; the n-th run
checks n times as seldom, so that any number of runs queries Slurm no more than a few do."""
POLL_SELDOM_S = 30.0
"""The same, if none stayed away at the last check."""
DISCOVERY_S = 60.0
"""Seconds between two searches for other submissions of the user."""

_NOT_OF_NODES = {
    *("job-name", "array", "nodes", "ntasks", "ntasks-per-node", "no-kill", "requeue", "chdir"),
    *("open-mode", "output", "error", "time", "time-min", "begin", "dependency", "comment"),
}
"""Flags of sbatch that do not decide which nodes a task may get."""


Note = Callable[..., None]
"""Writes an event, of a kind and with fields."""


class SweepQueue:
    """The queue as the leader of one run sees it: its siblings, in their order.

    For one thread at a time; see `policy.QueuePolicy`. Calls raise `SlurmError` where Slurm does
    not answer, and `OSError` where the submission's files cannot be read. ``listed`` returns the
    jobs of the cluster with their users, if they were listed just now for another purpose; else
    None. What they show is not queried again.
    """

    def __init__(
        self, run: RunDir, spec: RunSpec, partition: str | None, client: SlurmClient, note: Note,
        listed: Callable[[], Sequence[QueuedJob] | None] = lambda: None,
    ) -> None:  # fmt: skip
        self._run = run
        self._spec = spec
        self._partition = spec.all_partitions or partition
        self._client = client
        self._note = note
        self._submission = Submission(Path(spec.submission))
        self._found = [self._submission]
        """The submissions with siblings, the oldest first."""
        self._listed = listed
        self._scripts: Sequence[Path] = ()
        self._scripts_of: frozenset[str] | None = None
        """The user's jobs, as listed before the scripts were; None: the scripts are unknown."""
        self._next_discovery = -math.inf
        self._specs: dict[Path, RunSpec] = {}
        self._next_check = 0.0

    def job_ids(self) -> list[str]:
        """Return the job ids of the submissions that compete with this run, its own included."""
        return [job for each in self._found for job in each.job_ids().values()]

    def why_blocked(self, lost: Mapping[str, int]) -> str | None:
        """Return why this run cannot get its minimum; None if it may yet get it."""
        found = self._runs()
        if found is None:
            return None
        runs, own = found
        runs[own] = replace(runs[own], lost=lost)
        return why_blocked(runs, own, self._nodes())

    def let_others_start(
        self, lost: Iterable[str] = (), *, ends: bool = False, grows: bool = True
    ) -> float | None:
        """Let siblings start that stay away, as far as there are idle nodes for their minimum.

        Those that would soon start for nothing stay away for longer. Unless the run ``ends``,
        nothing is done if the last check was too recent. Returns the size up to which this run
        grows beside its siblings, infinite without a limit; None if nothing was done.
        """
        if not ends and time.monotonic() < self._next_check:
            return None
        self._next_check = time.monotonic() + POLL_S
        if ends:
            # nothing lets later siblings start after this
            self._next_discovery, self._scripts_of = -math.inf, None
        found = self._runs()
        if found is None:
            self._next_check = time.monotonic() + DISCOVERY_S
            return math.inf
        runs, own = found
        withheld = frozenset(lost if grows else runs[own].tasks)
        largest, deferred = math.inf, frozenset[int]()
        if runs[own].demand is not None and not ends:
            shares = divide_next_nodes(runs)
            largest, deferred = len(runs[own].nodes) + shares[own], deferred_runs(runs, shares)
        earlier = sum(run.lacks == 0 and not run.is_over for run in runs[:own])
        are_away = any(run.away for run in runs if run.lacks) or (grows and runs[own].away)
        wait_s = (POLL_S if are_away else POLL_SELDOM_S) * (1 + earlier)
        if largest < math.inf:  # held tasks are to start soon after another run has ended
            wait_s = min(wait_s, POLL_SELDOM_S)
        self._next_check = time.monotonic() + wait_s
        if not (are_away or deferred):
            return largest
        nodes = self._nodes()
        names = let_start(runs, own, nodes, ends=ends, withheld=withheld, deferred=deferred)
        if names:
            self._postpone(names, RELEASE_DELAY_S, runs, "may start: nodes are idle for them")
        elif not ends and (names := keep_away(runs, nodes, deferred)):
            why = "must stay away from the queue for a while: siblings train with what they lack"
            why += ", or gain more from the next nodes" if deferred else ""
            self._postpone(names, KEPT_AWAY_S, runs, why)
        return largest

    def _postpone(
        self, names: Sequence[str], delay_s: float, runs: Sequence[QueuedRun], why: str
    ) -> None:
        """Set the start of tasks, and record the reason."""
        now = followed(self._found)
        self._client.postpone([now.get(name, name) for name in names], delay_s)
        chosen = [run.name for run in runs if not run.tasks.keys().isdisjoint(names)]
        self._note("sweep_decision", runs=chosen, why=why)

    def _demand(self, run: RunDir, spec: RunSpec) -> NodeDemand | None:
        """Return the progress of a run by its last status; None if all runs grow in turn."""
        if self._spec.settings.launcher.sweep_growth == "equal":
            return None
        status: Mapping[str, Any] = {}
        with contextlib.suppress(DamagedFileError, FileNotFoundError):
            status = read_json(run.status) or {}
        step, total = status.get("step"), status.get("total_steps")
        times: dict[int, float] = {}
        left: int | None = None
        with contextlib.suppress(ValueError, TypeError, AttributeError, OverflowError):
            given = {int(n): float(s) for n, s in (status.get("step_times") or {}).items()}
            left = None if total is None else max(0, int(total) - int(step or 0))
            times = {n: s for n, s in given.items() if n > 0 and 0.0 < s < math.inf}
        nodes = spec.settings.nodes
        return NodeDemand(0, nodes.min, nodes.max, nodes.unit, times, left)

    def _runs(self) -> tuple[list[QueuedRun], int] | None:
        """Return the siblings in their order, and this run's index; None if it is alone."""
        self._discover()
        members = self._members()
        if self._run.path not in members or len(members) < 2:
            return None
        listed = list_followed(self._client, self._found, self.job_ids())
        runs = [self._queued(RunDir(path), names, listed) for path, names in members.items()]
        return runs, list(members).index(self._run.path)

    def _queued(
        self, run: RunDir, names: Iterable[str], listed: Mapping[str, TaskState]
    ) -> QueuedRun:
        """Return a run as the queue shows it; one whose directory was removed needs no node.

        So does one of another submission that cannot be read, and one that Slurm does not list.
        """
        tasks = {task: listed[task] for task in names if task in listed}
        if not tasks:
            return QueuedRun(self._name(run), 0, tasks)
        waits = any(state.phase is Phase.PENDING for state in tasks.values())
        try:
            if run.path not in self._specs:
                self._specs[run.path] = run.load()
            spec = self._specs[run.path]
            is_made = waits and run.rdzv.name in names_listed(run.path)
            has_started = is_made and last_index(run.rdzv) > 0
        except (RunDirectoryError, FileNotFoundError):
            own = self._submission.job_ids().values()
            if is_there(run.spec) and not {job_of(task) for task in tasks}.isdisjoint(own):
                raise
            return QueuedRun(self._name(run), 0, tasks)
        return QueuedRun(
            self._name(run),
            spec.settings.nodes.min,
            tasks,
            spec.settings.num_coallocated,
            has_started=has_started,
            avoids=frozenset(excluded(run) if waits else ()),
            demand=self._demand(run, spec),
        )

    def _name(self, run: RunDir) -> str:
        """Return the name of a run in messages; of another submission's, with its folder."""
        path = run.path
        is_near = path.parent == self._run.path.parent
        return path.name if is_near else f"{path.parent.name}/{path.name}"

    def _members(self) -> dict[Path, list[str]]:
        """Read the runs of the submissions: directory -> queue names by slot."""
        found: dict[Path, dict[int, str]] = {}
        for array in (array for s in self._found for array in s.arrays()):
            job = array.job_id
            if not job:
                continue
            try:
                content = parse_json(read_text(array.tasks), array.tasks)
                coallocated = bool(content.get("coallocated"))
                for index, task in enumerate(content["runs"]):
                    name = job if coallocated else task_name(job, index)
                    found.setdefault(Path(task["dir"]), {})[int(task["slot"])] = name
            except (OSError, ValueError, KeyError, TypeError, OverflowError) as e:
                if array.tasks.parent == self._submission.path:
                    raise RunDirectoryError(f"{array.tasks}: not readable: {e}") from e
        return {
            run: list(dict.fromkeys(slots[n] for n in sorted(slots)))
            for run, slots in found.items()
        }

    def _discover(self) -> None:
        """Search for the submissions of the user that request the same nodes, now and then."""
        if time.monotonic() < self._next_discovery:
            return
        own, listed, ids = self._submission, self._listed(), set(self.job_ids())
        wanted = {_node_flags(array.script) for array in own.arrays()} - {None}
        found = {own.path: own}
        me = {job.user for job in listed or () if job.job in ids}
        mine = frozenset(job.job for job in listed or () if job.user in me)
        if not mine or mine != self._scripts_of:
            self._scripts, self._scripts_of = self._client.batch_scripts(), mine
        for script in self._scripts:
            other = Submission(script.parent)
            if other.path.name == SUBMISSION and _node_flags(script) in wanted:
                found.setdefault(other.path, other)
        first = {
            path: min((int(job) for job in each.job_ids().values() if job.isdecimal()), default=0)
            for path, each in found.items()
        }
        self._found = [found[path] for path in sorted(found, key=first.__getitem__)]
        self._partition = self._waits_in(listed) or self._partition
        self._next_discovery = time.monotonic() + DISCOVERY_S

    def _waits_in(self, listed: Sequence[QueuedJob] | None) -> str | None:
        ids = set(self.job_ids())
        if listed is None:
            return self._client.pending_partitions(ids)
        waiting = (job for job in listed if job.job in ids and job.state == "PENDING")
        return ",".join(sorted({name for job in waiting for name in job.partitions})) or None

    def _nodes(self) -> NodeSupply:
        return NodeSupply(self._client.each_node(self._partition), self._spec.has_whole_nodes)


def _node_flags(script: Path) -> frozenset[str] | None:
    """Return a script's flags that decide which nodes its tasks may get; None if unreadable."""
    try:
        lines = read_text(script, errors="replace").splitlines()
    except OSError:
        return None
    flags = (line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH --"))
    return frozenset(flag for flag in flags if flag.partition("=")[0] not in _NOT_OF_NODES)
