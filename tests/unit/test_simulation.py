"""The rendezvous under random schedules in virtual time, and the simulator under planted bugs."""

import re
from functools import partial

import pytest

from simulation import (
    MUTANTS,
    Simulator,
    find,
    format_trace,
    run_in_parallel,
)

SCHEDULES = 20_000
MUTANT_SCHEDULES = 2_000


@pytest.fixture(scope="module")
def total():
    return run_in_parallel(Simulator, first_seed=0, schedules=SCHEDULES, processes=2)


@pytest.mark.schedules
def test_every_invariant_holds_in_every_schedule(total):
    """No schedule breaks an invariant; a failure names its seed and shows its last events."""
    shown = "\n\n".join(list(total.failures.values())[:3])
    assert not total.failures, f"{len(total.failures)} of {total.schedules} failed\n{shown}"


@pytest.mark.schedules
def test_schedules_contain_what_is_to_be_tested(total):
    """They elect, fence, grow, agree, let go, end, and stand, under every kind of fault."""
    assert total.schedules == SCHEDULES
    assert total.rounds > SCHEDULES
    assert total.elections > SCHEDULES
    assert min(total.fenced, total.growths, total.endings) > SCHEDULES / 50
    assert min(total.agreements, total.departures) > SCHEDULES / 10
    assert total.stood_after.total() > SCHEDULES / 2
    assert total.shown > 10 * SCHEDULES and total.notices > SCHEDULES / 10
    assert len(total.faults) == 20
    assert min(total.faults.values()) > SCHEDULES / 50
    assert total.silent > SCHEDULES / 20
    assert len(total.storage) == 6
    assert min(total.storage.values()) > SCHEDULES / 2000


@pytest.mark.schedules
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_is_found(name):
    """Each planted bug breaks the invariant that it should, within a few schedules."""
    components, complaint = MUTANTS[name]
    failure = find(partial(Simulator, components=components), 0, MUTANT_SCHEDULES)
    assert failure is not None, f"{name} went unnoticed"
    assert re.search(complaint, failure.splitlines()[0]), failure


def test_failure_can_be_replayed():
    """A failure names its seed, and that seed fails again in the same way."""
    components, _ = MUTANTS["no term check"]
    first = find(partial(Simulator, components=components), 0, MUTANT_SCHEDULES)
    assert first is not None
    seed = int(re.match(r"seed (\d+):", first)[1])
    assert find(partial(Simulator, components=components), seed, 1) == first


def test_schedule_is_deterministic():
    """The same seed gives the same events at the same times."""
    traces = []
    for _ in range(2):
        sim = Simulator(7, whole_trace=True)
        sim.run()
        traces.append(format_trace(sim))
    assert traces[0] == traces[1]
    assert traces[0]
