"""Spans in which a node of a busy machine is idle: a log that is given, or one that is made (pure).

The log of 4,734 nodes over 15 days that the quantiles below come from was computed from the event
log of *BFTrainer* (arXiv 2106.12091). It is not part of this project; a made log has its lengths,
its group sizes and its number of groups an hour. In it, as in the real one, the length of a span
does not depend on how many nodes become idle at the same moment, and there are quiet hours and
others. What it lacks: days and nights, weeks, and what the jobs that take nodes are like.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

SEED = 27
HOURS = 358.0
GROUPS_PER_H = 41.0
"""Moments an hour in which nodes become idle."""
TAKEN_PER_H = 31.0
"""Moments an hour in which nodes are taken, from one group or several."""
SHORTEST_S = 50.0
LENGTHS = (
    (0, 50), (0.02, 71), (0.05, 81), (0.1, 91), (0.15, 112), (0.2, 132), (0.25, 162), (0.3, 193),
    (0.4, 294), (0.5, 475), (0.6, 688), (0.7, 1143), (0.8, 1759), (0.85, 2295), (0.9, 3269),
    (0.95, 4723), (0.98, 7197), (0.99, 9246), (0.995, 9671), (0.999, 12585), (1, 60000),
)  # fmt: skip
"""Quantiles of the length of a span in seconds."""
GROUPS = (
    (0, 1), (0.35, 1), (0.4, 2), (0.5, 4), (0.6, 6), (0.7, 10), (0.75, 16), (0.8, 20), (0.85, 32),
    (0.9, 50), (0.95, 108), (0.97, 156), (0.98, 256), (0.99, 512), (0.995, 979), (0.999, 1600),
    (1, 2780),
)  # fmt: skip
"""Quantiles of the number of nodes that become idle at one moment."""
TIDE, TIDE_H = 0.85, 3.0
"""Correlation of the sizes of two groups at the same time, as a root, and for how many hours."""
PIECES = 0.4
"""A group of n nodes is taken in 1 + 0.4 log(n) pieces in the mean, each at a moment of its own."""

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class Holes:
    """Idle spans of single nodes, in order of their starts; seconds from the begin of the log."""

    start_s: Seconds
    end_s: Seconds

    @property
    def duration_s(self) -> float:
        return float(self.end_s.max())

    def from_hour(self, hour: float, duration_s: float) -> Holes:
        """Return the spans in a time from an hour on, which begins at 0; the log is a circle."""
        begin, whole = 3600.0 * hour, self.duration_s
        starts = np.concatenate([self.start_s + turn * whole for turn in (0, 1)]) - begin
        ends = np.concatenate([self.end_s + turn * whole for turn in (0, 1)]) - begin
        inside = (ends > 0) & (starts < duration_s)
        return Holes(np.maximum(starts[inside], 0.0), ends[inside])

    def idle_at(self, times: Seconds) -> NDArray[np.int64]:
        begun = np.searchsorted(self.start_s, times, "right")
        return np.asarray(begun - np.searchsorted(np.sort(self.end_s), times, "right"))


def read(path: Path) -> Holes:
    with np.load(path, allow_pickle=False) as arrays:
        start = arrays["start_s"].astype(np.float64)
        length = arrays["length_s"].astype(np.float64)
    order = np.argsort(start, kind="stable")
    return Holes(start[order], (start + length)[order])


def make(hours: float = HOURS, seed: int = SEED) -> Holes:
    rng = np.random.default_rng(seed)
    num_groups = int(rng.poisson(GROUPS_PER_H * hours))
    begins = np.sort(rng.uniform(0.0, 3600.0 * hours, num_groups))
    own = np.sqrt(1 - TIDE**2) * rng.normal(size=num_groups)
    sizes = np.rint(_quantile(GROUPS, _tide(begins, rng) * TIDE + own)).astype(int)
    pieces = np.minimum(sizes, 1 + rng.poisson(PIECES * np.log(sizes)))
    group = np.repeat(np.arange(num_groups), pieces)
    weight = rng.exponential(size=len(group))
    share = weight / np.bincount(group, weight)[group]
    nodes = np.maximum(1, np.rint(sizes[group] * share)).astype(int)
    lengths = _quantile(LENGTHS, rng.normal(size=len(group)))
    ends = _at_nearest(begins[group] + lengths, begins[group] + SHORTEST_S, hours, rng)
    return Holes(np.repeat(begins[group], nodes), np.repeat(ends, nodes))


def _at_nearest(
    wanted: Seconds, earliest: Seconds, hours: float, rng: np.random.Generator
) -> Seconds:
    """Return the moment next to each wanted one at which a job starts, none too early."""
    num_jobs = int(rng.poisson(TAKEN_PER_H * hours))
    last = max(3600.0 * hours, wanted.max()) + SHORTEST_S
    jobs = np.sort(np.append(rng.uniform(0.0, 3600.0 * hours, num_jobs), last))
    later = np.searchsorted(jobs, wanted)
    sooner = np.maximum(later - 1, 0)
    chosen = np.where(wanted - jobs[sooner] < jobs[later] - wanted, sooner, later)
    return np.asarray(jobs[np.maximum(chosen, np.searchsorted(jobs, earliest))])


def _tide(times: Seconds, rng: np.random.Generator) -> Seconds:
    """Return a random walk around 0 at these times: a stationary Gauss-Markov process."""
    kept = np.exp(-np.diff(times, prepend=-np.inf) / (3600.0 * TIDE_H))
    new, level = rng.normal(size=len(times)) * np.sqrt(1 - kept**2), 0.0
    walk = np.empty(len(times))
    for number, (keeps, adds) in enumerate(zip(kept, new, strict=True)):
        walk[number] = level = keeps * level + adds
    return walk


def _quantile(quantiles: tuple[tuple[float, float], ...], normal: Seconds) -> Seconds:
    """Turn normal numbers into those of a distribution; between two quantiles by their logs."""
    shares, values = zip(*quantiles, strict=True)
    uniform = [NormalDist().cdf(number) for number in normal]
    return np.asarray(np.exp(np.interp(uniform, shares, np.log(values))))


# ---- How close a log is to the real one


@dataclass(frozen=True)
class Figures:
    median_min: float
    mean_min: float
    p90_min: float
    p99_min: float
    short_time: float
    """Share of the idle node-time in spans shorter than 30 min."""
    group_begin: float
    """Median number of nodes that become idle at one moment, and of those that are taken at one."""
    group_end: float
    idle_quartiles: tuple[float, float, float]
    """Of the number of idle nodes over time."""


REAL = Figures(7.9, 19.9, 54.5, 154.1, 0.33, 4, 3, (12, 78, 498))
"""The 15 days of the real machine."""


def figures(holes: Holes) -> Figures:
    length = (holes.end_s - holes.start_s) / 60.0
    every = np.arange(0.0, holes.duration_s, 600.0)
    short = float(length[length < 30].sum() / length.sum())
    groups = [
        np.median(np.unique(at, return_counts=True)[1]) for at in (holes.start_s, holes.end_s)
    ]
    low, middle, high = np.quantile(holes.idle_at(every), (0.25, 0.5, 0.75))
    median, p90, p99 = np.quantile(length, (0.5, 0.9, 0.99))
    return Figures(
        float(median), float(length.mean()), float(p90), float(p99), short, float(groups[0]),
        float(groups[1]), (float(low), float(middle), float(high)),
    )  # fmt: skip
