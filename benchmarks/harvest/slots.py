"""The slots that Slurm gives to the one-node tasks of a run in the holes of a machine (pure).

A model of Slurm's backfill: a pass each 30 s, at which a task that waits gets a node that is idle,
any that fits with the same probability. The end of each hole is known to Slurm, since other jobs
are planned from there on. `SHAPES` are the ways of asking:

``qos``     a preemptible QOS with NoReserve: backfill plans such a task as one minute, so it fits
            any hole; it runs until another job needs the node, and then has the grace.
``time_min``  ``launcher.time_min=2``: the real `hpc_elastic.site.limits.LimitFitter` gives the
            waiting tasks limits that fit the holes, as it sees them.
``ladder``  tasks of fixed lengths, enough of each; the longest one that fits starts.

A task is in the queue again `AWAY_S` after its slot, for all contestants: each gets the same slots,
whatever it makes of them.
"""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harvest.holes import Holes
from hpc_elastic.site.limits import CHECK_S, LimitFitter

PASS_S = 30.0
AWAY_S = 10.0
"""As a task that requeues itself (`hpc_elastic.slurm.requeue.RETURN_DELAY_S`)."""
MINUTE_S = 60.0
CHECKS_A_PASS = round(PASS_S / CHECK_S)
RUNGS_MIN = (2, 4, 6, 8, 14, 22, 34, 56, 90)
Shape = Literal["qos", "time_min", "ladder"]
SHAPES: tuple[Shape, ...] = ("qos", "time_min", "ladder")


@dataclass(frozen=True)
class Slot:
    """A node for one task, until its time limit ends, or another job needs the node.

    ``limit_s`` is the time limit as Slurm reports it at the start.
    """

    task: int
    begin_s: float
    end_s: float
    limit_s: float

    @property
    def is_preempted(self) -> bool:
        """Whether another job ends it, not its limit."""
        return self.begin_s + self.limit_s > self.end_s


LONG_LIMIT_S = 24 * 3600.0
"""The time limit of a task in a preemptible QOS."""
FULL_LIMIT_S, LEAST_LIMIT_S = 8 * 3600.0, 120.0
"""``launcher.time`` and ``launcher.time_min``."""


def slot_length(left_s: float, shape: Shape) -> float | None:
    """Return the length of the slot in what is left of a hole; None if no task fits."""
    if left_s < MINUTE_S:
        return None
    if shape == "qos":
        return left_s
    fitting = [rung for rung in RUNGS_MIN if rung * MINUTE_S <= left_s]
    return fitting[-1] * MINUTE_S if fitting else None


class Holder:
    """Which tasks of a run have which holes.

    ``idle``: holes without a task, which have begun; some have ended. ``waiting``: a heap of the
    tasks in the queue.
    """

    def __init__(self, holes: Holes, num_tasks: int, shape: Shape, rng: random.Random) -> None:
        self.idle: list[int] = []
        self.waiting = list(range(num_tasks))
        self.slots: list[Slot] = []
        self._ends: list[float] = holes.end_s.tolist()
        self._running: list[tuple[float, int, int]] = []
        """Heap of the tasks in slots: back in the queue at, task, hole."""
        self._shape = shape
        self._rng = rng
        self._fitter = LimitFitter(FULL_LIMIT_S, LEAST_LIMIT_S)

    @property
    def is_running(self) -> bool:
        return bool(self._running)

    def requeue(self, now: float) -> None:
        """Tasks are back in the queue, and what is left of their holes is idle."""
        while self._running and self._running[0][0] <= now:
            _, task, hole = heapq.heappop(self._running)
            heapq.heappush(self.waiting, task)
            self.idle.append(hole)

    def start_any(self, now: float) -> None:
        """A pass for tasks that fit into any hole, in one length or another."""
        while self.waiting and self.idle:
            chosen = self._rng.randrange(len(self.idle))
            self.idle[chosen], self.idle[-1] = self.idle[-1], self.idle[chosen]
            hole = self.idle.pop()
            length_s = slot_length(self._ends[hole] - now, self._shape)
            if length_s is not None:  # else it never fits: it only gets shorter
                limit_s = LONG_LIMIT_S if self._shape == "qos" else length_s
                self._start(heapq.heappop(self.waiting), hole, now, length_s, limit_s)

    def start_fitted(self, now: float) -> None:
        """A pass for tasks with the limits that the run has given them."""
        left = {hole: self._ends[hole] - now for hole in self.idle}
        left = {hole: left_s for hole, left_s in left.items() if left_s >= MINUTE_S}
        self.idle = list(left)
        if not (left and self.waiting):
            return
        tasks = [str(task) for task in sorted(self.waiting)]
        seen = {str(hole): left_s for hole, left_s in left.items()}
        for _ in range(CHECKS_A_PASS):
            limits = self._fitter.limits(tasks, seen)
        for task in map(int, tasks):
            limit_s = limits[str(task)]
            fitting = [hole for hole, left_s in left.items() if left_s >= limit_s]
            if fitting:
                hole = self._rng.choice(fitting)
                del left[hole]
                self.idle.remove(hole)
                self.waiting.remove(task)
                self._start(task, hole, now, limit_s, limit_s)
        heapq.heapify(self.waiting)

    def _start(self, task: int, hole: int, now: float, length_s: float, limit_s: float) -> None:
        self.slots.append(Slot(task, now, now + length_s, limit_s))
        heapq.heappush(self._running, (now + length_s + AWAY_S, task, hole))


def fill(holes: Holes, num_tasks: int, shape: Shape, rng: random.Random) -> list[Slot]:
    """Return the slots of a run with this number of tasks, in order of their begins."""
    starts: Sequence[float] = holes.start_s.tolist()
    holder = Holder(holes, num_tasks, shape, rng)
    num_begun, now, last = 0, 0.0, max(starts, default=0.0)
    while now <= last or holder.is_running:
        while num_begun < len(starts) and starts[num_begun] <= now:
            holder.idle.append(num_begun)
            num_begun += 1
        holder.requeue(now)
        if shape == "time_min":
            holder.start_fitted(now)
        else:
            holder.start_any(now)
        now += PASS_S
    return holder.slots
