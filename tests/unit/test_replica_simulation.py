"""Runs of replicas under random schedules in virtual time, and the simulator under planted bugs."""

import re
from functools import partial

import pytest

from simulation import find, run_many
from simulation.replicas import REPLICA_MUTANTS, REPLICAS, ReplicaSimulator

SCHEDULES = 800
MUTANT_SCHEDULES = 1_000


@pytest.fixture(scope="module")
def total():
    return run_many(partial(ReplicaSimulator, components=REPLICAS), 0, SCHEDULES)


def test_every_invariant_holds_for_replicas(total):
    """No schedule breaks an invariant; a failure names its seed and shows its last events."""
    shown = "\n\n".join(list(total.failures.values())[:3])
    assert not total.failures, f"{len(total.failures)} of {total.schedules} failed\n{shown}"


def test_schedules_of_replicas_contain_what_is_to_be_tested(total):
    """They admit, elect, fence, end, and stand."""
    assert total.rounds > 2 * SCHEDULES
    assert total.elections > 1.5 * SCHEDULES
    assert min(total.fenced, total.endings) > SCHEDULES / 50
    assert total.stood_after.total() > SCHEDULES / 2


@pytest.mark.parametrize("seed", [73, 3301, 5562])
def test_a_schedule_of_replicas_that_once_failed_holds(seed):
    """A restart at the very end; a failure reported twice; a task that starts at the very end."""
    assert find(partial(ReplicaSimulator, components=REPLICAS), seed, 1) is None


@pytest.mark.schedules
@pytest.mark.parametrize("name", REPLICA_MUTANTS)
def test_planted_bug_of_replicas_is_found(name):
    """Each planted bug breaks the invariant that it should, within a few schedules."""
    components, complaint = REPLICA_MUTANTS[name]
    failure = find(partial(ReplicaSimulator, components=components), 0, MUTANT_SCHEDULES)
    assert failure is not None, f"{name} went unnoticed"
    assert re.search(complaint, failure.splitlines()[0]), failure
