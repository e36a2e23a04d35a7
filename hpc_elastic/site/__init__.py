"""The cluster as a run sees it: which nodes come when, and which of the user's runs gets them.

- `nodes`     the state of a node: idle, planned, busy, drained or lost
- `gaps`      when nodes are free: forecast, holes between other jobs, the next gap of a run
- `limits`    time limits of waiting tasks, fitted to the holes
- `siblings`  the order of a user's runs at the nodes
- `value`     what a further node is worth to a run, and to the runs of a sweep
- `harvest`   how a site lets tasks start in gaps (``launcher.harvest``)
- `policy`    the port of a run's leader: what the queue lets the run do

Other packages import the names below from here. `hpc_elastic.slurm` calls Slurm's commands, and has
no rule about them.
"""

from hpc_elastic.site.gaps import (
    FAR_S,
    NO_RESERVE_S,
    SAME_S,
    ExpectedStart,
    Outlook,
    Shape,
    TaskTerms,
    expected_start,
    next_gap,
    outlook,
    shapes,
    soonest,
    time_limit_of,
    without_excluded,
)
from hpc_elastic.site.harvest import choose_terms
from hpc_elastic.site.limits import TimeSlots, time_slots_of
from hpc_elastic.site.nodes import NodeState
from hpc_elastic.site.policy import QueueAdvice, QueuePolicy, QueueQuestion
from hpc_elastic.site.value import StepTimeModel, most_useful_nodes

__all__ = [
    "FAR_S",
    "NO_RESERVE_S",
    "SAME_S",
    "ExpectedStart",
    "NodeState",
    "Outlook",
    "QueueAdvice",
    "QueuePolicy",
    "QueueQuestion",
    "Shape",
    "StepTimeModel",
    "TaskTerms",
    "TimeSlots",
    "choose_terms",
    "expected_start",
    "most_useful_nodes",
    "next_gap",
    "outlook",
    "shapes",
    "soonest",
    "time_limit_of",
    "time_slots_of",
    "without_excluded",
]
