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
