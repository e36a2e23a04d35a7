"""Runs that give way beside jobs of others: random schedules, and planted bugs."""

import os
from functools import partial

import pytest

from planted import require_deterministic, require_found
from simulation import run_many
from simulation.neighbours import MUTANTS, NeighbourSimulator

SCHEDULES = 20_000 if os.environ.get("HPC_ELASTIC_LONG") else 200


@pytest.mark.schedules
def test_no_job_waits_for_nodes_that_may_go_back_and_none_goes_back_without_end():
    """In every schedule; with HPC_ELASTIC_LONG in 20,000."""
    total = run_many(NeighbourSimulator, 0, SCHEDULES)
    assert not total.failures, "\n\n".join(list(total.failures.values())[:2])
    assert total.releases > 3 * SCHEDULES and total.jobs > 10 * SCHEDULES
    assert len(total.faults) == 2 and min(total.faults.values()) > SCHEDULES / 4


@pytest.mark.schedules
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_is_found(name):
    """Each breaks the invariant that it should."""
    terms, complaint = MUTANTS[name]
    require_found(partial(NeighbourSimulator, terms=terms), complaint, 0, 1000)


@pytest.mark.schedules
def test_a_schedule_is_deterministic():
    """The seed of a failure shows the failure."""
    require_deterministic(NeighbourSimulator)
