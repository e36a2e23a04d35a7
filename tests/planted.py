"""What a test requires of each simulator: planted bugs are found, and a seed is a schedule."""

import re
from collections.abc import Callable
from typing import Any

from simulation import find, format_trace


def require_found(make: Callable[..., Any], complaint: str, first: int, schedules: int) -> str:
    """A planted bug breaks the invariant that it should, within some schedules; return how."""
    failure = find(make, first, schedules)
    assert failure is not None, "it went unnoticed"
    assert re.search(complaint, failure.splitlines()[0]), failure
    return failure


def require_replayed(make: Callable[..., Any], complaint: str, first: int, schedules: int) -> None:
    """A failure names its seed, and that seed fails again in the same way."""
    failure = require_found(make, complaint, first, schedules)
    seed = int(re.findall(r"^seed (\d+):", failure)[0])
    assert find(make, seed, 1) == failure


def require_deterministic(make: Callable[..., Any]) -> None:
    """The same seed gives the same events at the same times."""
    traces = []
    for _ in range(2):
        schedule = make(7, whole_trace=True)
        schedule.run()
        traces.append(format_trace(schedule))
    assert traces[0] == traces[1]
    assert traces[0]
