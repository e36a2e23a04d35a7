"""Whose turn it is among the runs of a sweep, by what Slurm's queue shows (pure).

The runs of a sweep compete for the same nodes, and Slurm knows nothing of a run's minimum: it
starts one task of a run wherever a node is free. Two rules keep nodes from being held in vain, and
from being idle while a run could use them:

- A run below its minimum gives its nodes back at once when it waits in vain (`waits_in_vain`): what
  it lacks is held by runs of the sweep that train, or an earlier run can begin with its nodes.
- A run that trains, and one that ends, lets others start that stay away from the queue, as soon as
  there are idle nodes for their minimum (`let_start`).

The runs have an order, that of the sweep. A run gives way to an earlier one only, so two runs do
not take each other's nodes in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from hpc_elastic.slurm import nodelist
from hpc_elastic.slurm.reasons import remedy
from hpc_elastic.slurm.states import Phase, TaskState

AWAY_S = 12.0
"""A task whose start lies further ahead stays away; one that requeues itself is back sooner."""

_IDLE = "idle"
_LOST = {
    *("down", "drained", "draining", "drng", "drain", "fail", "failing", "error", "future"),
    *("inval", "maint", "unknown", "reboot", "perfctrs"),
}
"""States of nodes that will not come to a job that waits; any state with a mark ``*`` as well."""


@dataclass(frozen=True)
class QueuedRun:
    """One run of a sweep, as the queue shows it.

    Attributes:
        name: What to call it.
        min_nodes: Its minimum.
        tasks: Its tasks that Slurm lists, in the order of their slots; a gang's job is one of them.
        num_gang: How many nodes its gang has; 0: it has none.
        has_started: Whether a task of it has ever run. Before that, a start that lies ahead was
            asked for by the user.
        avoids: Nodes on which no task of it starts.
        lost: Tasks whose attempt was lost, and which one: Slurm may call it running for minutes.
            Its node may come to the run again, unless it does not answer.
    """

    name: str
    min_nodes: int
    tasks: Mapping[str, TaskState]
    num_gang: int = 0
    has_started: bool = True
    avoids: frozenset[str] = frozenset()
    lost: Mapping[str, int] = field(default_factory=dict)

    @property
    def nodes(self) -> list[str]:
        """The nodes that it has."""
        return [
            node
            for name, state in self.tasks.items()
            if state.phase is Phase.RUNNING and not self._is_lost(name, state)
            for node in nodelist.expand(state.node)
        ]

    def _is_lost(self, task: str, state: TaskState) -> bool:
        return task in self.lost and (state.restarts or 0) <= self.lost[task]

    @property
    def lacks(self) -> int:
        """How many nodes it lacks to its minimum."""
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
        """How many nodes its tasks wait for that may start as soon as a node is free.

        Of a run with a gang, only that counts: its other tasks may not start before the gang. Tasks
        that a user holds, or that wait for something else that no free node brings, do not count.
        """
        away = self.away
        tasks = [n for n, s in self.tasks.items() if _waits_for_a_node(s) and n not in away]
        return sum(self.size(n) for n in tasks if not self.num_gang or "_" not in n)

    @property
    def is_limited(self) -> bool:
        """Whether its tasks wait for a limit of the user's or the array's, not for free nodes."""
        waiting = (s for s in self.tasks.values() if s.phase is Phase.PENDING)
        return any("Limit" in state.reason for state in waiting)

    def size(self, task: str) -> int:
        """Return how many nodes one of its tasks has: one, or the gang's."""
        return 1 if "_" in task else self.num_gang


def _waits_for_a_node(state: TaskState) -> bool:
    waits = state.phase is Phase.PENDING and remedy(state.reason) is None
    return waits or state.phase is Phase.LEAVING


@dataclass(frozen=True)
class Nodes:
    """The nodes that a run may get.

    Attributes:
        states: The state of each, in sinfo's words.
        are_whole: Whether a task gets whole nodes: then a node that a task has is not for others.
    """

    states: Mapping[str, str]
    are_whole: bool

    def num_idle(self, run: QueuedRun) -> int:
        """Return how many are idle on which a run's tasks may start."""
        if run.is_limited:
            return 0
        idle = (name for name, state in self.states.items() if state == _IDLE)
        return sum(name not in run.avoids for name in idle)

    def num_coming(self, run: QueuedRun, held: Set[str]) -> int:
        """Return how many may come to a run that waits, beside those that the sweep holds."""
        if run.is_limited:
            return 0
        here = (name for name, state in self.states.items() if _may_come(state))
        mine = (name for name in here if name not in run.avoids)
        return sum(not self.are_whole or name not in held for name in mine)


def _may_come(state: str) -> bool:
    return "*" not in state and state.rstrip("~#%+@!^-$") not in _LOST


def waits_in_vain(runs: Sequence[QueuedRun], own: int, nodes: Nodes) -> str | None:
    """Return why a run waits in vain for its minimum; None if it may yet get it.

    Args:
        runs: The runs of the sweep in their order.
        own: The place of the run that asks.
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


def _give_way(runs: Sequence[QueuedRun], short: Sequence[int], nodes: Nodes) -> dict[int, int]:
    """Return which of the runs that hold too few nodes give way, and to which earlier one each.

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
    nodes: Nodes,
    *,
    ends: bool = False,
    lost: Set[str] = frozenset(),
) -> list[str]:
    """Return the tasks that stay away and are to start, for there are nodes for them.

    The minimum of each run in turn; then the further nodes of the run that asks.

    Args:
        runs: The runs of the sweep in their order.
        own: The place of the run that asks: it trains, or it ends.
        nodes: The nodes that they may get.
        ends: Whether it ends, so that its nodes are free soon.
        lost: Its tasks that were lost: they are brought back by other rules.
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
        started += _as_many(run, missing)
        taken += min(free, run.lacks)
    if not ends and me.lacks == 0:
        away = [task for task in me.away if task not in lost]
        started += away[: max(0, nodes.num_idle(me) - taken)]
    return started


def _as_many(run: QueuedRun, num_nodes: int) -> list[str]:
    """Return the first tasks of a run that stay away, for so many nodes."""
    chosen: list[str] = []
    for task in run.away:
        if num_nodes <= 0:
            break
        chosen.append(task)
        num_nodes -= run.size(task)
    return chosen
