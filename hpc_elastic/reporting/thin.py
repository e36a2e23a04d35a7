"""Makes long histories small enough to draw, without changing what they look like (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Stretch = Mapping[str, Any]
"""``begin``, ``end`` and ``kind``."""


def stretches(intervals: Iterable[Stretch], shortest_s: float) -> list[Stretch]:
    """Return intervals with those joined that could not be seen.

    Neighbours that are shorter than could be seen are one, of the kind that fills most of it; so
    are neighbours of one kind.

    Args:
        intervals: In order, without gaps.
        shortest_s: What can be seen.
    """
    found: list[Stretch] = []
    for stretch in _visible(intervals, shortest_s):
        if found and found[-1]["kind"] == stretch["kind"]:
            found[-1] = {**found[-1], "end": stretch["end"]}
        else:
            found.append(stretch)
    return found


def _visible(intervals: Iterable[Stretch], shortest_s: float) -> Iterator[Stretch]:
    short: list[Stretch] = []
    for interval in intervals:
        if interval["end"] - interval["begin"] >= shortest_s:
            yield from _as_one(short)
            short = []
            yield interval
            continue
        short.append(interval)
        if short[-1]["end"] - short[0]["begin"] >= shortest_s:
            yield from _as_one(short)
            short = []
    yield from _as_one(short)


def _as_one(short: Sequence[Stretch]) -> Iterator[Stretch]:
    if not short:
        return
    filled: dict[str, float] = {}
    for interval in short:
        length_s = interval["end"] - interval["begin"]
        filled[interval["kind"]] = filled.get(interval["kind"], 0.0) + length_s
    kind = max(filled, key=filled.__getitem__)
    yield {"begin": short[0]["begin"], "end": short[-1]["end"], "kind": kind}


def series(points: Sequence[tuple[float, float]], columns: int) -> list[tuple[float, float]]:
    """Return the points of a line that looks the same where it is so many pixels wide.

    Of each column the first, the last, the lowest and the highest point are kept (Jugel et al.,
    "M4: A Visualization-Oriented Time Series Data Aggregation", VLDB 2014).

    Args:
        points: In order of the first value.
        columns: Pixels.
    """
    if len(points) <= 4 * columns:
        return list(points)
    begin, end = points[0][0], points[-1][0]
    width = (end - begin) / columns or 1.0
    by_column: dict[int, list[int]] = {}
    for index, (x, _) in enumerate(points):
        by_column.setdefault(min(columns - 1, int((x - begin) / width)), []).append(index)
    kept: set[int] = set()
    for indexes in by_column.values():
        heights = [points[i][1] for i in indexes]
        low, high = heights.index(min(heights)), heights.index(max(heights))
        kept |= {indexes[0], indexes[-1], indexes[low], indexes[high]}
    return [points[i] for i in sorted(kept)]
