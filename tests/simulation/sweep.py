"""Several runs of one sweep on a small Slurm cluster, in virtual seconds.

The other simulation has one run and all faults. This one has several runs and few faults, and
measures how long nodes are held without a step, or are idle while a run waits. The leaders
(`rendezvous.leader_state`), the order of the queue (`launcher.plan`) and the decisions among the
runs (`site.siblings`) are real. A run has one leader while at least one of its agents lives.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hpc_elastic.rendezvous.effects import (
    Announce,
    Append,
    ClearHolds,
    Effect,
    Postpone,
    QueryQueue,
    QueryTasks,
    Send,
)
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig, LeaderState
from hpc_elastic.rendezvous.log_entry import Agent, Endpoint, LogEntry, RoundRules, claim
from hpc_elastic.rendezvous.messages import Heartbeat, Join, Requeue, Stop
from hpc_elastic.rendezvous.round_state import RoundPhase
from hpc_elastic.site import QueueAdvice, siblings
from hpc_elastic.site.value import NodeDemand, StepTimeModel
from hpc_elastic.slurm.job_state import TaskState

_START_S = 4.0
"""From the start of a task until its agent joins."""
_LEAVE_S = 1.0
_REQUEUE_S = 10.0
"""Shortest time that a requeued task spends in the queue."""


@dataclass
class Task:
    """One task of the array."""

    run: int
    slot: int
    name: str
    attempt: int = 0
    node: str = ""
    since: float = 0.0
    """When it received its node."""
    not_before: float = 0.0
    joined: bool = False
    trains_since: float | None = None
    over: bool = False

    @property
    def agent(self) -> Agent:
        """Its agent."""
        return Agent(self.name, self.attempt, self.slot, self.node, 1)

    def state(self, now: float) -> TaskState:
        """Return squeue's state of it."""
        if self.over:
            return TaskState(self.name, "COMPLETED", restarts=self.attempt)
        if self.node:
            return TaskState(self.name, "RUNNING", node=self.node, restarts=self.attempt)
        ahead = self.not_before - now
        reason, starts = ("BeginTime", ahead) if ahead > 0 else ("Resources", None)
        return TaskState(self.name, "PENDING", reason, restarts=self.attempt, starts_in_s=starts)


@dataclass
class Run:
    """One run."""

    number: int
    min_nodes: int
    max_nodes: int
    work_s: float
    """Remaining time of its training; if it scales, on one node."""
    model: StepTimeModel | None = None
    """Seconds of a step by number of nodes, in which ``work_s`` passes as one second of one node;
    None: any number of nodes takes the same time."""
    total_s: float = 0.0
    stopped_until: float = 0.0
    """No step is made before."""
    done_at: float = math.inf
    tasks: list[Task] = field(default_factory=list)
    submitted: float = 0.0
    discovered: float = -math.inf
    """When it searched for siblings last."""
    entry: LogEntry | None = None
    leader_state: LeaderState | None = None
    done: bool = False


@dataclass
class Figures:
    """The measurements; seconds."""

    held_s: float = 0.0
    """The longest time for which a task held a node without a step."""
    idle_s: float = 0.0
    """The longest time for which idle nodes would have sufficed for a waiting run."""
    took_s: float = 0.0
    """Time until all runs were done."""
    mean_s: float = 0.0
    """Mean time until a run was done."""
    starts: int = 0
    """Number of task starts."""
    node_s: float = 0.0
    """Node-seconds that tasks held."""
    in_vain_s: float = 0.0
    """Those in which the run of the task did not train with it: starts and waits."""

    @property
    def share_in_vain(self) -> float:
        """Share of the held node-seconds without a step."""
        return self.in_vain_s / self.node_s


@dataclass(frozen=True)
class Scaling:
    """Runs whose throughput depends on their nodes, on a number of nodes that varies.

    Attributes:
        runs: The step times of each run, and the seconds that it takes on one node.
        pool: Times, each with the number of nodes that other users leave from then on: they take
            nodes of the runs, and give nodes back.
        restart_s: From the close of a round to its first step.
        soonest: Whether the runs have ``sweep_growth=soonest``.
    """

    runs: Sequence[tuple[StepTimeModel, float]] = ()
    pool: Sequence[tuple[float, int]] = ()
    restart_s: float = 0.0
    soonest: bool = False


class SweepSimulation:
    """A sweep on a few nodes.

    Args:
        nodes: Min and max nodes of each run.
        num_nodes: Number of nodes of the cluster.
        seed: Seed of the random generator.
        takes_turns: Whether runs release nodes for each other (`site.siblings`).
        order: Tasks as (run, slot), in the order of the queue.
        work_s: Training time of each run.
        foreign: Other users' jobs: start, end, and number of nodes.
        lost: Nodes that die: time and name.
        submitted: Time at which each run is submitted; None: all at the beginning.
        discovery_s: Interval at which a run searches for siblings; 0 for those of one sweep.
        scaling: How the runs depend on the number of nodes; None: they do not.
    """

    def __init__(
        self,
        nodes: Sequence[tuple[int, int]],
        num_nodes: int,
        order: Sequence[tuple[int, int]],
        *,
        seed: int = 0,
        takes_turns: bool = True,
        work_s: float = 60.0,
        foreign: Iterable[tuple[float, float, int]] = (),
        lost: Iterable[tuple[float, str]] = (),
        submitted: Sequence[float] | None = None,
        discovery_s: float = 0.0,
        scaling: Scaling | None = None,
    ) -> None:
        self.now = 0.0
        self._discovery_s = discovery_s
        self.figures = Figures()
        self._rng = random.Random(seed)
        self._takes_turns = takes_turns
        self._scaling = scaling or Scaling()
        self._runs = [
            Run(i, low, high, work_s, total_s=work_s) for i, (low, high) in enumerate(nodes)
        ]
        for run, (model, alone_s) in zip(self._runs, self._scaling.runs, strict=False):
            run.model, run.work_s, run.total_s = model, alone_s, alone_s
        self._queue = [Task(run, slot, f"7_{index}") for index, (run, slot) in enumerate(order)]
        for task in sorted(self._queue, key=lambda t: t.slot):
            self._runs[task.run].tasks.append(task)
            if submitted is not None:
                task.not_before = self._runs[task.run].submitted = submitted[task.run]
        self._nodes = {f"node{n}": "idle" for n in range(1, num_nodes + 1)}
        self._foreign = list(foreign)
        self._lost = list(lost)
        self._idle_since: dict[int, float] = {}

    def run(self, until_s: float = 7200.0) -> Figures:
        """Simulate until all runs are done, or the time is over."""
        while self.now < until_s and not all(run.done for run in self._runs):
            self._change_nodes()
            self._start_tasks()
            for run in self._runs:
                self._advance_run(run)
            self._measure()
            self.now += 1.0
        self.figures.took_s = self.now
        return self.figures

    # ---- the cluster --------------------------------------------------------------------

    def _change_nodes(self) -> None:
        """Start and end other users' jobs, and let nodes die."""
        for begin, end, num in self._foreign:
            if end == self.now:
                taken = [n for n, state in self._nodes.items() if state == "foreign"][:num]
                self._nodes |= dict.fromkeys(taken, "idle")
            if begin == self.now:
                self._nodes |= dict.fromkeys(self._idle_nodes()[:num], "foreign")
        for at, num in self._scaling.pool:
            if at == self.now:
                self._resize_pool(num)
        for at, node in self._lost:
            if at == self.now:
                self._nodes[node] = "down"
                for task in self._queue:
                    if task.node == node:
                        self._end_task(task, 120.0)

    def _resize_pool(self, num: int) -> None:
        """Let other users take nodes, idle ones first, or leave some of theirs."""
        theirs = [node for node, state in self._nodes.items() if state == "foreign"]
        ours = len(self._nodes) - len(theirs)
        self._nodes |= dict.fromkeys(theirs[: max(0, num - ours)], "idle")
        for _ in range(ours - num):
            if not (idle := self._idle_nodes()):
                task = self._rng.choice([task for task in self._queue if task.node])
                idle = [task.node]
                self._end_task(task, _REQUEUE_S)
            self._nodes[idle[0]] = "foreign"

    def _idle_nodes(self) -> list[str]:
        return [name for name, state in self._nodes.items() if state == "idle"]

    def _start_tasks(self) -> None:
        for task in self._queue:
            idle = self._idle_nodes()
            if idle and not (task.over or task.node) and task.not_before <= self.now:
                task.node, task.since = idle[0], self.now
                task.joined, task.trains_since = False, None
                self._nodes[task.node] = "allocated"
                self.figures.starts += 1

    def _end_task(self, task: Task, away_s: float) -> None:
        """End an attempt of a task, and requeue it for this time."""
        run, agent = self._runs[task.run], task.agent
        if task.trains_since is None:
            self._measure_held_node(task)
        self._free_node(task.node)
        joined = task.joined
        task.node, task.joined, task.trains_since = "", False, None
        task.attempt += 1
        task.not_before = self.now + max(_LEAVE_S, away_s)
        if joined and run.leader_state is not None:
            self._do(run, run.leader_state.disconnected(agent, "its task ended", self.now))
        if not any(t.joined for t in run.tasks):
            run.leader_state = None

    def _free_node(self, node: str) -> None:
        if self._nodes[node] == "allocated":
            self._nodes[node] = "idle"

    def _measure_held_node(self, task: Task) -> None:
        self.figures.held_s = max(self.figures.held_s, self.now - task.since)

    # ---- a run --------------------------------------------------------------------------

    def _advance_run(self, run: Run) -> None:
        if run.done:
            return
        for task in run.tasks:
            if task.node and not task.joined and self.now - task.since >= _START_S:
                self._add_agent(run, task)
        leader_state = run.leader_state
        if leader_state is None:
            return
        for task in run.tasks:
            if task.joined:
                beat = Heartbeat(_progress(run))
                self._do(run, leader_state.received(task.agent, beat, self.now))
        if run.leader_state is leader_state:
            self._do(run, leader_state.tick(self.now))
        if run.leader_state is leader_state and leader_state.run.phase is RoundPhase.RUNNING:
            if self.now < run.stopped_until:
                return
            size = len(leader_state.run.ranks.members)
            model = run.model
            run.work_s -= 1.0 if model is None else model.step_s(1) / model.step_s(size)
            if run.work_s <= 0.0:
                self._end_run(run)

    def _add_agent(self, run: Run, task: Task) -> None:
        task.joined = True
        agent = task.agent
        if run.leader_state is None:
            number = 1 if run.entry is None else run.entry.index + 1
            here = Endpoint("10.0.0.1", 1, agent.task, agent.attempt)
            run.entry = claim(number, run.entry, here, self.now)
            rules = RoundRules(
                run.min_nodes, run.max_nodes, 3, 600.0, 5.0,
                scale_up="immediate", below_min_timeout_s=300.0, in_sweep=self._takes_turns,
            )  # fmt: skip
            heartbeat = HeartbeatConfig(1.0, 10.0)
            run.leader_state = LeaderState(run.entry, rules, heartbeat, self.now, self._rng)
        effects = run.leader_state.connected(agent, self.now)
        effects += run.leader_state.received(agent, Join(1), self.now)
        self._do(run, effects)

    def _end_run(self, run: Run) -> None:
        run.done, run.done_at = True, self.now
        self.figures.mean_s += self.now / len(self._runs)
        if self._takes_turns:
            self._let_others_start(run, ends=True)
        for task in run.tasks:
            if task.node:
                self._free_node(task.node)
            task.node, task.over = "", True

    def _do(self, run: Run, effects: Sequence[Effect]) -> None:
        for effect in effects:
            leader_state = run.leader_state
            if leader_state is None:
                return
            match effect:
                case Append(entry):
                    run.entry = entry
                    self._do(run, leader_state.appended())
                case Announce(_, requests):
                    run.stopped_until = self.now + self._scaling.restart_s
                    for task in run.tasks:
                        if task.joined and task.agent in requests and task.trains_since is None:
                            self._measure_held_node(task)
                            task.trains_since = self.now
                case Send(agents, Stop()):
                    for agent in agents or ():
                        self._do(run, leader_state.received(agent, Join(2), self.now))
                case Send(agents, Requeue(delay_s)):
                    names = {agent.task for agent in agents or ()}
                    for task in [t for t in run.tasks if t.name in names]:
                        self._end_task(task, max(_REQUEUE_S, delay_s))
                case Postpone(delay_s):
                    for task in run.tasks:
                        task.not_before = self.now + delay_s
                case QueryTasks():
                    view = {t.name: t.state(self.now) for t in run.tasks}
                    self._do(run, leader_state.slurm_answered(view, self.now))
                case QueryQueue(question):  # its Slurm detects a loss at once
                    why = largest = None
                    if question.is_short:
                        why = siblings.why_blocked(*self._siblings(run), self._all_nodes())
                    if question.trains:
                        largest = self._let_others_start(
                            run, lost=question.lost, grows=question.grows
                        )
                    self._do(run, leader_state.advised(QueueAdvice(why, largest), self.now))
                case ClearHolds(tasks):
                    self._clear_holds(tasks)

    def _let_others_start(
        self, run: Run, *, ends: bool = False, lost: Iterable[str] = (), grows: bool = True
    ) -> float:
        """Return the size up to which the run grows."""
        (queued, own), nodes = self._siblings(run), self._all_nodes()
        withheld = frozenset(lost if grows else queued[own].tasks)
        largest, deferred = math.inf, frozenset[int]()
        if self._scaling.soonest and not ends and run.leader_state is not None:
            shares = siblings.divide_next_nodes(queued)
            deferred = siblings.deferred_runs(queued, shares)
            largest = len(queued[own].nodes) + shares[own]
        let_start = siblings.let_start(
            queued, own, nodes, ends=ends, withheld=withheld, deferred=deferred
        )
        self._clear_holds(let_start)
        if not (ends or let_start):
            kept = siblings.keep_away(queued, nodes, deferred)
            self._clear_holds(kept, siblings.KEPT_AWAY_S)
        return largest

    def _clear_holds(self, names: Iterable[str], delay_s: float = 2.0) -> None:
        for task in self._queue:
            if task.name in names:
                task.not_before = self.now + delay_s

    # ---- views of Slurm, and measurements -----------------------------------------------

    def _siblings(self, run: Run) -> tuple[list[siblings.QueuedRun], int]:
        """Return the runs that a run has discovered, and its own index."""
        if self.now - run.discovered >= self._discovery_s:
            run.discovered = self.now
        known = [r for r in self._runs if r.submitted <= run.discovered]
        views = [(r, {t.name: t.state(self.now) for t in r.tasks}) for r in known]
        queued = [
            siblings.QueuedRun(
                str(r.number), r.min_nodes, view, has_started=r.entry is not None,
                demand=_demand(r) if self._scaling.soonest else None,
            )
            for r, view in views
        ]  # fmt: skip
        return queued, known.index(run)

    def _all_nodes(self) -> siblings.NodeSupply:
        states = {n: "allocated" if s == "foreign" else s for n, s in self._nodes.items()}
        return siblings.NodeSupply(states, are_whole=True)

    def _measure(self) -> None:
        for task in self._queue:
            if task.node:
                self.figures.node_s += 1.0
            if task.node and task.trains_since is None:
                self.figures.in_vain_s += 1.0
                self._measure_held_node(task)
        for run in self._runs:
            lacks = run.min_nodes - sum(bool(task.node) for task in run.tasks)
            if run.done or not 0 < lacks <= len(self._idle_nodes()):
                self._idle_since.pop(run.number, None)
                continue
            since = self._idle_since.setdefault(run.number, self.now)
            self.figures.idle_s = max(self.figures.idle_s, self.now - since)


def _num_steps(run: Run) -> tuple[int, int]:
    """Return the steps of a run that are done, and those that are left."""
    alone_s = 1.0 if run.model is None else run.model.step_s(1)
    total, left = round(run.total_s / alone_s), math.ceil(run.work_s / alone_s)
    return total - left, left


def _progress(run: Run) -> dict[str, int] | None:
    """Return what the workers of a run report; None if it reports nothing."""
    if run.model is None:
        return None
    done, left = _num_steps(run)
    return {"step": done, "total": done + left}


def _demand(run: Run) -> NodeDemand:
    """Return what the last status of a run shows."""
    step_times: Mapping[int, float] = {} if run.entry is None else run.entry.step_times
    if run.leader_state is not None:
        step_times = run.leader_state.run.estimator.step_times
    left = _num_steps(run)[1]
    return NodeDemand(0, run.min_nodes, run.max_nodes, 1, step_times, left)
