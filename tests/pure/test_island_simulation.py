"""Islands under random schedules in virtual time, and the simulator under planted bugs."""

import os
import re
from collections import Counter

import pytest

from simulation.islands import ISLAND_MUTANTS, BrokenPromiseError, IslandSimulator

SCHEDULES = 1000 if os.environ.get("HPC_ELASTIC_LONG") else 150
MUTANT_SCHEDULES = 300
RARE = {"forgets heads": 300}
"""Planted bugs that take luck: the seed to begin with."""


@pytest.mark.schedules
def test_every_contribution_is_counted_once_in_every_schedule():
    """Through kills, pauses, lost replies and late listings; a failure names its seed."""
    rounds, published, hits = 0, 0, Counter()
    for seed in range(SCHEDULES):
        try:
            total = IslandSimulator(seed).run()
        except BrokenPromiseError as e:
            pytest.fail(f"seed {seed}: {e}")
        rounds, published, hits = (
            rounds + total.rounds, published + total.published, hits + total.hits,
        )  # fmt: skip
    assert rounds > 5 * SCHEDULES and published > 20 * SCHEDULES
    assert len(hits) == 7 and min(hits.values()) > SCHEDULES / 10


@pytest.mark.schedules
@pytest.mark.parametrize("name", ISLAND_MUTANTS)
def test_planted_bug_is_found(name):
    """Each planted bug breaks a promise within a few schedules."""
    parts, complaint = ISLAND_MUTANTS[name]
    first = RARE.get(name, 0)
    for seed in range(first, first + MUTANT_SCHEDULES):
        try:
            IslandSimulator(seed, parts).run()
        except BrokenPromiseError as e:
            assert re.search(complaint, str(e)), e
            return
    pytest.fail(f"{name} went unnoticed")


def test_schedule_is_deterministic():
    """The same seed gives the same rounds and faults."""
    assert IslandSimulator(7).run() == IslandSimulator(7).run()
