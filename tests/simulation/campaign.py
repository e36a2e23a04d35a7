"""Campaigns: how one schedule is played, and many on several processes."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from simulation.world import World


@dataclass
class Tally:
    """What became of one schedule, or of many."""

    schedules: int = 0
    cpu_s: float = 0.0
    """Processor time that they took; 0 for a single one."""
    virtual_s: float = 0.0
    events: int = 0
    checks: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)
    """Seed -> what did not hold, with the last lines of the trace."""

    def add(self, other: Tally) -> None:
        """Count another outcome of the same kind in."""
        for name, value in vars(other).items():
            if isinstance(value, dict):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)


T = TypeVar("T", bound=Tally)
T_co = TypeVar("T_co", bound=Tally, covariant=True)


class Schedule(Protocol, Generic[T_co]):
    """One random schedule, all of whose chance comes from its seed."""

    seed: int
    world: World

    @property
    def scenario(self) -> object:
        """Its parameters, for people."""

    def run(self) -> None:
        """Run it; raises if something happened that must never happen."""

    def outcome(self) -> T_co:
        """Return what was counted so far."""


def play(schedule: Schedule[T]) -> T:
    """Run one schedule; what did not hold is in the outcome's ``failures``."""
    try:
        schedule.run()
    except Exception as e:  # the protocol's own errors are findings too
        outcome = schedule.outcome()
        what = f"seed {schedule.seed}: {type(e).__name__}: {e}"
        outcome.failures[schedule.seed] = f"{what}\n{schedule.scenario}\n{format_trace(schedule)}"
        return outcome
    return schedule.outcome()


def format_trace(schedule: Schedule[T]) -> str:
    """Return the trace as text."""
    return "\n".join(
        f"{now:9.3f}  {who:6}  {what} {detail}" for now, who, what, detail in schedule.world.trace
    )


# ---- Many schedules, on several processes


Make = Callable[[int], Schedule[T]]
"""Returns the schedule of a seed; to be sent to other processes, it must be picklable."""

_CHUNK = 500


def run_many(make: Make[T], first_seed: int, schedules: int) -> T:
    """Run schedules, at least one, one after the other in this process."""
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
    """Run schedules, at least one, on several processes.

    Args:
        make: Makes each of them.
        first_seed: The first schedule's seed; the others follow it.
        schedules: How many to run.
        processes: How many processes to use.
        progress: Called with the total after each chunk.
    """
    total: T | None = None
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        run_chunk = partial(_run_chunk, make)
        for outcome in pool.imap_unordered(run_chunk, _chunks(first_seed, schedules)):
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


def _chunks(first_seed: int, schedules: int) -> Iterator[tuple[int, int]]:
    for start in range(0, schedules, _CHUNK):
        yield first_seed + start, min(_CHUNK, schedules - start)
