#!/usr/bin/env python3
"""Do forecasts of starts keep their word on logs of real machines, in virtual time?

python benchmarks/forecasts.py --logs hpc2n.swf:240 --idle holes.npz --hour samples.json
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import numpy as np
from evidence.result import Column, Figure, Result, Table, Target
from evidence.show import about, options, present

from hpc_elastic.site.queue_model import Demand, RunTimes, StartTimes, play_queue, sample_starts
from hpc_elastic.slurm.parsing import JobRun, QueuedJob

DAY_S, NEAR_S, LEAST, MOST, NUM_FREE = 86_400.0, 60.0, 75.0, 85.0, 256
COLUMNS = "|forecasts|within, %|wait, min|width, min|error of the middle, min|of Slurm's plan, min|"
COLUMNS += "right within two passes, %|Slurm's plan right, %"
Job = tuple[float, int, float, float, str]
"""When it was submitted, its nodes, its time limit, how long it runs, and its user."""


def read(path: Path) -> list[Job]:
    """Return the jobs of a log in the Standard Workload Format."""
    rows = np.loadtxt(path, comments=";", usecols=(1, 4, 8, 3, 11), ndmin=2)
    rows[:, 3] = rows[:, 2:4].min(1)
    found = sorted(rows[(rows[:, 1:4] > 0).all(1)].tolist())
    return [(at, int(n), limit_s, runs_s, str(user)) for at, n, limit_s, runs_s, user in found]


def read_idle(path: Path) -> list[Job]:
    """Return what nodes did between idle spans; all jobs ask for 48 hours."""
    holes = np.load(path, allow_pickle=False)
    order = np.lexsort((holes["start_s"], holes["node"]))
    node, start, length = (holes[name][order] for name in ("node", "start_s", "length_s"))
    spans = np.stack([(start + length)[:-1], start[1:]], 1)[node[1:] == node[:-1]]
    spans, nodes = np.unique(spans, axis=0, return_counts=True)
    found = zip(spans.tolist(), nodes.tolist(), strict=True)
    return [(begin, n, 2 * DAY_S, end - begin, "") for (begin, end), n in found]


def forecast(
    jobs: Sequence[Job], begins: Sequence[float], now: float, own: int | None, nodes: int
) -> tuple[float, ...]:
    """Return the wait of a job, by the limits, and its quantiles; or until nodes are given up."""
    listed, running, waiting, real = list[JobRun](), list[int](), list[int](), list[float]()
    for i, (at, _, limit_s, runs_s, user) in enumerate(jobs):
        if not at <= now < begins[i] + runs_s + DAY_S:
            continue
        has_ended, has_begun = begins[i] + runs_s <= now, begins[i] <= now
        used_s, end = min(runs_s, max(0.0, now - begins[i])), begins[i] + runs_s
        listed.append(JobRun(str(i), user, "", used_s, limit_s, end if has_ended else None))
        if not has_ended and (has_begun or (own is not None and i <= own)):
            (running if has_begun else waiting).append(i)
            real += [runs_s] if has_begun else []
    runs, demands = RunTimes(listed, "log", now), list[Demand]()
    for i in (*running, *waiting):
        survival = runs.survival_of(QueuedJob("", limit_s=jobs[i][2], job=str(i)))
        demands.append(Demand(*jobs[i][1:3], survival, begins[i] if begins[i] <= now else None))
    if own is None:
        nodes, demands = sum(c.nodes for c in demands), [*demands, Demand(nodes, 1.0)]
    last = len(demands) - 1
    plan = play_queue(nodes, demands, [demand.limit_s for demand in demands], now, last)[last]
    begin = begins[own] if own else play_queue(nodes, demands, [*real, 1.0], now, last)[last]
    drawn = StartTimes.of(starts[0] for starts in sample_starts(nodes, demands, [last], now))
    return tuple(at - now for at in (begin, plan, drawn.p10, drawn.p50, drawn.p90))


def read_hour(path: Path) -> dict[str, list[tuple[float, ...]]]:
    """Return what was forecast on a full cluster, from what ``full_cluster.py --samples`` wrote."""
    return {
        f"Slurm, load {replay['load']:.0%}: the next node of a run": [
            tuple(at - asked for at in (min(later), *expected))
            for asked, *expected in replay["forecasts"]
            if (later := [at for at in replay["starts"] if at > asked])
        ]
        for replay in json.loads(path.read_text())
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--logs", nargs="*", default=[], metavar="FILE:NODES")
    parser.add_argument("--idle", type=Path, help="log of idle spans, as of harvest.py")
    parser.add_argument("--hour", type=Path, help="samples of full_cluster.py")
    parser.add_argument("--number", type=int, default=100, help="forecasts of each log")
    given, rng = parser.parse_args(), random.Random(1)
    found = {} if given.hour is None else read_hour(given.hour)
    for path, _, nodes in (log.rpartition(":") for log in given.logs):
        jobs = read(Path(path))
        demands, runs_s = (
            [Demand(*job[1:3], not_before=job[0]) for job in jobs],
            [j[3] for j in jobs],
        )
        begins = play_queue(int(nodes), demands, runs_s, jobs[0][0], len(jobs) - 1)
        late = [i for i in range(len(jobs) // 10, len(jobs)) if begins[i] > jobs[i][0] + NEAR_S]
        chosen = rng.sample(late, min(len(late), given.number))
        of_log = (forecast(jobs, begins, jobs[i][0] + 1, i, int(nodes)) for i in chosen)
        found[f"{Path(path).stem}: jobs that wait"] = [*of_log]
    if given.idle:
        jobs, times = read_idle(given.idle), [rng.uniform(2, 13) for _ in range(given.number)]
        begins, name = [job[0] for job in jobs], f"idle map: {NUM_FREE} nodes are given up"
        found[name] = [forecast(jobs, begins, day * DAY_S, None, NUM_FREE) for day in times]
    rows, met = list[tuple[str | Figure, ...]](), list[Target]()
    for name, seen in found.items():
        near_s = 20.0 if name.startswith("Slurm") else NEAR_S  # two passes
        errors = [(abs(p50 - wait), abs(plan - wait)) for wait, plan, _, p50, _ in seen]
        figures = [median(wait for wait, *_ in seen) / 60]
        figures += [median(p90 - p10 for *_, p10, _, p90 in seen) / 60]
        figures += [median(each) / 60 for each in zip(*errors, strict=True)]
        figures += [100 * fmean(e <= near_s for e in each) for each in zip(*errors, strict=True)]
        within = [p10 - near_s <= wait <= p90 + near_s for wait, _, p10, _, p90 in seen]
        share = 100 * fmean(within)
        rows.append((name, *map(Figure, (len(seen), share, *figures))))
        met.append(Target(f"{name}: within the forecast", LEAST, share, "%", True))
        met.append(Target(f"{name}: the same", MOST, share, "%"))
    columns = tuple(Column(name, ".0f") for name in COLUMNS.split("|"))
    table = Table("forecasts beside Slurm's plan; medians", columns, tuple(rows))
    present(Result(about("Forecasts of starts, in virtual time"), (table,), tuple(met)), given)


if __name__ == "__main__":
    main()
