"""Progress of a run: the lines of progress.jsonl, and the pace of the training."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_elastic.run.events import decoded
from hpc_elastic.shared_files import LATEST_TIME, lines_in, parse_json

TRAINING = "training"

_RECENT_S = 300.0
"""The pace is that of the last five minutes, or of `_FEWEST` points if these are further apart."""
_FEWEST, _MOST = 5, 60
_MOST_POINTS = 1_000_000  # of a run, the newest: they are all in memory
_LARGEST = 1e300  # no value is as large; an integer beyond it is no float


@dataclass(frozen=True, slots=True)
class Point:
    """The group at one moment, as its leader wrote it; None for unknown values."""

    time: float  # Unix seconds, by the leader's clock
    phase: str = TRAINING  # ``waiting``, ``training``, ``requeued``, ``succeeded`` or ``failed``
    round: int = 0  # number of the last round
    nodes: int = 0  # number of its members; 0 while the group forms
    world_size: int = 0  # number of their workers
    step: int | None = None  # the last step that a worker has reported
    total_steps: int | None = None  # the last step of the training
    samples: int | None = None  # samples trained so far, as the script reports them
    loss: float | None = None  # loss of the first rank
    blocked_s: float = 0.0  # seconds for which checkpoints have blocked the workers of this round
    checkpoint: int | None = None  # the last step whose checkpoint was announced
    steps_per_s: float | None = None  # steps a second over the half minute before
    samples_per_s: float | None = None  # samples a second over the half minute before
    gpu_use: float | None = None
    """Share of time in which a kernel ran; the mean of the group's GPUs."""
    gpu_memory: float | None = None  # the used share of memory of the group's fullest GPU
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Values of the script's own, of the first rank."""

    @classmethod
    def of(cls, line: Mapping[str, Any], time: float) -> Point:
        """Return the point of a line or of status.json; unknown fields are ignored."""
        known: dict[str, Any] = {str(name): line.get(name) for name in cls.__match_args__}
        phase, metrics = known.pop("phase"), known.pop("metrics")
        valid: dict[str, Any] = _numbers(known)
        if isinstance(phase, str):
            valid["phase"] = phase
        if isinstance(metrics, Mapping):
            valid["metrics"] = _numbers(metrics)
        return cls(**{**valid, "time": time})


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers; any other value counts as unknown."""
    numbers = ((name, value) for name, value in values.items() if isinstance(value, int | float))
    return {name: value for name, value in numbers if -_LARGEST < value < _LARGEST}


def read_points(file: Path) -> list[Point]:
    """Return the points of a run in order of time; none if there is no file.

    Lines that were cut off, because a leader died while it wrote, are left out. So are lines after
    one of a later term: their leader was stopped while it wrote, and another led meanwhile.
    """
    found, newest = deque[Point](maxlen=_MOST_POINTS), 0
    with contextlib.suppress(OSError):  # no points if it cannot be read
        for line in lines_in(file, unfinished=True, newest=True):
            try:
                term, point = _parsed(line, file)
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
                continue
            newest = max(newest, term)
            if (term == newest or not term) and abs(point.time) < LATEST_TIME:
                found.append(point)
    return sorted(found, key=lambda point: point.time)


def _parsed(line: bytes, file: Path) -> tuple[int, Point]:
    """Return term and point of a line; each value that has another type is unknown."""
    from msgspec import convert

    with contextlib.suppress(ValueError, RecursionError):  # not all have their types
        raw = decoded(line)
        return convert(raw.get("term") or 0, int), convert(raw, Point)
    raw = parse_json(line, file)
    return int(raw.get("term") or 0), Point.of(raw, float(raw["time"]))


@dataclass(frozen=True)
class Rates:
    """The pace of the present group and the seconds to ``total_steps``; None if unknown."""

    steps_per_s: float | None = None
    samples_per_s: float | None = None
    remaining_s: float | None = None


def rates(points: Sequence[Point]) -> Rates:
    """Return the pace of the group that trains now; the last point is the present state.

    It is the midmean of the slopes between recent points. It is as robust as a median against
    checkpoints and late points, and it does not jump if steps take longer than the points are
    apart. Earlier groups of another size do not count.
    """
    if not points or points[-1].phase != TRAINING:
        return Rates()
    last, recent = points[-1], _recent(points)
    pace = _slope(recent, lambda point: point.step)
    steps_per_s = last.steps_per_s if pace is None else pace
    samples = _slope(recent, lambda point: point.samples)
    remaining_s = None
    if steps_per_s and last.step is not None and last.total_steps is not None:
        remaining_s = max(0, last.total_steps - last.step) / steps_per_s
    return Rates(steps_per_s, last.samples_per_s if samples is None else samples, remaining_s)


def _recent(points: Sequence[Point]) -> list[Point]:
    """Return the last points of the present group, evenly thinned out."""
    last, found = points[-1], list[Point]()
    for point in reversed(points):
        if (point.round, point.nodes, point.phase) != (last.round, last.nodes, last.phase):
            break
        if found and found[-1].step is not None and (point.step or 0) > found[-1].step:
            break  # the first points of a leader may show the step of the round before
        if point.step is None and any(later.step is not None for later in found):
            break
        if last.time - point.time > _RECENT_S and len(found) >= _FEWEST:
            break
        found.append(point)
    return found[:: -(-len(found) // _MOST)][::-1]


def _slope(points: Sequence[Point], value: Callable[[Point], int | None]) -> float | None:
    """Return the mean of the middle half of the slopes over sixths of the time."""
    known = [(p.time, v) for p in points if (v := value(p)) is not None]
    apart = max(1, len(known) // 6)
    pairs = zip(known, known[apart:], strict=False)
    slopes = sorted((v - u) / (t - s) for (s, u), (t, v) in pairs if t > s)
    quarter = (len(slopes) - 1) // 4
    middle = slopes[quarter : len(slopes) - quarter]
    return max(0.0, math.fsum(middle) / len(middle)) if middle else None
