"""The other jobs of the cluster: of all shapes, always the same, one after the other (pure)."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

_SHAPES = ((1, 30), (2, 25), (4, 20), (8, 15), (16, 5))
"""Number of nodes, and its share of the jobs in per cent."""
_LIMITS_MIN = {1: 20, 2: 20, 3: 18, 5: 16, 8: 12, 12: 9, 20: 5}
"""Time limit, and its share of the jobs in per cent."""
_QUEUED_S = 1200.0
"""The whole cluster's work of so long is in the queue from the begin on."""
_LEAST_USED = 0.3
"""A job uses at least this part of its time limit."""


@dataclass(frozen=True)
class OtherJob:
    """One job; an hour of a real cluster is a minute here."""

    submitted_s: float
    nodes: int
    limit_min: int
    runs_s: float


def other_jobs(num_nodes: int, load: float, length_s: float, seed: int) -> Iterator[OtherJob]:
    """Yield jobs that ask for a share of the nodes' time: ``load``."""
    drawn, at, asked = random.Random(seed), 0.0, 0.0
    sizes = [min(nodes, num_nodes) for nodes, _ in _SHAPES]
    weights = [weight for _, weight in _SHAPES]
    while True:
        (nodes,) = drawn.choices(sizes, weights)
        (limit_min,) = drawn.choices([*_LIMITS_MIN], [*_LIMITS_MIN.values()])
        runs_s = round(60 * limit_min * drawn.uniform(_LEAST_USED, 1.0), 1)
        at = max(0.0, asked / (num_nodes * load) - _QUEUED_S)
        if at >= length_s:
            return
        yield OtherJob(round(at, 1), nodes, limit_min, runs_s)
        asked += nodes * runs_s
