"""A day of a cluster on which jobs of others ask for most of the nodes, beside one run.

The cluster is `slurm_queue`, the run `neighbours.Run` with its real decisions. What a change of the
group costs is modelled: each start, each departure, and a pause of all members at each change.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpc_elastic.rendezvous.log_entry import Agent
from hpc_elastic.slurm.parsing import NodeKind
from simulation.neighbours import SOUND, Run, wait_of
from simulation.slurm_queue import Cluster, Job
from simulation.world import World

STALL_S = 0.5
"""What a change of the group holds up its members: a save, the rendezvous, the first step."""
BATCH_S = 10.0
"""Newcomers take part together, so often at most."""
QUEUED_S = 7200.0
"""What others submit in so long is in the queue from the begin on."""
_LIMITS_MIN = {10: 20, 20: 20, 30: 18, 60: 16, 120: 12, 240: 9, 480: 5}
"""Time limit, and its share of the jobs in per cent."""


@dataclass(frozen=True)
class Day:
    """What was seen; seconds and node-seconds.

    ``waits`` are those of jobs that were submitted after the run, until the end for those that have
    not started.
    """

    waits: list[float] = field(default_factory=list)
    held_s: float = 0.0
    trained_s: float = 0.0
    lost_s: float = 0.0
    """What returns of nodes cost."""
    returned: int = 0
    """Nodes that went back."""
    done_s: float | None = None
    """From the submission to the end of the training; None: it goes on."""

    @property
    def mean_s(self) -> float:
        """The mean wait."""
        return statistics.fmean(self.waits)

    @property
    def p95_s(self) -> float:
        """The wait that 95 % of the jobs do not exceed."""
        return sorted(self.waits)[int(0.95 * (len(self.waits) - 1))]


def others(num_nodes: int, load: float, length_s: float, rng: random.Random) -> Iterator[Job]:
    """Yield jobs of others that ask for this share of the nodes' time, in random bursts."""
    sizes = [2**power for power in range(12) if 2**power <= max(num_nodes // 4, 1)]
    sizes += [num_nodes // 2] if num_nodes <= 64 else []
    weights = [0.75**number for number in range(len(sizes))]
    at, number = -QUEUED_S, 0
    while at < length_s:
        nodes, minutes = (
            rng.choices(sizes, weights)[0],
            rng.choices([*_LIMITS_MIN], [*_LIMITS_MIN.values()])[0],
        )
        runs_s = 60.0 * minutes * rng.uniform(0.1, 1.0)
        number += 1
        user, submitted_s = f"user{number % 7}", max(0.0, at)
        yield Job(str(number), user, submitted_s, nodes, 60.0 * minutes, runs_s, 10**7 - number)
        at += rng.expovariate(1.0) * nodes * runs_s / (num_nodes * load)


class _TimedRun(Run):
    """A run that counts its node time."""

    held_s = trained_s = lost_s = 0.0
    _since = _paused_until = _last_batch_s = 0.0
    work_s = math.inf
    """Node-seconds of its training."""
    done_at: float | None = None

    def submit(self) -> None:
        """Put the tasks into the queue."""
        super().submit()
        self._tick()

    def _tick(self) -> None:
        self._account()
        if self.trained_s < self.work_s:
            self.world.after(60.0, None, self._tick)
            return
        self.done_at, self.leader, self.gives = self.world.now, None, "off"
        self.joined.clear()
        for task in self.tasks:
            self.cluster.cancel(task)

    def _account(self, new: int = 0) -> None:
        """Count the time since the last change; ``new`` nodes were not held then."""
        now = self.world.now
        members = len(self.joined) if len(self.joined) >= self.min_nodes else 0
        begin = max(self._since, min(self._paused_until, now))
        self.trained_s += members * (now - begin)
        nodes = sum(task in self.cluster.running for task in self.tasks)
        self.held_s += (nodes - new) * (now - self._since)
        self._since = now

    def _started(self, job: Job) -> None:
        self._account(new=1)
        super()._started(job)

    def _join(self, agent: Agent) -> None:
        if not self._runs(agent):
            return
        if self.world.now - self._last_batch_s < BATCH_S and self.joined:
            wait_s = self._last_batch_s + BATCH_S - self.world.now
            self.world.after(max(wait_s, 0.001), None, self._join, agent)
            return
        self._account()
        self._last_batch_s = self.world.now - BATCH_S + 1.0  # others that are there join, too
        self._paused_until = self.world.now + STALL_S
        super()._join(agent)

    def leave(self, agent: Agent) -> None:
        """Count the pause of those that stay, and the departure."""
        if self._runs(agent):
            self._account()
            if agent in self.leaving:
                is_new = self._paused_until < self.world.now + STALL_S
                self.lost_s += 1.0 + (STALL_S * len(self.joined) if is_new else 0.0)
            self._paused_until = self.world.now + STALL_S
        super().leave(agent)


def play(
    num_nodes: int, load: float, gives: str | None, *, hours: float, seed: int, work_h: float
) -> Day:
    """Return a day with a run of one node to all, whose tasks have an hour each.

    ``gives``: None: no run; ``min``: its minimum only, for all of the day. ``work_h``: hours of its
    training, if it had all nodes.
    """
    world, rng = World(seed), random.Random(seed)
    kinds = [NodeKind({}, 8, 1000, frozenset(), {"main": 1})] * num_nodes
    cluster = Cluster(world, kinds)
    length_s = 3600.0 * hours
    submitted_s = length_s / 6
    jobs = list(others(num_nodes, load, length_s, rng))
    for job in jobs:
        world.after(job.submitted_s, None, cluster.submit, job)
    run = None
    if gives is not None:
        sizes = (1, 1 if gives == "min" else num_nodes)
        run = _TimedRun(
            cluster, 0, "ida", sizes, "off" if gives == "min" else gives, limit_s=3600.0,
            save_s=0.0, terms=SOUND, submitted_s=submitted_s,
        )  # fmt: skip
        run.work_s = math.inf if gives == "min" else 3600.0 * work_h * num_nodes
        behind = sum(job.submitted_s < submitted_s for job in jobs)
        for task in run.tasks:
            task.priority = 10**7 - behind
        world.after(submitted_s, None, run.submit)
    world.run(length_s)
    waits = [wait_of(job, length_s) for job in jobs if job.submitted_s >= submitted_s]
    if run is None:
        return Day(waits)
    run._account()
    returned = sum(len(nodes) for *_, nodes in run.releases)
    done_s = None if run.done_at is None else run.done_at - submitted_s
    return Day(waits, run.held_s, run.trained_s, run.lost_s, returned, done_s)


# ---- Many days


CONTESTANTS: dict[str | None, str] = {
    None: "no run", "min": "a job of one node, all day", "off": "give_way=off",
    "on": "give_way=on", "all": "give_way=all",
}  # fmt: skip
FIGURES = {
    "others wait, min": ".1f", "95 %, min": ".0f", "longer, %": ".1f", "95 % longer, %": ".1f",
    "training done, h": ".1f", "node-hours trained": ".0f", "lost at returns, %": ".2f",
}  # fmt: skip
"""Each with its format. A training that is not done counts to the end."""
AIMS = (("on", 2, 2.0), ("on", 3, 2.0), ("all", 2, 2.0), ("all", 3, 2.0), ("all", 6, 1.0))
"""Contestant, index of the figure, and what it is at most."""


def measure(num_nodes: int, load: float, seeds: int, hours: float) -> dict[str | None, list[float]]:
    """Return the figures of each contestant, in the mean of some days."""
    found: dict[str | None, list[float]] = {}
    for gives in CONTESTANTS:
        days = [
            play(num_nodes, load, gives, hours=hours, seed=seed, work_h=hours / 6)
            for seed in range(seeds)
        ]
        mean_min = statistics.fmean(day.mean_s for day in days) / 60.0
        p95_min = statistics.fmean(day.p95_s for day in days) / 60.0
        alone = found[None] if gives else [mean_min, p95_min]
        done = (day.done_s or 3600.0 * hours * 5 / 6 for day in days)
        trained_s, held_s = sum(day.trained_s for day in days), sum(day.held_s for day in days)
        found[gives] = [
            mean_min, p95_min, 100 * (mean_min / alone[0] - 1), 100 * (p95_min / alone[1] - 1),
            statistics.fmean(done) / 3600.0 if gives else 0.0, trained_s / 3600.0 / seeds,
            100 * sum(day.lost_s for day in days) / held_s if held_s else 0.0,
        ]  # fmt: skip
    return found
