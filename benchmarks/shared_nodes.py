#!/usr/bin/env python3
"""How well do the runs of one user share a cluster that is too small for all of them?

    python benchmarks/shared_nodes.py --seeds 3 --hours 3

METHODS.md says what is measured. No torch, no Slurm, no network is needed.
"""

import argparse
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from evidence.result import Column, Figure, Result, Table, Target, figure
from evidence.show import about, options, present

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from hpc_elastic.site.value import NodeDemand, StepTimeModel, share_nodes
from simulation.sweep import Figures, Scaling, SweepSimulation

NUM_RUNS, LARGEST = 8, 8
RESTART_S = 15.0
POOL = range(4, 17)
"""Nodes that other users leave to the eight runs."""
POOL_CHANGES_S = 300.0
SWEEPS = {
    "4 x 2:3": [(2, 3)] * 4,
    "4 x 3": [(3, 3)] * 4,
    "4 x 3:4": [(3, 4)] * 4,
    "12 x 3": [(3, 3)] * 12,
    "3, 2, 1:2, 4, 2:4": [(3, 3), (2, 2), (1, 2), (4, 4), (2, 4)],
}
"""Nodes of the runs, on four nodes."""
IN_SWEEP, ALONE, MEAN_SHORTER, WITHIN = 2.0, 5.0, 25.0, 10.0
MEASURED = 1, 3, 8, 16
NOISE = 0.01

ABOUT = about("Several runs on too few nodes")


def in_order(nodes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the tasks as (run, slot), breadth first: all minima, then further slots in turn."""
    first = [(run, slot) for run, (low, _) in enumerate(nodes) for slot in range(low)]
    further = [(slot, run) for run, (low, high) in enumerate(nodes) for slot in range(low, high)]
    return first + [(run, slot) for slot, run in sorted(further)]


def run_sweep(nodes: list[tuple[int, int]], seed: int, *, as_sweep: bool, turns: bool) -> Figures:
    """Run ten minutes of work for each run on four nodes."""
    by_run = [(run, slot) for run, (_, high) in enumerate(nodes) for slot in range(high)]
    return SweepSimulation(
        nodes, 4, in_order(nodes) if as_sweep else by_run, seed=seed, work_s=600.0,
        takes_turns=turns, discovery_s=0.0 if as_sweep else 60.0,
        submitted=None if as_sweep else [37.0 * run for run in range(len(nodes))],
    ).run(40_000.0)  # fmt: skip


Runs = list[tuple[StepTimeModel, float]]
"""Step times of each run, and the seconds that it takes on one node."""


def eight_runs(seed: int, hours: float) -> tuple[Runs, list[tuple[float, int]]]:
    """Return eight runs that take these hours on one node in the median, and the changing pool."""
    rng = random.Random(seed)
    runs: Runs = []
    for _ in range(NUM_RUNS):
        alone_s = rng.uniform(2.0, 6.0)
        fixed_s, per_node_s = alone_s * rng.uniform(0.005, 0.05), alone_s * rng.uniform(0.0, 0.002)
        work_s = 3600.0 * hours * rng.lognormvariate(0.0, 0.5)
        runs.append((StepTimeModel(fixed_s, alone_s, per_node_s), work_s))
    num = (POOL[0] + POOL[-1]) // 2
    pool = [(0.0, num)]
    for change in range(1, round(40 * 3600 * hours / POOL_CHANGES_S)):
        num = max(POOL[0], min(POOL[-1], num + rng.choice([-4, -2, 2, 4])))
        pool.append((POOL_CHANGES_S * change, num))
    return runs, pool


def run_eight(seed: int, hours: float, *, soonest: bool) -> Figures:
    """Run them on nodes that come and go."""
    runs, pool = eight_runs(seed, hours)
    nodes = [(1, LARGEST)] * NUM_RUNS
    scaling = Scaling(runs, pool, RESTART_S, soonest)
    simulation = SweepSimulation(nodes, POOL[-1], in_order(nodes), seed=seed, scaling=scaling)
    return simulation.run(40 * 3600 * hours)


def ceiling_percent(seed: int, hours: float) -> float:
    """Return how much sooner they would end if all nodes moved to the best runs for nothing."""
    means = []
    for soonest in (False, True):
        runs, pool = eight_runs(seed, hours)
        left, ends, now = [work_s for _, work_s in runs], [0.0] * len(runs), 0.0
        while any(work_s > 0.0 for work_s in left):
            num = next(nodes for at, nodes in reversed(pool) if at <= now)
            going = [i for i, work_s in enumerate(left) if work_s > 0.0]
            for i, nodes in zip(going, _divide(runs, left, going, num, soonest), strict=True):
                model = runs[i][0]
                left[i] -= _TICK_S * model.step_s(1) / model.step_s(nodes) if nodes else 0.0
                ends[i] = now
            now += _TICK_S
        means.append(statistics.fmean(ends))
    return 100.0 * (1.0 - means[1] / means[0])


_TICK_S = 20.0


def _divide(
    runs: Runs, left: Sequence[float], going: Sequence[int], num: int, soonest: bool
) -> list[int]:
    """Return the nodes of each run that goes on: in turn, or where they help most."""
    if not soonest:
        return [min(LARGEST, num // len(going) + (k < num % len(going))) for k in range(len(going))]
    demands = [
        NodeDemand(
            0, 1, LARGEST, 1, {n: runs[i][0].step_s(n) for n in (1, 2, 4, 8)},
            max(1, round(left[i] / runs[i][0].step_s(1))),
        )
        for i in going
    ]  # fmt: skip
    return share_nodes(demands, num)


CURVES: dict[str, Callable[[int], float]] = {
    "ring": lambda n: 0.02 + 1.6 / n + 0.09 * (1 - 1 / n) + 0.0004 * (n - 1),
    "small model": lambda n: 0.05 + 0.1 / n + 0.003 * (n - 1),
    "hidden communication": lambda n: max(0.9 / n, 0.11 * (1 - 1 / n)) + 0.03 + 0.1 / n,
    "slowest node": lambda n: 0.01 + 0.8 / n + 0.012 * math.log(n),
}
"""Seconds of a step by number of nodes."""


def error_percent(curve: Callable[[int], float], seed: int) -> float:
    """Return the largest error of a predicted step time, at sizes that were not measured."""
    rng = random.Random(seed)
    model = StepTimeModel.fit({n: curve(n) * rng.gauss(1.0, NOISE) for n in MEASURED})
    assert model is not None
    unseen = [n for n in range(1, max(MEASURED)) if n not in MEASURED]
    return max(100.0 * abs(model.step_s(n) / curve(n) - 1.0) for n in unseen)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hours", type=float, default=3.0, help="of each of eight runs, on a node")
    present(result(parser.parse_args()), parser.parse_args())


def result(given: argparse.Namespace) -> Result:
    seeds = range(given.seeds)
    held, rows = {True: [0.0], False: [0.0]}, []
    for name, nodes in SWEEPS.items():
        row = [name]
        for as_sweep, turns in ((True, True), (False, True), (False, False)):
            shares = [
                100.0 * run_sweep(nodes, seed, as_sweep=as_sweep, turns=turns).share_in_vain
                for seed in seeds
            ]
            row.append(figure(shares))
            if turns:
                held[as_sweep].append(statistics.median(shares))
        rows.append(tuple(row))
    equal = [run_eight(seed, given.hours, soonest=False) for seed in seeds]
    soonest = [run_eight(seed, given.hours, soonest=True) for seed in seeds]
    sooner = [100.0 * (1.0 - b.mean_s / a.mean_s) for a, b in zip(equal, soonest, strict=True)]
    errors = {
        name: [error_percent(curve, seed) for seed in range(50)] for name, curve in CURVES.items()
    }
    of_runs = (
        Column("runs"), Column("one sweep, %", ".2f"), Column("independent, %", ".2f"),
        Column("each alone, %", ".1f"),
    )  # fmt: skip
    of_eight = (
        Column(""), Column("end in the mean, min", ".0f"), Column("the last ends, min", ".0f"),
        Column("starts of tasks", ".0f"), Column("without a step, %", ".2f"),
    )  # fmt: skip
    return Result(
        about=ABOUT,
        tables=(
            Table("Held node time without a step", of_runs, tuple(rows)),
            Table(
                "Eight runs on 4 to 16 nodes", of_eight,
                (_eight("equal", equal), _eight("soonest", soonest)),
            ),
            Table(
                "Largest error of a predicted step time", (Column("curve"), Column("%", ".1f")),
                tuple((name, figure(found)) for name, found in errors.items()),
            ),
        ),
        targets=(
            Target("held without a step, sweeps", IN_SWEEP, max(held[True]), "%"),
            Target("held without a step, independent runs", ALONE, max(held[False]), "%"),
            Target("eight runs end sooner in the mean", MEAN_SHORTER,
                   statistics.median(sooner), "%", more_is_better=True),
            Target("error of predicted step times", WITHIN,
                   max(max(found) for found in errors.values()), "%"),
        ),
        notes=(
            f"Eight runs, each seed: {_percents(sooner)} sooner. If all nodes moved at each moment "
            "to the runs that gain most, at once and without a restart, it would be "
            f"{_percents([ceiling_percent(seed, given.hours) for seed in seeds])}: no rule can do "
            "more. Nodes are not taken from runs that train: when that was tried, every two or "
            "ten minutes at most, the restarts cost more than was gained (4 to 9 % sooner).",
        ),
    )  # fmt: skip


def _percents(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.0f} %" for value in values)


def _eight(name: str, measured: Sequence[Figures]) -> tuple[str | Figure, ...]:
    return (
        name,
        figure([each.mean_s / 60.0 for each in measured]),
        figure([each.took_s / 60.0 for each in measured]),
        figure([float(each.starts) for each in measured]),
        figure([100.0 * each.share_in_vain for each in measured]),
    )


if __name__ == "__main__":
    main()
