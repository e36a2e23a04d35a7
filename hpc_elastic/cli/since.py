"""Points in time as they are given on the command line."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta

import click

_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_CLOCK = re.compile(r"\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?")

FORMS = "10m (ago; s, m, h, d), 12:03, 12:03:11, 2030-01-31, '2030-01-31 12:03', @<Unix seconds>"


def parse_time(text: str, now: float) -> float:
    """Return the Unix seconds of a point in the past (pure, but for the time zone).

    Args:
        text: One of `FORMS`. A time of day is the last one before now.
        now: Unix seconds.

    Raises:
        ValueError: it is none of them.
    """
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return now - float(ago[1]) * _UNIT_S[ago[2]]
    if text.startswith("@"):
        return float(text[1:])
    if _CLOCK.fullmatch(text):
        return _time_of_day(text, now)
    return datetime.fromisoformat(text).timestamp()


def _time_of_day(text: str, now: float) -> float:
    today = datetime.fromtimestamp(now)
    then = datetime.fromisoformat(f"{today:%Y-%m-%d}T{text.zfill(len(text) + (text[1] == ':'))}")
    return (then if then <= today else then - timedelta(days=1)).timestamp()


class PointInTime(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """A point in time, in Unix seconds."""

    name = "time"

    def convert(
        self, value: str | float, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the Unix seconds."""
        if isinstance(value, float):
            return value
        try:
            return parse_time(value.strip(), time.time())
        except ValueError:
            self.fail(f"{value!r} is no time; give one of: {FORMS}", param, ctx)
