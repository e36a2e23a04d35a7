"""Times and numbers as a person reads them (pure)."""

from __future__ import annotations

import time
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"

_HOUR = 3600


def clock(at: float, now: float) -> str:
    """Return a moment on this machine's clock, with its day where that is not today."""
    there, here = time.localtime(at), time.localtime(now)
    if there[:3] == here[:3]:
        return time.strftime("%H:%M:%S" if abs(at - now) < _HOUR else "%H:%M", there)
    return time.strftime("%a %d %b %H:%M", there)


def number(value: float) -> str:
    """Return a number with three significant digits; whole ones from a thousand on by thousands."""
    if value and abs(value) < 0.001:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def sparkline(
    changes: Sequence[tuple[float, float]], begin: float, end: float, width: int, top: float
) -> str:
    """Return a value over time as a line of blocks, each the mean over its stretch.

    Args:
        changes: From when on it was what, in order of time; before the first it was 0.
        begin: Unix seconds of the left edge.
        end: Of the right edge.
        width: Characters, at least 1.
        top: What the highest block stands for.
    """
    if end <= begin or top <= 0:
        return ""
    step = (end - begin) / width
    edges = [(begin + i * step, begin + (i + 1) * step) for i in range(width)]
    return "".join(_block(_mean(changes, a, b) / top) for a, b in edges)


def _mean(changes: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    total = 0.0
    ends = [at for at, _ in changes[1:]] + [end]
    for (at, value), until in zip(changes, ends, strict=True):
        total += value * max(0.0, min(end, until) - max(begin, at))
    return total / (end - begin)


def _block(share: float) -> str:
    if share <= 0.01:
        return " "
    return BLOCKS[min(len(BLOCKS) - 1, max(0, round(share * len(BLOCKS)) - 1))]
