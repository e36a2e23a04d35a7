"""Nodes that a run gives back for the jobs of others (``launcher.give_way``).

A run holds its nodes until their time limits, and jobs of others wait for them, though the run
could leave a node within a second. Two rules make it a good neighbour:

- It gives nodes back as soon as a job of somebody else that waits for nodes can start with them,
  alone or together with idle nodes (`GiveWay`). It gives back all that the job lacks, or none.
- Slurm tries its tasks after the jobs of others, by `NICE`. So the node that it leaves goes to the
  job that waits, an idle node too, and the task comes back behind it. The tasks of the minimum, of
  the first slots, wait as every job does and stay, unless ``give_way=all``. Slurm tries the jobs of
  a partition with a higher PriorityTier first, whatever their nice value. So a job of a lower tier
  gets no node while a task of the run waits: that would have the node.

What can start is judged by what scontrol and sinfo print: partition, features, required and
excluded nodes, CPUs, memory and GPUs of each node, of each task and of the job, reservations that
begin before the job has to end, and what backfill has planned for jobs of a higher priority. A
heterogeneous job gets what all its parts lack, or nothing. Other rules of the cluster are unknown.
A job that does not start with what it was given within two passes of the scheduler was misjudged.
It gets nodes again after a pause that doubles each time, and meanwhile other jobs of its user get
them one after the other: the same rule may hold them all. What was given, and for nothing, stands
in a file of the run, which its next leader reads. Without it two runs that give all
(``give_way=all``) pass the nodes to each other each 20 seconds, for a job that neither can help:
each return ends a leader, and the next one tries anew.

A job that needs nodes of several runs at once gets none: they would have to be free at the same
time. A run never gives way to tasks with `NICE`: runs that give way do not take each other's nodes
in turn. Jobs that are held, that depend on others, that wait for a limit, a licence or a
reservation could not start with a node.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpc_elastic.config.schema import SlurmSettings
from hpc_elastic.run.directory import RunDir, RunSpec
from hpc_elastic.shared_files import read_json, write_atomic
from hpc_elastic.site.nodes import NodeState
from hpc_elastic.slurm import parsing
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import WAITS_FOR_NODES
from hpc_elastic.slurm.parsing import NodeKind, NodeNeeds, QueuedJob
from hpc_elastic.slurm.run_tasks import jobs_of, slots_of

_log = logging.getLogger(__name__)

NICE = 100_000_000
"""What is taken from the priority of the run's tasks: more than what sites add up to one."""
CHECK_S = 20.0
"""Seconds between two queries of the queue, while jobs of others wait."""
CHECK_SELDOM_S = 30.0
"""The same while none waits. What lists the queue lists the user's other runs too, so that a leader
calls no more commands then than one that does not give way (`Neighbours.listed`)."""
NODES_S = 60.0
"""Seconds between two queries of the nodes and of the reservations, while jobs of others wait."""
_MOST = 500
"""Waiting jobs that are looked at, the first ones, as by backfill (bf_max_job_test)."""
_NEVER_LEFT_S = 900.0
"""A node that is not left after this time, since its workers make no checkpoint, counts as one that
was given for nothing."""
_LONGEST_DOUBT_S = 3600.0
"""A job that did not start with what it was given is tried again after so long at the latest."""


@dataclass(frozen=True)
class NodeReturn:
    """Tasks that leave their nodes for a job: its id, its user, and how many nodes it has then."""

    job: str
    user: str
    num_nodes: int
    tasks: tuple[str, ...]


@dataclass
class _Given:
    """What a job was given: the hosts, and how many elements of its array waited then."""

    user: str
    hosts: tuple[str, ...]
    num_tasks: int
    since: float
    free_since: float | None = None


@dataclass
class GiveWay:
    """Which nodes a run gives back, and for which jobs (pure); seconds of one clock.

    ``patience_s`` is how long a job may take to start on free nodes. ``share`` is what a task has
    of its node; None: all of it.
    """

    patience_s: float
    share: NodeKind | None = None
    _given: dict[str, _Given] = field(default_factory=dict)
    _doubts: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Job or user -> how often in a row nodes were given for nothing, and until when none are."""
    _could_since: dict[tuple[str, int], float] = field(default_factory=dict)
    """Jobs that idle nodes suffice for, with their waiting elements, and since when."""

    def choose(
        self,
        jobs: Sequence[QueuedJob],
        own: Collection[str],
        nodes: Mapping[str, NodeKind],
        returnable: Sequence[tuple[str, str]],
        now: float,
    ) -> list[NodeReturn]:
        """Return what is to be given back now.

        Some of the ``jobs`` may be reservations. ``own`` are the ids of the user's runs, ``nodes``
        those in service. ``returnable`` are tasks that may leave, each with its host, in the order
        in which they are to.
        """
        tiers = {name: tier for kind in nodes.values() for name, tier in kind.partitions.items()}
        ahead = max((_tier(job, tiers) for job in jobs if _waits_behind(job)), default=0)
        waiting = sorted(self.waiting(jobs, own), key=lambda job: -_tier(job, tiers))
        held = [(job, node) for job in jobs if not job.waits for node in job.nodes]
        holders = {node: job for job, node in held if job.state != "COMPLETING"}
        run_now = Counter(job.job for job in jobs if job.nodes and not job.waits)
        ended = {node for job, node in held if job.state == "COMPLETING"}
        numbers = Counter[str]()
        for job in waiting:  # an array may have several lines
            numbers[job.job] += job.num_tasks
        left = {host: task for task, host in reversed(returnable) if host in nodes}
        giving = {node for node, job in holders.items() if job.nice >= NICE}
        mine = {node for node, job in holders.items() if job.job in own}
        self._judge(numbers, holders, ended, mine | giving, left, now)
        free = [name for name in nodes if name not in holders]
        promised = {j: [h for h in g.hosts if h in holders] for j, g in self._given.items()}
        needed_at: dict[str, float] = {}

        def reserve(job: QueuedJob) -> None:
            for part in (job, *job.others):
                if part.starts_at is not None:
                    for node in part.nodes:
                        needed_at[node] = min(needed_at.get(node, math.inf), part.starts_at)

        for job in jobs:
            if job.state == parsing.RESERVED:
                reserve(job)
        new: dict[str, _Given] = {}
        could: dict[tuple[str, int], float] = {}
        returns: list[NodeReturn] = []
        for job in waiting[:_MOST]:
            given, coming = self._given.get(job.job), promised.get(job.job, [])
            may_get = given is not None or self._may_get(job, new, now)
            may_get = may_get and _tier(job, tiers) >= ahead
            at_once = job.num_tasks
            if job.throttle is not None:
                at_once = min(at_once, job.throttle - run_now[job.job])
            for _ in range(at_once if left else 0):
                idle = [*free, *coming]
                more = [name for name in reversed(left) if name not in coming]
                found = self._nodes_for(job, nodes, idle, more, needed_at, now) if may_get else None
                if found is None:
                    reserve(job)  # jobs behind it may not delay it
                    break
                more = [name for name in more if name in found]
                if not more:
                    same = job.job, numbers[job.job]
                    could[same] = self._could_since.get(same, now)
                    if now - could[same] >= self.patience_s:
                        break  # it waits for something else: the idle nodes are not for it
                free = [name for name in free if name not in found]
                coming[:] = [name for name in coming if name not in found]
                if more:
                    whole = given or new.setdefault(
                        job.job, _Given(job.user, (), numbers[job.job], now)
                    )
                    whole.hosts += tuple(more)
                    tasks = tuple(left.pop(host) for host in more)
                    returns.append(NodeReturn(job.job, job.user, len(found), tasks))
        self._given |= new
        self._could_since = could
        return returns

    def memory(self) -> dict[str, Any]:
        """Return what the next leader of the run is to know, for JSON."""
        given = {job: asdict(given) for job, given in self._given.items()}
        return {"given": given, "doubts": self._doubts}

    def restore(self, memory: Any) -> None:
        """Know what an earlier leader has known; KeyError, TypeError or ValueError if damaged."""
        self._given = {
            str(job): _Given(
                str(raw["user"]), tuple(raw["hosts"]), int(raw["num_tasks"]), float(raw["since"])
            )
            for job, raw in memory["given"].items()
        }
        self._doubts = {str(k): (int(n), float(at)) for k, (n, at) in memory["doubts"].items()}

    @staticmethod
    def waiting(jobs: Iterable[QueuedJob], own: Collection[str]) -> list[QueuedJob]:
        """Return the jobs of others that wait for nodes, as the scheduler tries them."""
        found = (
            job
            for job in jobs
            if job.state == "PENDING" and job.job not in own and job.nice < NICE
            and all(
                part.priority > 0 and part.reason in WAITS_FOR_NODES and not part.needs.is_reserved
                for part in (job, *job.others)
            )
        )  # fmt: skip
        return sorted(found, key=lambda job: -job.priority)

    def _judge(
        self,
        waiting: Mapping[str, int],
        holders: Collection[str],
        ended: Collection[str],
        giving: Collection[str],
        back: Collection[str],
        now: float,
    ) -> None:
        """Forget the jobs that have started, and note those that did not although they could."""
        for key in self._doubts.keys() - waiting.keys():
            if now >= self._doubts[key][1] + _LONGEST_DOUBT_S:
                del self._doubts[key]
        failed = dict[str, None]()
        for job, given in [*self._given.items()]:
            taken = [host for host in given.hosts if host in holders]
            if waiting.get(job, 0) < given.num_tasks:
                for key in (job, _of_user(given.user)):
                    self._doubts.pop(key, None)
                del self._given[job]
                continue
            if any(host not in giving for host in taken):
                del self._given[job]  # another one was faster
                continue
            if taken or any(host in ended for host in given.hosts):
                is_back = given.free_since is not None or now - given.since >= self.patience_s
                is_over = is_back and any(host in back for host in taken)
            else:
                given.free_since = given.free_since or now
                is_over = now - given.free_since >= self.patience_s
            if is_over or now - given.since >= _NEVER_LEFT_S:
                failed |= {job: None, _of_user(given.user): None}
                del self._given[job]
        for key in failed:
            num = self._doubts.get(key, (0, 0.0))[0] + 1
            pause_s = min(_LONGEST_DOUBT_S, self.patience_s * 2.0**num)
            is_first = key.startswith(_of_user("")) and num == 1
            self._doubts[key] = num, now if is_first else now + pause_s

    def _may_get(self, job: QueuedJob, new: Mapping[str, _Given], now: float) -> bool:
        """Return whether a job may get nodes, although it or others of its user did not start.

        A user of such jobs gets nodes for one job after the other.
        """
        tried = {**self._given, **new}
        is_tried = any(each.user == job.user for name, each in tried.items() if name != job.job)
        of_user = _of_user(job.user)
        is_paused = any(now < self._doubts.get(key, (0, 0.0))[1] for key in (job.job, of_user))
        return not is_paused and not (is_tried and of_user in self._doubts)

    def _nodes_for(
        self,
        job: QueuedJob,
        nodes: Mapping[str, NodeKind],
        idle: Sequence[str],
        own: Sequence[str],
        needed_at: Mapping[str, float],
        now: float,
    ) -> list[str] | None:
        """Return the nodes that a job can start with now, for as long as its time limit.

        They are idle ones, and of its ``own`` the first that it lacks; None if all do not suffice.
        """
        found: list[str] = []
        for part in (job, *job.others):
            ends, needs = now + (math.inf if part.limit_s is None else part.limit_s), part.needs
            mine = () if needs.is_exclusive and self.share is not None else own
            offered = (
                (name, share or nodes[name])
                for names, share in ((idle, None), (mine, self.share))
                for name in names
                if name not in found
                and name not in needs.excluded
                and not nodes[name].partitions.keys().isdisjoint(part.partitions)
                and has_features(needs.features, nodes[name].features)
                and needed_at.get(name, math.inf) >= ends
            )
            if (chosen := _first_nodes(part, offered)) is None:
                return None
            found += chosen
        return found


def _waits_behind(job: QueuedJob) -> bool:
    """Return whether a job is a task of a run that gives way, and waits for nodes."""
    return job.nice >= NICE and job.state == "PENDING" and job.reason in WAITS_FOR_NODES


def _tier(job: QueuedJob, tiers: Mapping[str, int]) -> int:
    """Return the PriorityTier in which Slurm tries a job; ``tiers`` are those of partitions."""
    return max((tiers.get(name, 0) for name in job.partitions), default=0)


def _of_user(user: str) -> str:
    return f"user {user}"


def _first_nodes(job: QueuedJob, offered: Iterable[tuple[str, NodeKind]]) -> list[str] | None:
    """Return the first nodes that suffice for a job, by what they offer; None if all do not.

    Of a job that may have some nodes at most each node has an equal share, though Slurm may choose
    unequal ones.
    """
    needs, most = job.needs, job.needs.most_nodes
    if needs.required:
        offered = sorted(offered, key=lambda each: each[0] not in needs.required)
    least_gpus = (
        {kind: -(-number // most) for kind, number in needs.all_gpus.items()} if most else {}
    )
    least_tasks = -(-needs.ntasks // most) if most else 1
    chosen: list[str] = []
    missing, has_gpus, ntasks = set(needs.required), Counter[str](), 0
    for name, kind in offered:
        fitting = _room(kind, needs)
        if fitting < least_tasks or not _covers(kind.gpus, least_gpus):
            continue
        chosen.append(name)
        missing.discard(name)
        has_gpus.update(kind.gpus)
        ntasks += fitting
        suffices = ntasks >= needs.ntasks and _covers(has_gpus, needs.all_gpus)
        if suffices and len(chosen) >= job.num_nodes and not missing:
            return chosen
    return None


def _room(kind: NodeKind, needs: NodeNeeds) -> int:
    """Return how many tasks of a job fit on a node, 0 if the node lacks what each has to have."""
    if not (
        needs.cpus <= kind.cpus
        and needs.memory_mb <= kind.memory_mb
        and _covers(kind.gpus, needs.gpus)
    ):
        return 0
    task = needs.per_task
    rooms = [kind.cpus // task.cpus, needs.ntasks_per_node or needs.ntasks]
    if task.memory_mb:
        rooms.append(kind.memory_mb // task.memory_mb)
    rooms += [_number(kind.gpus, name) // number for name, number in task.gpus.items()]
    return min(rooms)


def _covers(gpus: Mapping[str, int], wanted: Mapping[str, int]) -> bool:
    return all(number <= _number(gpus, name) for name, number in wanted.items())


def _number(gpus: Mapping[str, int], kind: str) -> int:
    """Return how many GPUs of a type there are; an empty one is any."""
    return gpus.get(kind, 0) if kind else sum(gpus.values())


def has_features(wanted: str, features: Collection[str]) -> bool:
    """Return whether a node has the features that ``--constraint`` asks for.

    Alternatives and conjunctions of names are understood; numbers and brackets are not, so that no
    node has them.
    """
    return not wanted or any(
        all(name.strip() in features for name in part.split("&")) for part in wanted.split("|")
    )


class Neighbours:
    """Queries the queue for a run that gives way, and sets the nice value of its tasks.

    For one thread at a time; see `policy.QueuePolicy`. Calls raise `SlurmError` where Slurm does
    not answer.
    """

    def __init__(self, run: RunDir, spec: RunSpec, client: SlurmClient) -> None:
        launcher = spec.settings.launcher
        assert isinstance(launcher, SlurmSettings)
        self._file = run.given_back
        self._spec = spec
        self._client = client
        self._rule = GiveWay(0.0, None if spec.has_whole_nodes else _share(launcher))
        self._first_slot = 0 if launcher.give_way == "all" else spec.settings.nodes.min
        self._nice = NICE + int(launcher.sbatch.get("nice") or 0)
        self._done: set[str] = set()
        """Tasks that Slurm tries after the jobs of others."""
        self._nodes: Mapping[str, NodeKind] = {}
        self._reserved: Sequence[QueuedJob] = ()
        self._jobs: Sequence[QueuedJob] = ()
        self._listed_at = -math.inf
        self._next_check = self._next_nodes = 0.0
        self._written = ""
        self._config: Mapping[str, str] | None = None

    def check(
        self, returnable: Sequence[tuple[str, str]], siblings: Callable[[], Iterable[str]]
    ) -> list[NodeReturn]:
        """Return what is to be given back; nothing if the last check was too recent.

        ``siblings`` returns the job ids of the user's runs that request the same nodes, which have
        rules of their own (`site.siblings`).
        """
        now = time.time()
        if now < self._next_check:
            return []
        self._next_check = now + CHECK_S
        slots = slots_of(self._spec).items()
        if new := [t for t, slot in slots if slot >= self._first_slot and t not in self._done]:
            self._client.set_nice(new, self._nice)
            self._done.update(new)
        if not returnable:
            return []
        if self._config is None:
            self._config = self._client.config()
        if parsing.hides_jobs(self._config):
            return []
        jobs, own = self._client.jobs_with_needs(), {*siblings(), *jobs_of(self._spec)}
        self._jobs, self._listed_at = jobs, now
        if not self._rule.waiting(jobs, own):
            self._next_check = now + CHECK_SELDOM_S
            return []
        if now >= self._next_nodes:
            if not self._nodes:
                interval_s = parsing.backfill_interval_s(self._config)
                self._rule.patience_s = 2 * interval_s + CHECK_S
                self._restore()
            found = self._client.nodes()
            states = {name: NodeState.parse(kind.state) for name, kind in found.items()}
            self._nodes = {n: found[n] for n, s in states.items() if s.is_idle or s.is_busy}
            self._reserved = self._client.reservations()
            self._next_nodes = now + NODES_S
        queue = [*jobs, *self._reserved]
        returns = self._rule.choose(queue, own, self._nodes, returnable, now)
        if (text := json.dumps(self._rule.memory())) != self._written:
            write_atomic(self._file, text)
            self._written = text
        return returns

    def listed(self) -> Sequence[QueuedJob] | None:
        """Return the jobs of the cluster as listed last; None if that is too long ago."""
        return self._jobs if time.time() - self._listed_at < 2 * CHECK_SELDOM_S else None

    def _restore(self) -> None:
        """Know what the leader before has known; nothing if that cannot be read."""
        try:
            if (memory := read_json(self._file)) is not None:
                self._rule.restore(memory)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            _log.warning("what was given back before is not known: %s: %s", self._file, e)


def _share(launcher: SlurmSettings) -> NodeKind:
    """Return what a task has of its node; without memory in the settings none is known."""
    gpus = launcher.gpus_per_node
    kinds = {} if gpus is None else parsing.gpus(f"gpu:{gpus}")
    return NodeKind(kinds, launcher.cpus_per_node or 1, parsing.megabytes(launcher.mem or "0"))
