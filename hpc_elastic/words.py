"""Counts and lengths of time as people read them (pure)."""

from __future__ import annotations

_MINUTE, _HOUR = 60, 3600


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun: ``1 node``, ``3 nodes``; ``many`` where an s is not enough."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def duration(seconds: float) -> str:
    """Return a length of time, no more exact than is of use: ``4.2 s``, ``3 h 20 min``, ``2 d``."""
    s = max(0.0, seconds)
    if s < 9.95:
        return f"{s:.1f}".removesuffix(".0") + " s"
    if s < 2 * _MINUTE:
        return f"{s:.0f} s"
    if s < 10 * _MINUTE:
        return _both(round(s), _MINUTE, "min", "s")
    minutes = round(s / _MINUTE)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return _both(minutes, 60, "h", "min")
    return _both(round(s / _HOUR), 24, "d", "h")


def short(seconds: float) -> str:
    """Return a length of time that may be below a second: ``0.1 ms``, ``4.2 s``."""
    if seconds < 1e-4:
        return "0.1 ms"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else duration(round(seconds, 1))


def _both(number: int, size: int, large: str, small: str) -> str:
    many, few = divmod(number, size)
    return f"{many} {large} {few} {small}" if few else f"{many} {large}"


def node_time(node_s: float, like: float | None = None) -> str:
    """Return node-seconds in a unit that suits them.

    Args:
        node_s: Them.
        like: The largest number that stands beside; all of them get its unit.
    """
    size = node_s if like is None else like
    if size < 600:
        return f"{node_s:.1f} node-s"
    return f"{node_s / 60:.1f} node-min" if size < 18_000 else f"{node_s / 3600:,.1f} node-h"
