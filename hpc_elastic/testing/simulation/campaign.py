"""Many schedules, on several processes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator

from hpc_elastic.testing.simulation.parts import SOUND, Parts
from hpc_elastic.testing.simulation.simulator import Outcome, Simulator, simulate

_CHUNK = 500


def run_many(
    first_seed: int, schedules: int, parts: Parts = SOUND, kind: type[Simulator] = Simulator
) -> Outcome:
    """Run schedules one after the other, in this process."""
    total, started = Outcome(), time.process_time()
    for seed in range(first_seed, first_seed + schedules):
        total.add(simulate(seed, parts, kind))
    total.cpu_s = time.process_time() - started
    return total


def find(
    first_seed: int, schedules: int, parts: Parts, kind: type[Simulator] = Simulator
) -> str | None:
    """Return the first failure, or None if all schedules pass."""
    for seed in range(first_seed, first_seed + schedules):
        for failure in simulate(seed, parts, kind).failures.values():
            return failure
    return None


def run_in_parallel(
    first_seed: int,
    schedules: int,
    processes: int,
    progress: Callable[[Outcome], None] | None = None,
) -> Outcome:
    """Run schedules on several processes.

    Args:
        first_seed: The first schedule's seed; the others follow it.
        schedules: How many to run.
        processes: How many processes to use.
        progress: Called with the total after each chunk.
    """
    total = Outcome()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for outcome in pool.imap_unordered(_run_chunk, _chunks(first_seed, schedules)):
            total.add(outcome)
            if progress is not None:
                progress(total)
        pool.close()
        pool.join()
    return total


def _run_chunk(chunk: tuple[int, int]) -> Outcome:
    return run_many(*chunk)


def _chunks(first_seed: int, schedules: int) -> Iterator[tuple[int, int]]:
    for start in range(0, schedules, _CHUNK):
        yield first_seed + start, min(_CHUNK, schedules - start)
