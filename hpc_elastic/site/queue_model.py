"""When nodes are free for a run, as a distribution. Pure, and the same for the same input.

Users end most jobs long before their time limits, so a start is seldom where the limits put it:

- `RunTimes`: which part of its limit a job uses. It is the product-limit estimate (Kaplan, Meier):
  jobs that run count as having run at least so long, and each job counts only for the time in
  which its end would have been seen. The jobs of the same user with the same limit count most.
- `play_queue`: the queue from now on, with given run times. It is backfill as Slurm does it: each
  job, in order of priority, is started or planned by the limits of those before it.

`sample_starts` draws run times, given how long each job runs already, and plays the queue. It
contains no job that is submitted later, and no preemption.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import NormalDist

from hpc_elastic.slurm.parsing import JobRun, QueuedJob

NUM_DRAWS = 100
LEAST_ENDED = 5
"""With fewer jobs that have ended there is nothing to learn from."""
PRIOR = (0.01, 0.03, 0.08, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 1.0, 1.0)
"""Parts of their limits that jobs use where little is known: flat, as in logs of public clusters,
between jobs that fail at once and jobs that reach their limits."""
_POOL = (math.inf, 6.0, 3.0, 2.0, 1.0)
"""Weight of the jobs of the same user and limit, of the user, partition, cluster, and `PRIOR`."""
_MOST_SEEN = 500
_LIKE, _LIKE_ALL = 0.8, 0.6
"""`Survival.likeness` of the jobs of one user, and of those whose user is unknown."""
MOST_WAITING = 500
"""Waiting jobs of a pass, as of backfill (bf_max_job_test)."""
_MOST_PLANS = 8
"""Jobs of a pass that cannot start and are planned; what is behind these starts if it fits."""
PASS_S = 30.0
"""Seconds between two passes of backfill by default (bf_interval)."""
_COARSE = 0.05
_MANY = 100
"""Of more jobs, fewer draws are made."""
_NORMAL = NormalDist()
_NORMALS = tuple(_NORMAL.inv_cdf((i + 0.5) / NUM_DRAWS) for i in range(NUM_DRAWS))


@dataclass(frozen=True)
class Survival:
    """The part of jobs that runs ``longer`` than each of some ``shares`` of the time limit.

    ``likeness`` is how much those jobs are alike: the root of the correlation of their run times.
    """

    shares: Sequence[float]
    longer: Sequence[float]
    likeness: float = 0.0

    @classmethod
    def fit(cls, seen: Iterable[tuple[float, float, bool, float]]) -> Survival:
        """Return the estimate from jobs: seen from one share to another, ended there, weight."""
        changes = [
            change
            for first, last, ended, weight in seen
            for change in ((first, 2, weight), (last, 0 if ended else 1, weight))
        ]
        at_risk, shares, longer = 0.0, [0.0], [1.0]
        for share, kind, weight in sorted(changes):
            if kind == 0 and at_risk > 0.0:
                shares.append(share)
                longer.append(longer[-1] * max(0.0, 1.0 - weight / at_risk))
            at_risk += weight if kind == 2 else -weight
        return cls(shares, longer)

    def quantile(self, part: float, used: float) -> float:
        """Return the share at which this part has ended of the jobs that have used one."""
        left = self.longer[bisect_right(self.shares, used) - 1] * (1.0 - part)
        found = bisect_left(self.longer, -left, key=lambda longer: -longer)
        return max(used, self.shares[found] if found < len(self.shares) else 1.0)


class RunTimes:
    """How long jobs run, by a list of jobs that ``command`` has printed; ``now``: Unix seconds."""

    def __init__(self, listed: Sequence[JobRun], command: str, now: float) -> None:
        ends = [run.ended_at for run in listed if run.ended_at is not None]
        since, self.num_ended = min(ends, default=now), len(ends)
        self._users = {run.job: run.user for run in listed}
        self._listed = f"{self.num_ended} ended jobs ({command})"
        self._seen: dict[object, list[tuple[float, float, bool]]] = {}
        self._fitted: dict[object, Survival] = {}
        for run in listed:
            if run.limit_s and run.used_s:
                first_s = run.used_s - ((run.ended_at or now) - since)
                seen = (
                    max(0.0, first_s / run.limit_s) - 1e-9, min(1.0, run.used_s / run.limit_s),
                    run.ended_at is not None,
                )  # fmt: skip
                for key in self._keys(run.user, run.limit_s, run.partition):
                    self._seen.setdefault(key, []).append(seen)

    def describe_record(self, *, is_learned: bool) -> str:
        """Return in a few words what a forecast is made of."""
        how = "learned from" if is_learned else "by time limits: nothing is learned from"
        return f"{how} {self._listed}"

    @staticmethod
    def _keys(user: str, limit_s: float, partition: str) -> tuple[object, ...]:
        return (user, limit_s), (user,), partition, None

    def survival_of(self, job: QueuedJob) -> Survival | None:
        """Return the distribution for a job; None without a time limit."""
        if not job.limit_s:
            return None
        user = self._users.get(job.job, "")
        keys = self._keys(user, job.limit_s, ",".join(job.partitions))
        if keys not in self._fitted:
            groups = [self._seen.get(key, []) for key in keys]
            groups = [seen[:: 1 + len(seen) // _MOST_SEEN] for seen in groups]
            groups.append([(-1e-9, share, True) for share in PRIOR])
            fitted = Survival.fit(
                (*seen, min(1.0, most / max(1, sum(ended for *_, ended in group))))
                for group, most in zip(groups, _POOL, strict=True)
                for seen in group
            )
            self._fitted[keys] = replace(fitted, likeness=_LIKE if user else _LIKE_ALL)
        return self._fitted[keys]


# ---- the queue


@dataclass(frozen=True)
class Demand:
    """What a job or a reservation wants of some nodes, or has.

    It has them from ``began_at`` on, which may be ahead; else it waits, for a gap of ``least_s``,
    and is in the queue from ``not_before`` on. It ends by its ``survival``; None: at its limit.
    """

    nodes: int
    limit_s: float
    survival: Survival | None = None
    began_at: float | None = None
    least_s: float = math.inf
    not_before: float = -math.inf


def play_queue(
    num_nodes: int,
    demands: Sequence[Demand],
    runs_s: Sequence[float],
    now: float,
    until: int,
    *,
    pass_s: float = PASS_S,
    coarse: float = 0.0,
) -> list[float]:
    """Return when each demand begins, infinite if that is unknown, until a waiting one has begun.

    Those that wait are in the order of priority. ``runs_s`` is how long each one holds its nodes.
    Passes are ``pass_s`` apart, or ``coarse`` of the time from ``now`` on where that is more.
    """
    first = now
    begins = [math.inf if each.began_at is None else each.began_at for each in demands]
    later = sorted(
        (-each.not_before, -i) for i, each in enumerate(demands) if each.began_at is None
    )
    queue = list[int]()
    held = [(max(now, begins[i] + runs_s[i]), i) for i in range(len(demands)) if begins[i] < now]
    heapq.heapify(held)
    limits = sorted((begins[i] + demands[i].limit_s, i) for _, i in held)
    ends = {i: at for at, i in limits}
    ahead = [i for i in range(len(demands)) if now <= begins[i] < math.inf]
    free = num_nodes - sum(demands[i].nodes for _, i in held)

    def hold(i: int, at: float, limit_s: float) -> None:
        begins[i], ends[i] = at, at + limit_s
        heapq.heappush(held, (at + min(runs_s[i], limit_s), i))
        insort(limits, (ends[i], i))

    while begins[until] == math.inf:
        while held and held[0][0] <= now:
            _, i = heapq.heappop(held)
            free += demands[i].nodes
            del limits[bisect_left(limits, (ends[i], i))]
        while later and -later[-1][0] <= now:
            insort(queue, -later.pop()[1])
        for i in [i for i in ahead if begins[i] <= now]:
            ahead.remove(i)
            free -= demands[i].nodes
            hold(i, begins[i], demands[i].limit_s)
        passed = queue[:MOST_WAITING]
        if free > 0 and any(demands[i].nodes <= free for i in passed):
            profile = _Profile(now, free, [(at, demands[i].nodes) for at, i in limits])
            for i in ahead:
                profile.take_nodes(begins[i], demands[i].limit_s, demands[i].nodes)
            num_plans = 0
            for i in passed:
                demand = demands[i]
                least_s = min(demand.limit_s, demand.least_s)
                if profile.gap_now(demand.nodes) < least_s and num_plans >= _MOST_PLANS:
                    continue
                begin, gap_s = profile.first_gap(demand.nodes, least_s)
                if begin == now:
                    free -= demand.nodes
                    hold(i, now, min(demand.limit_s, gap_s))
                    if free <= 0:
                        break
                num_plans += begin > now
                profile.take_nodes(begin, min(demand.limit_s, gap_s), demand.nodes)
            queue = [i for i in queue if begins[i] == math.inf]
        events = [begins[i] for i in ahead]
        events += [*(end for end, _ in held[:1]), *(-begin for begin, _ in later[-1:])]
        if not events:
            break
        now = max(min(events), now + max(pass_s, coarse * (now - first)))
    return begins


class _Profile:
    """How many nodes are free from which time on, by time limits (given in order)."""

    def __init__(self, now: float, free: int, limits: Sequence[tuple[float, int]]) -> None:
        self._times = [now, *(max(at, now + 1.0) for at, _ in limits), math.inf]
        self._free = [*accumulate((nodes for _, nodes in limits), initial=free), 0]

    def take_nodes(self, begin: float, length_s: float, nodes: int) -> None:
        places = list[int]()
        for at in (begin, begin + length_s):
            place = bisect_left(self._times, at)
            if self._times[min(place, len(self._times) - 1)] != at:
                self._times.insert(place, at)
                self._free.insert(place, self._free[place - 1])
            places.append(place)
        for place in range(*places):
            self._free[place] -= nodes

    def gap_now(self, nodes: int) -> float:
        """Return for how long some nodes are free from now on."""
        return (
            next(at for at, free in zip(self._times, self._free, strict=True) if free < nodes)
            - self._times[0]
        )

    def first_gap(self, nodes: int, least_s: float) -> tuple[float, float]:
        """Return the begin and the length of the first gap of some nodes that is long enough."""
        begin = math.inf
        for at, free in zip(self._times, self._free, strict=True):
            if free >= nodes:
                if begin == math.inf:
                    begin = at
            elif at - begin >= least_s:
                return begin, at - begin
            else:
                begin = math.inf
        return math.inf, math.inf


# ---- draws


@dataclass(frozen=True)
class StartTimes:
    """Quantiles of a start, in Unix seconds: eight of ten are from ``p10`` to ``p90``."""

    p10: float
    p50: float
    p90: float

    @classmethod
    def of(cls, starts: Iterable[float]) -> StartTimes:
        """Return those of drawn starts."""
        ordered = sorted(starts)
        return cls(*(ordered[round(part * (len(ordered) - 1))] for part in (0.1, 0.5, 0.9)))


def sample_starts(
    num_nodes: int,
    demands: Sequence[Demand],
    own: Sequence[int],
    now: float,
    pass_s: float = PASS_S,
) -> list[list[float]]:
    """Return for each draw when the ``own`` demands begin, in order of time."""
    kinds = dict.fromkeys(id(demand.survival) for demand in demands)
    kin = {kind: _normals(-number - 1) for number, kind in enumerate(kinds)}
    found: list[list[float]] = []
    singles = [_normals(number) for number in range(len(demands))]
    for draw in range(0, NUM_DRAWS, 1 + min(4, len(demands) // _MANY)):
        runs_s = list[float]()
        for demand, single in zip(demands, singles, strict=True):
            share, used_s = 1.0, max(0.0, now - (demand.began_at or now))
            if demand.survival is not None:
                like, common = demand.survival.likeness, kin[id(demand.survival)][draw]
                z = like * common + math.sqrt(1.0 - like**2) * single[draw]
                share = demand.survival.quantile(_NORMAL.cdf(z), used_s / demand.limit_s)
            runs_s.append(share * demand.limit_s)
        begins = play_queue(num_nodes, demands, runs_s, now, own[-1], pass_s=pass_s, coarse=_COARSE)
        found.append(sorted(begins[i] for i in own))
    return found


def _normals(seed: int) -> list[float]:
    """Return a normal number for each draw: one from each of as many parts of equal weight."""
    drawn = [*_NORMALS]
    random.Random(seed).shuffle(drawn)
    return drawn
