"""Runs of replicas under random schedules in virtual time, and the simulator under planted bugs."""

import os
from functools import partial

import pytest

from planted import require_found
from simulation import find, run_many
from simulation.replicas import (
    REPLICA_MUTANTS,
    REPLICAS,
    UNIT_MUTANTS,
    ReplicaSimulator,
    ReplicaUnitSimulator,
)
from simulation.simulator import SizesSimulator, UnitSimulator

SCHEDULES = 800 if os.environ.get("HPC_ELASTIC_LONG") else 300
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


@pytest.mark.parametrize(
    "simulator",
    [UnitSimulator, SizesSimulator, partial(ReplicaUnitSimulator, components=REPLICAS)],
)
def test_every_invariant_holds_for_units(simulator):
    """Of nodes that only work together, as one group and as replicas; and of listed sizes."""
    total = run_many(simulator, 0, SCHEDULES)
    shown = "\n\n".join(list(total.failures.values())[:3])
    assert not total.failures, f"{len(total.failures)} of {total.schedules} failed\n{shown}"
    assert total.rounds > SCHEDULES and total.stood_after.total() > SCHEDULES / 2


@pytest.mark.parametrize("seed", [61, 104, 732, 1219])
def test_a_schedule_of_units_that_once_failed_holds(seed):
    """A lost leader's partner that is cut off; one that is another attempt; two of one number."""
    assert find(partial(ReplicaUnitSimulator, components=REPLICAS), seed, 1) is None


@pytest.mark.parametrize("seed", [73, 2451, 3301, 5562])
def test_a_schedule_of_replicas_that_once_failed_holds(seed):
    """A restart or a start at the very end; a failure reported twice, also after a loss."""
    assert find(partial(ReplicaSimulator, components=REPLICAS), seed, 1) is None


@pytest.mark.schedules
@pytest.mark.parametrize(
    ("simulator", "mutants", "name"),
    [
        *((ReplicaSimulator, REPLICA_MUTANTS, name) for name in REPLICA_MUTANTS),
        *((ReplicaUnitSimulator, UNIT_MUTANTS, name) for name in UNIT_MUTANTS),
    ],
)
def test_planted_bug_of_replicas_is_found(simulator, mutants, name):
    """Each planted bug breaks the invariant that it should, within a few schedules."""
    components, complaint = mutants[name]
    require_found(partial(simulator, components=components), complaint, 0, MUTANT_SCHEDULES)
