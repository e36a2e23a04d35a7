"""A month of one run in virtual time with every default, and the simulator under planted bugs."""

import os
from dataclasses import replace
from functools import partial

import pytest

from planted import require_found
from simulation.campaign import play
from simulation.month import FULL, KILLING, MUTANTS, SMALL, Month, MonthSimulator

LONG = bool(os.environ.get("HPC_ELASTIC_LONG"))


@pytest.mark.schedules
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("ft", [False, True], ids=["group", "replicas"])
def test_a_run_lasts(ft, seed):
    """Pauses, suspensions, outages, preemptions and a full cluster exclude and end nothing sound.

    Some days of 16 nodes; with HPC_ELASTIC_LONG a month of 64.
    """
    month = replace(Month() if LONG else SMALL, ft=ft)
    outcome = play(MonthSimulator(seed, month))
    assert not outcome.failures, outcome.failures[seed]
    assert len(outcome.faults) == 7 and outcome.rounds > 5 * month.days


@pytest.mark.parametrize("ft", [False, True], ids=["group", "replicas"])
def test_a_script_that_takes_its_node_with_it_ends_the_run(ft):
    """After a few rounds, with Slurm's reason."""
    outcome = play(MonthSimulator(0, replace(KILLING, ft=ft)))
    assert not outcome.failures, outcome.failures[0]
    assert outcome.endings == 1 and outcome.rounds < 20


@pytest.mark.parametrize("ft", [False, True], ids=["group", "replicas"])
def test_a_cluster_that_is_full_for_long_costs_no_task(ft):
    """However often the nodes are requeued, and though leaders are lost while others wait."""
    month = replace(FULL, ft=ft, days=FULL.days if LONG else 1.0)
    outcome = play(MonthSimulator(0, month))
    assert not outcome.failures, outcome.failures[0]
    assert outcome.requeues > 10 * month.days and outcome.trained_s > 10_000


@pytest.mark.schedules
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_is_found(name):
    """Each bug that only a long run shows breaks the invariant that it should."""
    month, leader_state, complaint = MUTANTS[name]
    make = partial(MonthSimulator, month=month, leader_state=leader_state)
    require_found(make, complaint, 0, 8)


def test_a_month_is_deterministic():
    """The same seed gives the same events at the same times."""
    month = replace(SMALL, days=0.5)
    months = [MonthSimulator(3, month, whole_trace=True) for _ in range(2)]
    traces = [(play(m).failures, list(map(str, m.world.trace))) for m in months]
    assert traces[0] == traces[1]
