"""The decisions of a soak: the plan, what the timeline has to show, and the checks of the ranks."""

from dataclasses import replace

import pytest

from hpc_elastic.report.timeline import Cause, Cost, TimelineEntry
from soak.checks import rank_checks
from soak.expected_events import ExplanationKind, InjectedFault, explain
from soak.inject import INJECTORS
from soak.plan import KINDS, NUM_NODES, Fault, num_tasks, overlapping_groups, plan

SEEDS = range(300)
PLANS = {seed: plan(seed, 120, ft=seed % 2 == 0) for seed in SEEDS}


def test_the_same_seed_gives_the_same_faults_and_more_minutes_give_more_of_them():
    """A longer soak begins as a shorter one does."""
    short, long = plan(7, 5), plan(7, 30)
    assert plan(7, 5) == short == long[: len(short)]
    assert len(short) < len(long)
    assert len({tuple(faults[:10]) for faults in PLANS.values()}) == len(SEEDS)


def test_every_kind_can_be_injected():
    """There is a function for each, and for nothing else."""
    assert set(KINDS) == set(INJECTORS)


def test_plans_keep_their_rules():
    """No kind twice before all have come, and no more silenced or lost nodes than a run bears."""
    for seed, faults in PLANS.items():
        first = [f.kind_name for f in faults if not f.overlaps][: len(KINDS)]
        missing = [kind for name, kind in KINDS.items() if name not in first]
        if seed % 2:
            assert not any(f.kind.ft for f in faults), "they are of replicas alone"
            missing = [kind for kind in missing if not kind.ft]
        assert all(kind.counts_against_host or kind.costs_node for kind in missing), seed
        assert sum(f.kind.counts_against_host for f in faults) == NUM_NODES, seed
        assert sum(f.kind.costs_node for f in faults) == 1, seed
        assert [f.number for f in faults] == list(range(1, len(faults) + 1))
        for fault in faults:
            shortest, longest = fault.kind.duration_s
            assert shortest <= fault.duration_s <= longest


def test_a_fault_that_overlaps_another_can_be_injected_then():
    """Slurm may have been stopped by the first one."""
    pairs = [g for faults in PLANS.values() for g in overlapping_groups(faults) if len(g) > 1]
    assert {len(pair) for pair in pairs} == {2}
    assert all(f.kind.may_overlap for pair in pairs for f in pair)
    assert not any(a.kind.stops_slurm and b.kind.needs_slurm for a, b in pairs)
    assert {b.kind_name for _, b in pairs} == {k.name for k in KINDS.values() if k.may_overlap}


@pytest.mark.parametrize("minutes", [0.1, 5, 30])
def test_there_is_a_task_for_each_that_does_not_come_back(minutes):
    """So that the run has four nodes to the end."""
    faults = plan(1, minutes)
    lost = [f for f in faults if f.kind_name == "cancel"]
    assert num_tasks(faults) == NUM_NODES + len(lost)


def injected(kind: str, *hosts: str, number: int = 1, **more) -> InjectedFault:
    """A fault at second 100, over at second 120."""
    fault = Fault(number, kind, 0.0, 0.0, 0)
    return InjectedFault(fault, hosts, 100.0, 120.0, **{"group": number, **more})


def shrank(what: str, *hosts: str, at: float = 101.0, cost: Cost | None = None) -> TimelineEntry:
    """The group shrank because of that."""
    return TimelineEntry("shrank", at, (Cause(what, at, hosts),), 4, 3, cost=cost or Cost())


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("preempt", "preempted"), ("kill-node", "node_lost"), ("kill-node", "leader_lost"),
        ("cut", "node_lost"), ("kill-leader", "leader_lost"), ("kill-worker", "worker_failed"),
        ("cancel", "cancelled"), ("drain", "asked"),
    ],
)  # fmt: skip
def test_a_fault_is_explained_by_its_cause_and_its_host(kind, what):
    """Another cause, another host or another time is another fault's."""
    fault = injected(kind, "node2")
    right = shrank(what, "node2")
    assert explain(fault, [fault], [right]).entries == (right,)
    others = [
        shrank("time_limit", "node2"), shrank(what, "node3"), shrank(what, "node2", at=90.0),
        shrank(what, "node2", at=130.0),
    ]  # fmt: skip
    found = explain(fault, [fault], others)
    assert found.kind is ExplanationKind.MISSING and "node2" in found.problem


def test_every_node_that_was_hit_has_to_be_named():
    """In one entry or in several."""
    fault = injected("preempt", "node1", "node2")
    both = [shrank("preempted", "node1"), shrank("preempted", "node2", at=110.0)]
    assert explain(fault, [fault], both).kind is ExplanationKind.EXPLAINED
    assert explain(fault, [fault], both[:1]).problem.startswith("no entry on node2")


def test_some_faults_need_no_entry():
    """As with a loose cable: the run has not noticed."""
    fault = injected("flap", "node1")
    assert explain(fault, [fault], []).kind is ExplanationKind.NOT_EXPECTED


@pytest.mark.parametrize(
    ("kind", "entry_kind", "hosts"),
    [("kill-warm-worker", "warm_worker_died", ["node2"]), ("full-disk", "checkpoint_failed", [])],
)
def test_a_fault_that_changes_no_group_has_an_entry_of_its_own(kind, entry_kind, hosts):
    """Of that node, and while it lasts."""
    fault = injected(kind, *hosts)
    facts = {"host": hosts[0]} if hosts else {}
    right = TimelineEntry(entry_kind, 101.0, facts=facts)
    assert explain(fault, [fault], [right]).entries == (right,)
    others = [TimelineEntry(entry_kind, 90.0, facts=facts), shrank("node_lost", "node3")]
    if hosts:
        others.append(TimelineEntry(entry_kind, 101.0, facts={"host": "node3"}))
    found = explain(fault, [fault], others)
    assert found.kind is ExplanationKind.MISSING and entry_kind in found.problem


def test_a_fault_may_share_the_entry_of_one_that_it_overlaps():
    """The group was stopped once, for one of them; but it was stopped."""
    node = injected("kill-node", "node1")
    worker = injected("kill-worker", "node2", number=2, group=1)
    timeline = [shrank("node_lost", "node1")]
    assert explain(node, [node, worker], timeline).kind is ExplanationKind.EXPLAINED
    assert explain(worker, [node, worker], timeline).kind is ExplanationKind.SHARED
    assert explain(worker, [node, worker], []).kind is ExplanationKind.MISSING
    alone = injected("kill-worker", "node2", number=2)
    assert explain(alone, [node, alone], timeline).kind is ExplanationKind.MISSING


def test_a_worker_that_was_stopped_needs_the_verdict_of_a_hang():
    """Its failure alone does not show that it hung."""
    fault = injected("freeze-worker", "node2")
    failed = shrank("worker_failed", "node2")
    hang = TimelineEntry("hang", 101.0, facts={"ranks": [{"rank": 1, "host": "node2"}]})
    assert "'hang'" in explain(fault, [fault], [failed]).problem
    assert explain(fault, [fault], [hang, failed]).kind is ExplanationKind.EXPLAINED


def test_a_damaged_checkpoint_is_not_resumed_from():
    """The one before is, or a newer one."""
    fault = injected("damage", "node2", damaged_step=40)
    missing, explained = ExplanationKind.MISSING, ExplanationKind.EXPLAINED
    for step, kind in ((40, missing), (20, explained), (60, explained)):
        cost = Cost(reached_step=70, resumed_step=step, lost_steps=70 - step, pause_s=1.0)
        found = explain(fault, [fault], [shrank("worker_failed", "node2", cost=cost)])
        assert found.kind is kind
    assert (found.lost_steps, found.pause_s) == (10, 1.0)


GOOD = {"epochs": 3, "times_seen": [3], "digest": "a", "world_size": 2}


@pytest.mark.parametrize(
    ("ranks", "counts", "parameters"),
    [
        ([GOOD, GOOD], [], []),
        (
            [GOOD, GOOD | {"times_seen": [3, 4]}],
            ["rank 1: samples were seen [3, 4] times in 3 epochs"],
            [],
        ),
        (
            [GOOD | {"times_seen": [2]}] * 2,
            [f"rank {rank}: samples were seen [2] times in 3 epochs" for rank in (0, 1)],
            [],
        ),
        ([GOOD, GOOD | {"digest": "b"}], [], ["there are 2 different ones"]),
        ([GOOD], [], ["1 ranks have returned something"]),
        ([], [], ["0 ranks have returned something"]),
    ],
)
def test_the_values_of_the_ranks_are_checked(ranks, counts, parameters):
    """Each sample as often as there were epochs, one digest, and all ranks."""
    assert [list(check.problems) for check in rank_checks(ranks)] == [counts, parameters]


def test_a_change_under_way_does_not_explain_a_fault_that_overlaps():
    """Its cause is not known yet: it may be a node that joins, while the fault is still to come."""
    faults = [injected("preempt", "node2"), injected("slurmctld", number=2, group=1)]
    change = shrank("other", "node3")
    assert explain(faults[0], faults, [change]).kind is ExplanationKind.SHARED
    under_way = replace(change, is_open=True)
    assert explain(faults[0], faults, [under_way]).kind is ExplanationKind.MISSING
