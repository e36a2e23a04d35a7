"""Campaigns: run one schedule, or many on several processes."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from simulation.world import World


@dataclass
class Tally:
    """The counts of one schedule, or of many."""

    schedules: int = 0
    cpu_s: float = 0.0
    """Processor time of many schedules; 0 for a single one."""
    virtual_s: float = 0.0
    events: int = 0
    checks: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)
    """Seed -> the failed invariant, with the last lines of the trace."""

    def add(self, other: Tally) -> None:
        """Add the counts of another outcome of the same kind."""
        for name, value in vars(other).items():
            if isinstance(value, dict):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)


T = TypeVar("T", bound=Tally)
T_co = TypeVar("T_co", bound=Tally, covariant=True)


class Schedule(Protocol, Generic[T_co]):
    """One random schedule, which its seed determines."""

    seed: int
    world: World

    @property
    def scenario(self) -> object:
        """The parameters, shown with a failure."""

    def run(self) -> None:
        """Run the schedule; raise if an invariant does not hold."""

    def outcome(self) -> T_co:
        """Return the counts so far."""


def play(schedule: Schedule[T]) -> T:
    """Run one schedule; a failure is in the outcome's ``failures``."""
    what = ""
    try:
        schedule.run()
    except Exception as e:  # the protocol's own errors are findings too
        what = f"seed {schedule.seed}: {type(e).__name__}: {e}"
    outcome = schedule.outcome()
    if what:
        outcome.failures[schedule.seed] = f"{what}\n{schedule.scenario}\n{format_trace(schedule)}"
    return outcome


def format_trace(schedule: Schedule[T]) -> str:
    """Return the trace as text."""
    return "\n".join(
        f"{now:9.3f}  {who:6}  {what} {detail}" for now, who, what, detail in schedule.world.trace
    )


# ---- Many schedules, on several processes


Make = Callable[[int], Schedule[T]]
"""Returns the schedule of a seed; must be picklable for several processes."""

_CHUNK = 500


def run_many(make: Make[T], first_seed: int, schedules: int) -> T:
    """Run at least one schedule in this process."""
    started = time.process_time()
    total = play(make(first_seed))
    for seed in range(first_seed + 1, first_seed + schedules):
        total.add(play(make(seed)))
    total.cpu_s = time.process_time() - started
    return total


def find(make: Make[T], first_seed: int, schedules: int) -> str | None:
    """Return the first failure, or None if all schedules pass."""
    for seed in range(first_seed, first_seed + schedules):
        for failure in play(make(seed)).failures.values():
            return failure
    return None


def run_in_parallel(
    make: Make[T],
    first_seed: int,
    schedules: int,
    processes: int,
    progress: Callable[[T], None] | None = None,
) -> T:
    """Run at least one schedule on several processes.

    Args:
        make: Returns the schedule of a seed.
        first_seed: The first schedule's seed; the others follow it.
        schedules: Number of schedules.
        processes: Number of processes.
        progress: Called with the total after each chunk.
    """
    total: T | None = None
    starts = range(0, schedules, _CHUNK)
    chunks = ((first_seed + start, min(_CHUNK, schedules - start)) for start in starts)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for outcome in pool.imap_unordered(partial(_run_chunk, make), chunks):
            if total is None:
                total = outcome
            else:
                total.add(outcome)
            if progress is not None:
                progress(total)
        pool.close()
        pool.join()
    assert total is not None
    return total


def _run_chunk(make: Make[T], chunk: tuple[int, int]) -> T:
    return run_many(make, *chunk)
