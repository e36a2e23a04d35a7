"""The lines of progress.jsonl, as values, and the pace that they show (pure, but for reading)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

TRAINING = "training"

_RECENT_S = 300.0
"""The pace is that of the last five minutes, or of so many points where they lie further apart."""
_FEWEST, _MOST = 5, 60


@dataclass(frozen=True)
class Point:
    """The group at one moment, as its leader saw it; None where nothing was known.

    Attributes:
        time: Unix seconds, on the leader's clock.
        phase: ``waiting``, ``training``, ``requeued``, ``succeeded`` or ``failed``.
        round: The last that was closed.
        nodes: Members of it; 0 while the group is not formed.
        world_size: Their workers.
        step: The furthest that a worker has reported.
        total_steps: Where the training will be done.
        samples: Seen so far, as the script reports them.
        loss: The first rank's.
        blocked_s: For how long checkpoints have held up the workers of this round.
        checkpoint: The last step whose checkpoint was announced.
        steps_per_s: Over the half minute before.
        samples_per_s: The same.
    """

    time: float
    phase: str = TRAINING
    round: int = 0
    nodes: int = 0
    world_size: int = 0
    step: int | None = None
    total_steps: int | None = None
    samples: int | None = None
    loss: float | None = None
    blocked_s: float = 0.0
    checkpoint: int | None = None
    steps_per_s: float | None = None
    samples_per_s: float | None = None

    @classmethod
    def of(cls, line: Mapping[str, Any], time: float) -> Point:
        """Return what a line, or status.json, says; fields that a later version adds are left."""
        known: dict[str, Any] = {str(name): line.get(name) for name in cls.__match_args__}
        fits = {name: value for name, value in known.items() if _is_of(name, value)}
        return cls(**{**fits, "time": time})


def _is_of(name: str, value: object) -> bool:
    """Tell whether a line can have said so; what is damaged is like what is not known."""
    if name == "phase":
        return isinstance(value, str)
    return isinstance(value, int | float) and math.isfinite(value)


def read_points(file: Path) -> list[Point]:
    """Return the points of a run in order of time; none where there is no file.

    Lines that are cut short, for a leader may die while it writes, are passed over. So are lines
    below one of a later epoch: their leader was stopped while it wrote, and another led meanwhile.
    """
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return []
    return sorted(_parsed(text.splitlines()), key=lambda point: point.time)


def _parsed(lines: Iterable[str]) -> Iterator[Point]:
    newest = 0
    for line in lines:
        try:
            raw = json.loads(line)
            epoch = int(raw.get("epoch") or 0)
            point = Point.of(raw, float(raw["time"]))
            newest = max(newest, epoch)
            if epoch == newest or not epoch:
                yield point
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue


@dataclass(frozen=True)
class Rates:
    """How fast the present group trains; None where it does not, or nothing is known.

    Attributes:
        steps_per_s: Optimizer steps a second.
        samples_per_s: Samples a second, where the script reports them.
        remaining_s: Until ``total_steps``, at this pace.
    """

    steps_per_s: float | None = None
    samples_per_s: float | None = None
    remaining_s: float | None = None


def rates(points: Sequence[Point]) -> Rates:
    """Return the pace of the group that trains now.

    It is the midmean of the slopes between recent points, as robust as a median: a checkpoint or a
    look that came late do not show; nor does a step that takes longer than the points are apart,
    on which a median would jump. Earlier groups, of another size, do not count.

    Args:
        points: In order of time; the last is taken for how things are now.
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
            break  # a leader's first looks still show what the workers before had made
        if point.step is None and any(later.step is not None for later in found):
            break
        if last.time - point.time > _RECENT_S and len(found) >= _FEWEST:
            break
        found.append(point)
    return found[:: -(-len(found) // _MOST)][::-1]


def _slope(points: Sequence[Point], value: Callable[[Point], int | None]) -> float | None:
    """Return the mean of the middle half of the slopes over stretches of a sixth of the time."""
    known = [(p.time, v) for p in points if (v := value(p)) is not None]
    apart = max(1, len(known) // 6)
    pairs = zip(known, known[apart:], strict=False)
    slopes = sorted((v - u) / (t - s) for (s, u), (t, v) in pairs if t > s)
    quarter = (len(slopes) - 1) // 4
    return max(0.0, fmean(slopes[quarter : len(slopes) - quarter])) if slopes else None
