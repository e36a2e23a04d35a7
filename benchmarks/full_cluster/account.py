"""From what was seen in a replay to figures (pure)."""

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise

from full_cluster.replay import Replay
from full_cluster.work import STEP_S

LONG_S = 300.0
"""Idle spans that are to be used."""


def took_s(seen: Replay) -> float | None:
    """Return the seconds from the submission to the end; None if it did not end."""
    return None if seen.complete_s is None else seen.complete_s - seen.submitted_s


def used_node_s(seen: Replay) -> float:
    return sum(a[2] * (b[0] - a[0]) for a, b in pairwise(seen.occupied))


def trained_share(seen: Replay) -> float:
    """Return the part of these in which it has trained."""
    done = seen.trail[-1][2] if seen.trail else 0.0
    used = used_node_s(seen)
    return done / used if used else 0.0


def lost_at_slot_ends(seen: Replay) -> float:
    """Return the part of the held node-seconds that ends of slots before the training's end cost.

    These are the time between the last step of a node and the end of its slot, and the pause of
    those that stay.
    """
    end_s = math.inf if seen.complete_s is None else seen.complete_s
    lost = sum(
        max(0.0, end - (begin if last is None else last))
        for _, begin, last, end in seen.slots
        if end < end_s
    )
    without = [at for at, _, held in seen.occupied if not held]
    lost += sum(
        max(0.0, b[0] - a[0] - STEP_S) * b[1]
        for a, b in pairwise(seen.trail)
        if b[1] < a[1] and not any(a[0] < at < b[0] for at in without)  # then none has stayed
    )
    used = used_node_s(seen)
    return lost / used if used else 0.0


def soonest_s(nobody: Replay, num_nodes: int, work_node_s: float) -> float | None:
    """Return when a training would be done that has each node that nobody else has, for nothing.

    It delays no other job. None if there were not enough of them.
    """
    had = 0.0
    for (at, others, _), (until, _, _) in pairwise(nobody.occupied):
        had += (num_nodes - others) * max(0.0, until - max(at, nobody.submitted_s))
        if had >= work_node_s:
            return until - nobody.submitted_s
    return None


def mean_wait_s(seen: Replay, length_s: float, submitted: Sequence[float]) -> float:
    """Return the mean wait of the other jobs."""
    return statistics.fmean(_waits_s(seen, length_s, submitted))


def late_wait_s(seen: Replay, length_s: float, submitted: Sequence[float]) -> float:
    """Return the wait of the other jobs that 95 % of them do not exceed."""
    waits = sorted(_waits_s(seen, length_s, submitted))
    return waits[math.ceil(0.95 * len(waits)) - 1]


def _waits_s(seen: Replay, length_s: float, submitted: Sequence[float]) -> list[float]:
    """Return the waits; a job that has not started has waited until the end."""
    return [
        length_s - at if wait is None else wait
        for at, wait in zip(submitted, seen.waits, strict=True)
    ]


def idle_spans(seen: Replay) -> Iterator[tuple[str, float, float]]:
    """Yield node, begin and end of spans of `LONG_S` without another job, while it was to train."""
    end_s = seen.complete_s or (seen.occupied[-1][0] if seen.occupied else 0.0)
    for node, changes in seen.holders.items():
        begin: float | None = None
        for at, holder in [*changes, (end_s, "other")]:
            if holder == "other":
                if begin is not None:
                    first, last = max(begin, seen.submitted_s), min(at, end_s)
                    if last - first >= LONG_S:
                        yield node, first, last
                begin = None
            elif begin is None:
                begin = at


def used_share(seen: Replay) -> float | None:
    """Return the part of the long idle spans that the training had; None if there were none."""
    total = had = 0.0
    for node, begin, end in idle_spans(seen):
        total += end - begin
        changes = [*seen.holders[node], (end, "")]
        for (at, holder), (until, _) in pairwise(changes):
            if holder == "training":
                had += max(0.0, min(until, end) - max(at, begin))
    return had / total if total else None
