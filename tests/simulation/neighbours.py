"""Runs that give nodes back for the jobs of others, on a full cluster, in virtual time.

Two to eight runs stand in the queue of a model of Slurm (`slurm_queue`), beside jobs of others:
arrays, jobs of several nodes, partitions and features, floods of short ones, jobs that a hidden
rule keeps from starting, jobs that are cancelled just as a node is left for them. What goes back is
real (`site.neighbours.GiveWay`, `leader_state.returnable`); leaders come and go, and with them what
they know. That a release loses no step is the matter of `simulator`: it is a notice as any other.

Invariants:
    at once    a job that would start if no task that may go back had its node starts within one
               check, the two longest saves, two passes of the scheduler (but see `DOUBTED_S`)
    delay      where all jobs have one node, none starts later than without the runs by more
    minimum    a run that keeps its minimum gives back no task of it, and none twice
    quiet      a node goes back for nothing only now and then, whatever hidden rule holds a job
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpc_elastic.rendezvous.leader_state import returnable
from hpc_elastic.rendezvous.log_entry import Agent
from hpc_elastic.site import neighbours
from hpc_elastic.site.neighbours import CHECK_S, CHECK_SELDOM_S, GiveWay, NodeReturn
from hpc_elastic.slurm.parsing import NodeKind, NodeNeeds, QueuedJob
from simulation.campaign import Tally
from simulation.slurm_queue import Cluster, Job, decide, plan
from simulation.world import World

START_S = 4.0
"""From the start of a task until its agent joins."""
COMMIT_S = 0.5
"""A save at which agents leave, and their departure."""
AWAY_S = 10.0
"""Shortest time that a requeued task spends in the queue."""
ELECT_S = 1.0
WATCH_S = 10.0


class PromiseError(AssertionError):
    """An invariant does not hold."""


@dataclass
class Outcome(Tally):
    """The counts of one schedule, or of many."""

    jobs: int = 0
    releases: int = 0
    given: int = 0
    """Nodes that went back."""
    in_vain: int = 0
    """Nodes that went back for a job that did not start within a minute of two."""
    compared: int = 0
    """Jobs whose wait is compared with that in the same schedule without the runs."""
    waited_s: float = 0.0
    alone_s: float = 0.0
    """The same without the runs, except the tasks of minima that stay."""


@dataclass(frozen=True)
class Terms:
    """What a run does; a planted bug replaces a part of it."""

    rule: Callable[[float], GiveWay] = GiveWay
    nice: int | None = None
    """What is taken from its priority; None: `neighbours.NICE`."""
    offered: Callable[[Sequence[Agent], Sequence[Agent], int], list[Agent]] = returnable


SOUND = Terms()
MOST_IN_VAIN = 10
"""Times in an hour that a run gives a node back for jobs that do not start then."""


DOUBTED_S = 1300.0
"""What may be added to the wait of a job that could not start for five minutes; and of one of
several nodes, where these are left one after the other, since the script saves only now and then:
tasks of the run that wait may take the first ones meanwhile, and the job counts as misjudged."""
MOST_FOR_OPEN = 6
"""Times that a run gives nodes back for nothing for jobs that no hidden rule holds."""


class Run:
    """One run: its tasks, its members, and its leader, who checks the queue."""

    def __init__(
        self, cluster: Cluster, number: int, user: str, sizes: tuple[int, int], gives: str,
        *, limit_s: float, save_s: float, terms: Terms, submitted_s: float = 0.0,
        partition: str = "main",
    ) -> None:  # fmt: skip
        self.cluster, self.world = cluster, cluster.world
        self.id, self.user, self.gives = f"{9000 + number}", user, gives
        self.min_nodes, self.max_nodes = sizes
        self.save_s = save_s
        """Between two checkpoints at which nodes may be left."""
        self.terms = terms
        self.least = 0 if gives == "all" else self.min_nodes
        self.own = {self.id}
        nice = neighbours.NICE if terms.nice is None else terms.nice
        self.tasks = [
            Job(
                self.id, user, submitted_s, 1, limit_s, limit_s, 1000 + number,
                partitions=(partition,),
                nice=nice if gives != "off" and slot >= self.least else 0, on_start=self._started,
            )
            for slot in range(self.max_nodes)
        ]  # fmt: skip
        self.joined: dict[int, Agent] = {}
        self.leaving: set[Agent] = set()
        self.leader: Agent | None = None
        self.rule = terms.rule(0.0)
        self._memory = json.dumps(self.rule.memory())
        self.releases: list[tuple[float, str, tuple[int, ...]]] = []
        """Time, job and nodes."""
        self.on_release: Callable[[Run, str, Sequence[Agent]], None] = lambda *_: None

    def submit(self) -> None:
        """Put the tasks into the queue."""
        for task in self.tasks:
            self.cluster.submit(task)

    def offered(self) -> list[Agent]:
        """Return the agents that may leave."""
        if self.gives == "off" or self.leader is None:
            return []
        agents = [self.joined[slot] for slot in sorted(self.joined)]
        agents = [agent for agent in agents if agent not in self.leaving]
        parts = ([], agents) if len(self.joined) >= self.min_nodes else (agents, [])
        return self.terms.offered(*parts, self.least)

    # ---- tasks --------------------------------------------------------------------------

    def _started(self, job: Job) -> None:
        slot = next(n for n, task in enumerate(self.tasks) if task is job)
        host = self.cluster.names[job.nodes[0]]
        agent = Agent(f"{self.id}_{slot}", job.attempt, slot, host, 1)
        self.world.after(START_S, None, self._join, agent)
        self.world.after(job.limit_s - 1.0, None, self.leave, agent)

    def _runs(self, agent: Agent) -> bool:
        job = self.tasks[agent.slot]
        return job in self.cluster.running and job.attempt == agent.attempt

    def _join(self, agent: Agent) -> None:
        if self._runs(agent):
            self.joined[agent.slot] = agent
            self._elect()

    def leave(self, agent: Agent) -> None:
        """Let a task return to the queue."""
        if not self._runs(agent):
            return
        self.joined.pop(agent.slot, None)
        self.leaving.discard(agent)
        self.cluster.requeue(self.tasks[agent.slot], AWAY_S)
        if agent == self.leader:
            self.leader = None
            self.world.after(ELECT_S, None, self._elect)

    # ---- the leader ---------------------------------------------------------------------

    def _elect(self) -> None:
        if self.leader is None and self.joined:
            self.leader = self.joined[min(self.joined)]
            self.rule = self.terms.rule(2 * self.cluster.backfill_s + CHECK_S)
            self.rule.restore(json.loads(self._memory))
            self.world.log_event(f"run {self.id}", "has a new leader", self.leader.slot)
            self.world.after(CHECK_S * self.world.rng.random(), None, self._check, self.leader)

    def _check(self, leader: Agent) -> None:
        if self.leader != leader:
            return
        offered = {agent.task: agent for agent in self.offered()}
        jobs = self.cluster.squeue() if offered else []
        has_work = bool(self.rule.waiting(jobs, self.own))
        pause_s = CHECK_SELDOM_S if offered and not has_work else CHECK_S
        self.world.after(pause_s, None, self._check, leader)
        if not has_work:
            return
        tasks = [(agent.task, agent.host) for agent in offered.values()]
        returns = self.rule.choose(jobs, self.own, self.cluster.sinfo(), tasks, self.world.now)
        self._memory = json.dumps(self.rule.memory())
        for each in returns:
            agents = [offered.pop(task) for task in each.tasks]
            self.leaving.update(agents)
            saved_s = self.world.now % self.save_s if self.save_s else 0.0
            wait_s = self.save_s - saved_s if self.save_s else 0.2
            self.world.log_event(f"run {self.id}", f"gives for {each.job}", each.tasks)
            nodes = tuple(self.cluster.names.index(agent.host) for agent in agents)
            self.releases.append((self.world.now, each.job, nodes))
            for agent in agents:
                self.world.after(wait_s + COMMIT_S, None, self.leave, agent)
            self.on_release(self, each.job, agents)


@dataclass
class Scenario:
    """The parameters of one schedule."""

    kinds: list[NodeKind]
    backfill_s: float
    others: list[Job]
    cancels: dict[int, float]
    """Number of a job -> the time when it is cancelled."""
    cancel_given: float
    """How likely a job is cancelled just as nodes are left for it."""
    runs: list[tuple[str, tuple[int, int], str, float, float]]
    """User, sizes, what it gives, time limit, seconds between two checkpoints."""
    deaths: list[float]
    """When a leader dies."""
    quiet_s: float
    """From then on nothing of others changes, except that jobs end."""
    length_s: float
    is_single: bool
    """Whether all jobs of others have one node, any of the cluster's."""

    def __str__(self) -> str:
        """Return what a failure shows."""
        jobs = (
            f"{j.id} {j.user} at {j.submitted_s:.0f}: {j.num_nodes} of {j.partitions} "
            f"{j.needs.features} {j.runs_s:.0f}/{j.limit_s:.0f} s, priority {j.priority}"
            + (f", hidden until {j.hidden_until:.0f}" if j.hidden_until else "")
            for j in self.others
        )
        nodes = (f"{sorted(kind.partitions)} {sorted(kind.features)}" for kind in self.kinds)
        return "\n".join([*nodes, *jobs, *map(str, self.runs), f"backfill {self.backfill_s} s"])

    @property
    def bound_s(self) -> float:
        """From the moment in which a job could start with what may go back until it starts."""
        save_s = 2 * max(save_s for *_, save_s in self.runs)  # one may go to another job
        passes_s = 2 * self.backfill_s + 2 * 2.0
        return CHECK_SELDOM_S + save_s + COMMIT_S + 1.0 + passes_s + 2 * WATCH_S


def draw(rng: random.Random) -> Scenario:
    """Draw a schedule."""
    num = rng.randint(3, 10)
    is_single = rng.random() < 0.3
    kinds = []
    for _ in range(num):
        names = {"main"} if is_single or rng.random() < 0.7 else {"main", "fast"}
        features = frozenset() if rng.random() < 0.5 else frozenset({"ib"})
        kinds.append(NodeKind({}, 8, 1000, features, dict.fromkeys(names, 1)))
    quiet_s = rng.choice([300.0, 600.0, 1200.0])
    others: list[Job] = []
    cancels: dict[int, float] = {}

    def add(at: float, **fields: object) -> None:
        nodes = 1 if is_single or rng.random() < 0.4 else rng.randint(1, num)
        limit_s = 60.0 * rng.choice([2, 5, 10, 30, 120])
        usual: dict[str, object] = {
            "num_nodes": nodes, "limit_s": limit_s, "runs_s": limit_s * rng.uniform(0.05, 1.0),
            "priority": rng.randint(1, 10**6), "needs": NodeNeeds(cpus=rng.randint(1, 8)),
            "user": rng.choice(["ada", "bob", "eve"]), **fields,
        }  # fmt: skip
        others.append(Job(str(len(others) + 1), submitted_s=at, **usual))  # type: ignore[arg-type]

    for _ in range(rng.randint(1, 8)):
        at = quiet_s * rng.random()
        kind = rng.choice(["one", "array", "flood", "hidden", "picky", "cancelled", "wide"])
        if kind == "array":
            count, first = rng.randint(2, 6), len(others)
            limit_s = 60.0 * rng.choice([2, 10])
            for _ in range(count):
                add(at, num_nodes=1, limit_s=limit_s, runs_s=limit_s * rng.uniform(0.1, 1))
                others[-1].id, others[-1].user = others[first].id, others[first].user
                others[-1].priority = others[first].priority
        elif kind == "flood":
            for n in range(rng.randint(3, 10)):
                add(at + 15.0 * n, num_nodes=1, limit_s=60.0, runs_s=rng.uniform(2.0, 20.0))
        elif kind == "hidden" and not is_single:
            for _ in range(rng.choice([1, 1, 8])):
                add(at, hidden_until=math.inf, user="mallory")
            add(at, hidden_until=at + 300.0, user=f"oscar{len(others)}")
        elif kind == "wide" and not is_single:  # a plan, and many behind it that would delay it
            add(at / 2, num_nodes=1, limit_s=1800.0, runs_s=1700.0, priority=10**7)
            add(at, num_nodes=num, limit_s=600.0, priority=10**7)
            for _ in range(rng.randint(2, 6)):
                add(
                    at + 60.0 * rng.random(),
                    num_nodes=1,
                    limit_s=7200.0,
                    priority=rng.randint(1, 99),
                )
        elif kind == "picky" and not is_single:
            needs = NodeNeeds(cpus=1, features=rng.choice(["", "ib", "ib|x", "x"]))
            add(at, needs=needs, partitions=rng.choice([("fast",), ("main", "fast")]))
        else:
            add(at)
            if kind == "cancelled":
                cancels[len(others) - 1] = at + rng.uniform(0.0, 120.0)
    runs = []
    for _ in range(rng.randint(2, 8) if num > 4 else rng.randint(1, 3)):
        low = rng.choice([1, 1, 2])
        runs.append((
            rng.choice(["ida", "kim"]), (low, rng.randint(low, num)),
            "all" if is_single else rng.choice(["on", "all"]), 3600.0 * rng.choice([1, 24, 24]),
            rng.choice([0.0, 0.0, 5.0, 60.0]),
        ))  # fmt: skip
    if is_single:  # in the order of submission: else a delay changes the order
        for job in others:
            job.priority = int(10**6 - job.submitted_s)
    return Scenario(
        kinds, rng.choice([10.0, 30.0]), others, cancels, rng.choice([0.0, 0.3]), runs,
        [quiet_s * rng.random() for _ in range(rng.choice([0, 0, 2]))], quiet_s,
        quiet_s + (3600.0 if any(job.hidden_until for job in others) else 600.0), is_single,
    )  # fmt: skip


class NeighbourSimulator:
    """One random schedule.

    Args:
        seed: It determines the schedule.
        whole_trace: Keep all of the trace.
        terms: What the runs do.
    """

    def __init__(self, seed: int, whole_trace: bool = False, terms: Terms = SOUND) -> None:
        self.seed = seed
        self.world = World(seed, whole_trace)
        self.scenario = draw(self.world.rng)
        self._terms = terms
        self._counts = Outcome(schedules=1)
        self._could_since: dict[tuple[Run, Job], float] = {}
        self._given: dict[int, str] = {}
        """Node -> the job for which it is being left."""

    def outcome(self) -> Outcome:
        """Return the counts so far."""
        return self._counts

    def run(self) -> None:
        """Run the schedule, and once more without the runs.

        Raises:
            PromiseError: an invariant does not hold.
        """
        given, counts = self.scenario, self._counts
        jobs = self._play(given.runs)
        counts.jobs, counts.virtual_s, counts.events = (
            len(jobs),
            self.world.now,
            self.world.num_events,
        )
        self._require_quiet(jobs)
        kept = [
            (u, (low, low), "off", *rest)
            for u, (low, _), gives, *rest in given.runs
            if gives == "on"
        ]
        with_runs, world = self.world, World(self.seed)
        self.world, releases = world, counts.releases
        alone = self._play(kept)  # type: ignore[arg-type]
        self.world = with_runs
        assert counts.releases == releases
        for job, same in zip(jobs, alone, strict=True):
            if job.hidden_until or job.is_cancelled or same.is_cancelled:
                continue
            counts.compared += 1
            counts.waited_s += wait_of(job, given.length_s)
            counts.alone_s += wait_of(same, given.length_s)
            later = wait_of(job, given.length_s) - wait_of(same, given.length_s)
            if given.is_single and later > given.bound_s:
                self._complain(f"delay: job {job.id} starts {later:.0f} s later than without runs")

    def _complain(self, what: str) -> None:
        raise PromiseError(what)

    def _play(self, runs: Sequence[tuple[str, tuple[int, int], str, float, float]]) -> list[Job]:
        given, world = self.scenario, self.world
        cluster = Cluster(world, given.kinds, given.backfill_s)
        self._runs = [
            Run(cluster, n, user, sizes, gives, limit_s=limit_s, save_s=save_s, terms=self._terms)
            for n, (user, sizes, gives, limit_s, save_s) in enumerate(runs)
        ]
        for run in self._runs:
            run.own = {other.id for other in self._runs if other.user == run.user}
            run.on_release = self._released
            run.submit()
        jobs = [replace(job) for job in given.others]
        for number, job in enumerate(jobs):
            world.after(job.submitted_s, None, cluster.submit, job)
            if number in given.cancels:
                world.after(given.cancels[number], None, cluster.cancel, job)
        for at in given.deaths:
            world.after(at, None, self._leader_dies)
        self._cluster, self._runs_by_id = cluster, {run.id for run in self._runs}
        self._jobs = jobs
        self._could_since = {}
        if any(run.gives != "off" for run in self._runs):
            world.after(WATCH_S, None, self._watch)
        world.run(given.length_s)
        return jobs

    def _leader_dies(self) -> None:
        led = [run for run in self._runs if run.leader is not None]
        run = self.world.rng.choice(led) if led else None
        if run is not None and run.leader is not None:
            self._counts.faults["a leader that leaves"] += 1
            run.leave(run.leader)

    # ---- invariants ---------------------------------------------------------------------

    def _released(self, run: Run, job_id: str, agents: Sequence[Agent]) -> None:
        counts, rng = self._counts, self.world.rng
        counts.releases += 1
        counts.given += len(agents)
        counts.checks += 1
        if run.gives == "on" and any(agent.slot < run.min_nodes for agent in agents):
            self._complain(f"minimum: run {run.id} gives {agents}")
        if rng.random() < self.scenario.cancel_given:
            counts.faults["a job that is cancelled as a node is freed"] += 1
            for job in [job for job in self._jobs if job.id == job_id]:
                self.world.after(5.0 * rng.random(), None, self._cluster.cancel, job)

    def _watch(self) -> None:
        """Compare what has started with what would, without the tasks that may go back."""
        world, cluster = self.world, self._cluster
        world.after(WATCH_S, None, self._watch)
        others = [job for job in cluster.startable() if job.nice < neighbours.NICE]
        if all(job.on_start is not None for job in others):
            self._could_since = {}
            return
        self._counts.checks += 1
        names = {name: number for number, name in enumerate(cluster.names)}
        mine = {task for run in self._runs for task in run.tasks}
        reasons, could = [job.reason for job in others], dict[tuple[Run, Job], float]()
        for run in self._runs:
            back = {names[agent.host] for agent in (*run.offered(), *run.leaving)}
            if not back:
                continue
            free = (cluster.free - cluster.down) | back
            ends = {node: at for node, at in cluster.ends().items() if node not in free}
            starts = {job for job, _ in decide(others, free, cluster.partitions)}
            starts |= {job for job, _ in plan(world.now, others, free, ends)[0]}
            for job in starts - mine:
                could[run, job] = self._could_since.get((run, job), world.now)
                waits_s = world.now - could[run, job]
                is_slow = job.num_nodes > 1 and run.save_s > 0.0
                bound_s = self.scenario.bound_s
                bound_s += DOUBTED_S if job.hidden_until or is_slow else 0.0
                if waits_s > bound_s:
                    self._complain(
                        f"at once: job {job.id} could start {waits_s:.0f} s ago, on "
                        f"{job.num_nodes} of {sorted(free)}, {sorted(back)} of run {run.id}"
                    )
        self._could_since = could
        for job, reason in zip(others, reasons, strict=True):
            job.reason = reason

    def _require_quiet(self, jobs: Sequence[Job]) -> None:
        """Few nodes go back for jobs that do not start then."""
        by_id: dict[str, list[Job]] = {}
        for job in jobs:
            by_id.setdefault(job.id, []).append(job)
        for run in self._runs:
            hours, for_open = Counter[tuple[int, int]](), 0
            for at, job_id, nodes in run.releases:
                starts = [j.started_s for j in by_id.get(job_id, ()) if j.started_s is not None]
                if any(0 <= started - at <= 120.0 + run.save_s for started in starts):
                    continue
                if any(job.is_cancelled for job in by_id.get(job_id, ())):
                    continue
                if job_id in self._runs_by_id:
                    continue
                self._counts.in_vain += len(nodes)
                for_open += not any(job.hidden_until for job in by_id[job_id])
                hours.update((int(at // 3600), node) for node in nodes)
            if for_open > MOST_FOR_OPEN:
                self._complain(
                    f"quiet: run {run.id} gives for nothing for {for_open} jobs that may start"
                )
            for (hour, node), num in hours.items():
                if num > MOST_IN_VAIN:
                    what = f"run {run.id} gives node {node} {num} times for nothing in hour {hour}"
                    self._complain(f"quiet: {what}")


def wait_of(job: Job, length_s: float) -> float:
    """Return how long a job has waited, until the end if it has not started."""
    return (length_s if job.started_s is None else job.started_s) - job.submitted_s


# ---- Planted bugs


class _Part(GiveWay):
    """Gives the first of the nodes that a job lacks."""

    def choose(self, *args: Any, **kwargs: Any) -> list[NodeReturn]:
        return [replace(each, tasks=each.tasks[:1]) for each in super().choose(*args, **kwargs)]


class _Trusting(GiveWay):
    """Forgets the jobs that did not start."""

    def _may_get(self, *args: Any) -> bool:
        return True


class _Forgetful(GiveWay):
    """Knows nothing of earlier leaders."""

    def restore(self, memory: Any) -> None:
        pass


class _Blind(GiveWay):
    """Ignores the plans of backfill."""

    def choose(self, jobs: Sequence[QueuedJob], *args: Any, **kwargs: Any) -> list[NodeReturn]:
        return super().choose([replace(job, starts_at=None) for job in jobs], *args, **kwargs)


class _Unforgiving(GiveWay):
    """Gives nothing again for a job that was misjudged once."""

    def _may_get(self, job: QueuedJob, *args: Any) -> bool:
        return job.job not in self._doubts


MUTANTS = {
    "gives a part": (Terms(_Part), "at once|delay"),
    "trusts each job": (Terms(_Trusting), "quiet"),
    "a new leader knows nothing": (Terms(_Forgetful), "quiet"),
    "ignores plans": (Terms(_Blind), "quiet"),
    "never tries again": (Terms(_Unforgiving), "at once"),
    "no nice value": (Terms(nice=0), "at once|delay|quiet"),
    "gives the minimum": (Terms(offered=lambda w, m, least: returnable(w, m, 0)), "minimum"),
}
"""Planted bugs, each with the invariant that it breaks."""
