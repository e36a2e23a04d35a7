#!/usr/bin/env python3
"""Do forecasts of starts keep their word on logs of real machines, in virtual time?

python benchmarks/forecasts.py --logs hpc2n.swf:240 --idle holes.npz
"""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from evidence.result import Column, Figure, Result, Table, Target
from evidence.show import about, options, present

from hpc_elastic.site.forecast import Claim, RunTimes, StartTimes, play_queue, sample_starts
from hpc_elastic.slurm.parsing import JobRun, QueuedJob

DAY_S, NEAR_S, LEAST, MOST, NUM_FREE = 86_400.0, 60.0, 75.0, 85.0, 256
COLUMNS = "|forecasts|within, %|wait, min|width, min|error of the middle, min|of Slurm's plan, min|"
COLUMNS += "right within a minute, %|Slurm's plan right, %"


class Job(NamedTuple):
    at: float
    nodes: int
    limit_s: float
    runs_s: float
    user: str


def read(path: Path) -> list[Job]:
    """Return the jobs of a log in the Standard Workload Format."""
    rows = np.loadtxt(path, comments=";", usecols=(1, 4, 8, 3, 11), ndmin=2)
    rows[:, 3] = rows[:, 2:4].min(1)
    found = sorted(rows[(rows[:, 1:4] > 0).all(1)].tolist())
    return [Job(at, int(n), limit_s, runs_s, str(user)) for at, n, limit_s, runs_s, user in found]


def read_idle(path: Path) -> list[Job]:
    """Return what nodes did between idle spans; all jobs ask for 48 hours."""
    holes = np.load(path, allow_pickle=False)
    order = np.lexsort((holes["start_s"], holes["node"]))
    node, start, length = (holes[name][order] for name in ("node", "start_s", "length_s"))
    spans = np.stack([(start + length)[:-1], start[1:]], 1)[node[1:] == node[:-1]]
    spans, nodes = np.unique(spans, axis=0, return_counts=True)
    found = zip(spans.tolist(), nodes.tolist(), strict=True)
    return [Job(begin, n, 2 * DAY_S, end - begin, "") for (begin, end), n in found]


def forecast(
    jobs: Sequence[Job], begins: Sequence[float], now: float, i: int | None, n: int
) -> tuple[float, ...]:
    """Return the wait of a job on n nodes, by the limits, and its quantiles.

    Without one, it is the time until n nodes are given up.
    """
    listed, running, waiting = list[JobRun](), list[Claim](), list[Claim]()
    seen = [k for k, j in enumerate(jobs) if j.at <= now < begins[k] + j.runs_s + DAY_S]
    used_s = {k: min(jobs[k].runs_s, max(0.0, now - begins[k])) for k in seen}
    live = [k for k in seen if used_s[k] < jobs[k].runs_s]
    for k in seen:
        job, end = jobs[k], begins[k] + jobs[k].runs_s
        listed.append(
            JobRun(str(k), job.user, "", used_s[k], job.limit_s, end if end <= now else None)
        )
    runs = RunTimes(listed, "log", now)
    for k in live:
        survival = runs.survival_of(QueuedJob("", limit_s=jobs[k].limit_s, job=str(k)))
        claim = Claim(jobs[k].nodes, jobs[k].limit_s, survival)
        if begins[k] <= now:
            running.append(replace(claim, began_at=begins[k]))
        elif i is not None and k <= i:
            waiting.append(claim)
    if i is None:
        waiting, n = [Claim(n, 1.0)], sum(claim.nodes for claim in running)
    claims = [*running, *waiting]
    own, drawn = len(claims) - 1, sample_starts(n, claims, [len(claims) - 1], now)
    planned = play_queue(n, claims, [claim.limit_s for claim in claims], now, own)[own]
    real = [*(jobs[k].runs_s for k in live if begins[k] <= now), 1.0]
    begin = play_queue(n, claims, real, now, own)[own] if i is None else begins[i]
    times = StartTimes.of(starts[0] for starts in drawn)
    return tuple(at - now for at in (begin, planned, times.p10, times.p50, times.p90))


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
    parser.add_argument("--number", type=int, default=200, help="forecasts of each log")
    given, rng = parser.parse_args(), random.Random(1)
    found: dict[str, list[tuple[float, ...]]] = {}
    for path, _, nodes in (log.rpartition(":") for log in given.logs):
        jobs = read(Path(path))
        last = len(jobs) - 1
        claims = [Claim(int(j.nodes), j.limit_s, not_before=j.at) for j in jobs]
        begins = play_queue(int(nodes), claims, [j.runs_s for j in jobs], jobs[0].at, last)
        late = [i for i in range(last // 10, last) if begins[i] > jobs[i].at + NEAR_S]
        chosen = rng.sample(late, min(len(late), given.number))
        of_log = (forecast(jobs, begins, jobs[i].at + 1, i, int(nodes)) for i in chosen)
        found[f"{Path(path).stem}: jobs that wait"] = [*of_log]
    if given.idle:
        jobs, begins = read_idle(given.idle), [job.at for job in read_idle(given.idle)]
        times = (rng.uniform(2, 13) * DAY_S for _ in range(given.number))
        name = f"idle map: {NUM_FREE} nodes are given up"
        found[name] = [forecast(jobs, begins, now, None, NUM_FREE) for now in times]
    found |= {} if given.hour is None else read_hour(given.hour)
    rows, met = list[tuple[str | Figure, ...]](), list[Target]()
    for name, seen in found.items():
        errors = [(abs(p50 - wait), abs(plan - wait)) for wait, plan, _, p50, _ in seen]
        figures = [median(wait for wait, *_ in seen) / 60]
        figures += [median(p90 - p10 for *_, p10, _, p90 in seen) / 60]
        figures += [median(each) / 60 for each in zip(*errors, strict=True)]
        figures += [100 * fmean(e <= NEAR_S for e in each) for each in zip(*errors, strict=True)]
        within = [p10 - NEAR_S <= wait <= p90 + NEAR_S for wait, _, p10, _, p90 in seen]
        share = 100 * fmean(within)
        rows.append((name, *map(Figure, (len(seen), share, *figures))))
        met.append(Target(f"{name}: within the forecast", LEAST, share, "%", True))
        met.append(Target(f"{name}: the same", MOST, share, "%"))
    columns = tuple(Column(name, ".0f") for name in COLUMNS.split("|"))
    table = Table("forecasts beside Slurm's plan; medians", columns, tuple(rows))
    present(Result(about("Forecasts of starts, in virtual time"), (table,), tuple(met)), given)


if __name__ == "__main__":
    main()
