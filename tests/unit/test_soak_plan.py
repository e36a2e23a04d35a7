"""The plan of a soak is a function of its seed, and every kind of fault can be thrown."""

import pytest

from soak.hands import HANDS
from soak.kinds import KINDS
from soak.plan import NUM_NODES, num_tasks, plan, volleys

SEEDS = range(300)


def test_the_same_seed_gives_the_same_faults_and_more_minutes_give_more_of_them():
    """A longer soak begins as a shorter one does."""
    short, long = plan(7, 5), plan(7, 30)
    assert plan(7, 5) == short == long[: len(short)]
    assert len(short) < len(long)
    assert len({tuple(plan(seed, 5)) for seed in SEEDS}) == len(SEEDS)


def test_every_kind_can_be_thrown():
    """There is a hand for each, and for nothing else."""
    assert set(KINDS) == HANDS


def test_no_kind_comes_twice_before_all_have_come():
    """But for those that come on the heels of another one."""
    for seed in SEEDS:
        first = [f.kind for f in plan(seed, 60) if not f.on_heels][: len(KINDS)]
        missing = {name for name in KINDS if name not in first}
        assert all(KINDS[name].strikes or KINDS[name].costs_node for name in missing), seed


def test_a_plan_silences_no_more_nodes_than_there_are():
    """A second time, the run would avoid the node."""
    for seed in SEEDS:
        silenced = [f for f in plan(seed, 120) if f.of.strikes]
        assert len(silenced) <= NUM_NODES
    assert {len([f for f in plan(seed, 120) if f.of.strikes]) for seed in SEEDS} == {NUM_NODES}


def test_a_plan_costs_the_run_one_node_at_most():
    """With more, the run would be down to its minimum."""
    for seed in SEEDS:
        assert len([f for f in plan(seed, 120) if f.of.costs_node]) == 1, seed


def test_what_comes_on_the_heels_of_another_can_be_thrown_then():
    """Slurm may have been stopped by the first one."""
    pairs = [v for seed in SEEDS for v in volleys(plan(seed, 30)) if len(v) > 1]
    assert {len(v) for v in pairs} == {2}
    assert all(f.of.pairs for v in pairs for f in v)
    assert not any(a.of.stops_slurm and b.of.asks_slurm for a, b in pairs)
    assert {b.kind for _, b in pairs} == {k.name for k in KINDS.values() if k.pairs}


def test_faults_are_numbered_and_last_as_long_as_their_kind_says():
    """Numbers are those of the table."""
    for seed in SEEDS:
        faults = plan(seed, 10)
        assert [f.number for f in faults] == list(range(1, len(faults) + 1))
        assert all(f.of.lasts_s[0] <= f.lasts_s <= f.of.lasts_s[1] for f in faults)


@pytest.mark.parametrize("minutes", [0.1, 5, 30])
def test_there_is_a_task_for_each_that_does_not_come_back(minutes):
    """So that the run has four nodes to the end."""
    faults = plan(1, minutes)
    lost = [f for f in faults if f.kind == "cancel"]
    assert num_tasks(faults) == NUM_NODES + len(lost)
