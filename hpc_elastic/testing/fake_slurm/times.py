"""Slurm's times, read and written. Pure."""

from __future__ import annotations

import re
import time

from hpc_elastic.testing.fake_slurm.errors import Refusal, unknown

DATE = "%Y-%m-%dT%H:%M:%S"
_LIMIT = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_AHEAD = re.compile(r"now(?:\+(\d+)([a-z]*))?")
_UNITS = {"": 1, "second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}


def parse_limit(text: str) -> float | None:
    """Return the seconds of a time limit as ``--time`` takes it; None: no limit.

    ``5`` are minutes, ``5:30`` minutes and seconds, ``1-12`` days and hours. Slurm rounds up to
    whole minutes; here seconds count, so that a test need not wait for one.
    """
    if text.upper() in ("UNLIMITED", "INFINITE", "0", "-1"):
        return None
    m = _LIMIT.fullmatch(text)
    if m is None:
        raise Refusal("Invalid --time specification")
    days, *rest = m.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = 0, parts[0], (*parts, 0)[1]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def parse_begin(text: str, now: float) -> float:
    """Return the moment of ``now``, ``now+10``, ``now+1hour`` or a full date, in epoch seconds."""
    if m := _AHEAD.fullmatch(text):
        unit = (m[2] or "").removesuffix("s")
        if unit not in _UNITS:
            raise Refusal(f"Invalid time specification: {text}")
        return now + int(m[1] or 0) * _UNITS[unit]
    try:
        return time.mktime(time.strptime(text, DATE))
    except ValueError:
        raise unknown(f"the time {text}; it takes now, now+SECONDS and dates") from None


def show_span(seconds: float | None) -> str:
    """Return a length of time as squeue prints it: ``2:03``, ``1-02:03:04`` or ``UNLIMITED``."""
    if seconds is None:
        return "UNLIMITED"
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}-{hour:02}:{minute:02}:{second:02}"
    return f"{hour:02}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def show_full_span(seconds: float | None) -> str:
    """Return a length of time as scontrol prints it: ``00:02:03``."""
    text = show_span(seconds)
    return text if seconds is None or seconds >= 3600 else f"00:{text:0>5}"


def show_date(moment: float | None, nothing: str = "N/A") -> str:
    """Return a moment as Slurm prints it, in local time."""
    return nothing if moment is None else time.strftime(DATE, time.localtime(moment))
