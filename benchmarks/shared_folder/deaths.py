"""Deaths, and a node that joins: how long until the next step, on a local disk and as by NFS.

What is done, and what counts as the next step, is that of `benchmarks/recovery.py`.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evidence.result import Cell, Column, Table, Target, figure
from recovery.faults import (
    Stage,
    kill_followers_node,
    kill_leaders_agent,
    kill_leaders_node,
    let_join,
    occupy_newcomer,
    outcome,
    trained,
)  # fmt: skip
from recovery.trail import Fault

from shared_folder.place import LOCAL, NFS, Place, training

JOIN = "a node joins"
PAUSE_MORE_S, FOLLOWER_S, LEADER_S = 1.0, 1.0, 5.0
EVERY_STEPS = 50


CASES: dict[str, tuple[Callable[[Stage], Fault], float | None]] = {
    "a follower's node is killed": (kill_followers_node, FOLLOWER_S),
    "the leader's agent is killed": (kill_leaders_agent, LEADER_S),
    "the leader's node is killed": (kill_leaders_node, LEADER_S),
    JOIN: (let_join, None),
}
"""What is done, and the most seconds until the next step."""


@dataclass(frozen=True)
class Measurement:
    """One fault, and what came of it: ``recovered``, or else; the pause is from the last step."""

    case: str
    place: str
    outcome: str
    step_s: float = 0.0
    pause_s: float = 0.0


def measure(case: str, place: Place, train_s: float) -> Measurement:
    joins = case == JOIN
    if joins:
        occupy_newcomer(place.sandbox)
    with training(place, every_steps=EVERY_STEPS) as run:
        group = trained(run.local, 3 if joins else 4, train_s)
        if not group:
            return Measurement(case, place.name, "no start")
        fault = CASES[case][0](Stage(place.sandbox, run, run.local, group))
        found, recovery = outcome(place.sandbox, run, run.local, fault)
    if recovery is None:
        return Measurement(case, place.name, found)
    return Measurement(case, place.name, found, recovery.total_s, recovery.pause_s)


def table(measured: Sequence[Measurement]) -> Table:
    columns = [Column("")]
    for place in (LOCAL, NFS):
        columns += [Column(f"{place}: next step", ".2f"), Column(f"{place}: pause", ".2f")]
    rows = []
    for case in dict.fromkeys(m.case for m in measured):
        row: list[Cell] = [case]
        for place in (LOCAL, NFS):
            group = _of(measured, case, place)
            good = [m for m in group if m.outcome == "recovered"]
            bad = ", ".join(m.outcome for m in group if m not in good)
            row += [bad or figure([m.step_s for m in good]), figure([m.pause_s for m in good])]
        rows.append(tuple(row))
    caption = "from the fault to the next training step, and from the last step before it; seconds"
    return Table(caption, tuple(columns), tuple(rows))


def targets(measured: Sequence[Measurement]) -> list[Target]:
    """Hold NFS against the aims; one that did not recover misses them."""
    return [_target(measured, case) for case in CASES if _of(measured, case, NFS)]


def _target(measured: Sequence[Measurement], case: str) -> Target:
    bound = CASES[case][1]
    nfs, local = (_of(measured, case, place) for place in (NFS, LOCAL))
    what = f"{case}: next step"
    if bound is None:
        what, bound = f"{case}: pause, more than on the local disk", PAUSE_MORE_S
    lost = [m for m in (*nfs, *local) if m.outcome != "recovered"]
    if lost:
        return Target(what, bound, None, "s", why=f"{len(lost)} did not recover", failed=True)
    if case != JOIN:
        return Target(what, bound, statistics.median(m.step_s for m in nfs), "s")
    pauses = (statistics.median(m.pause_s for m in group) for group in (nfs, local))
    return Target(what, bound, next(pauses) - next(pauses), "s")


def _of(measured: Sequence[Measurement], case: str, place: str) -> list[Measurement]:
    return [m for m in measured if (m.case, m.place) == (case, place)]
