"""Numbers and times as people read them on a report (pure, but for the local time zone)."""

from __future__ import annotations

import math
import time
from datetime import datetime
from typing import Any

UNKNOWN = "–"


def clock_ms(seconds: float) -> int:
    """Return a moment as milliseconds since 1970 of a clock that shows local time as UTC.

    So a report shows the times of the cluster wherever it is read, as `events` prints them there.
    """
    offset = datetime.fromtimestamp(seconds).astimezone().utcoffset()
    return round(1000 * (seconds + (offset.total_seconds() if offset else 0.0)))


def zone() -> str:
    """Return the name of the local time zone."""
    return time.strftime("%Z") or "local time"


def moment(seconds: float | None) -> str:
    """Return a date and a time."""
    if seconds is None:
        return UNKNOWN
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def length(seconds: float | None) -> str:
    """Return a length of time, by its two largest units."""
    if seconds is None:
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {s} s"


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


def share(part: float | None) -> str:
    """Return a share in percent; what is not nothing never shows as nothing."""
    if part is None:
        return UNKNOWN
    if 0 < part < 0.0005:
        return "< 0.1 %"
    # what is lost must not be rounded away
    return f"{math.floor(1000 * part) / 10:.1f} %" if part > 0.9 else f"{100 * part:.1f} %"


def number(value: Any) -> str:
    """Return a number with its thousands apart, and no more digits than mean anything."""
    if value is None:
        return UNKNOWN
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
