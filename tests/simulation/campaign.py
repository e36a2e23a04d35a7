"""Many schedules, on several processes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from simulation.schedule import Schedule, Tally, play

T = TypeVar("T", bound=Tally)
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
