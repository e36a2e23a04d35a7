"""Waiting for descriptors, whatever their numbers.

A script's data loaders and a node's many workers open more than 1024 files; select(2) refuses a
descriptor beyond that, poll(2) does not.
"""

from __future__ import annotations

import math
import select
from typing import Protocol

_LONGEST_MS = 2**31 - 1
"""poll(2) takes an int: 24 days."""


class HasFileno(Protocol):
    """A socket or an open file."""

    def fileno(self) -> int:
        """Return its descriptor."""


def readable(*files: int | HasFileno, timeout_s: float | None = None) -> list[int | HasFileno]:
    """Return those of these files that can be read, or are at their end, after waiting for one.

    Args:
        files: Descriptors, or what has one.
        timeout_s: How long to wait; None: for ever; 0: not at all. More than 24 days (the end of a
            job without a time limit is a year away) are 24 days.
    """
    poll = select.poll()
    by_number = {f if isinstance(f, int) else f.fileno(): f for f in files}
    for number in by_number:
        poll.register(number, select.POLLIN)
    timeout_ms = None if timeout_s is None else min(math.ceil(timeout_s * 1000), _LONGEST_MS)
    return [by_number[number] for number, _ in poll.poll(timeout_ms)]
