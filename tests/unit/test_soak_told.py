"""Which faults of a soak the run's story explains."""

import pytest

from hpc_elastic.report.causes import Cause, Cost, TimelineEntry
from soak.plan import Fault
from soak.told import Finding, Thrown, tell


def thrown(kind: str, *hosts: str, number: int = 1, **more) -> Thrown:
    """A fault at second 100, over at second 120."""
    fault = Fault(number, kind, 0.0, 0.0, 0)
    return Thrown(fault, hosts, 100.0, 120.0, **{"volley": number, **more})


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
def test_a_fault_is_told_by_its_cause_and_its_host(kind, what):
    """Another cause, another host or another time is another story."""
    fault = thrown(kind, "node2")
    right = shrank(what, "node2")
    assert tell(fault, [fault], [right]).episodes == (right,)
    others = [
        shrank("time_limit", "node2"), shrank(what, "node3"), shrank(what, "node2", at=90.0),
        shrank(what, "node2", at=130.0),
    ]  # fmt: skip
    told = tell(fault, [fault], others)
    assert told.finding is Finding.MISSING and "node2" in told.problem


def test_every_node_that_was_hit_has_to_be_named():
    """In one episode or in several."""
    fault = thrown("preempt", "node1", "node2")
    both = [shrank("preempted", "node1"), shrank("preempted", "node2", at=110.0)]
    assert tell(fault, [fault], both).finding is Finding.TOLD
    assert tell(fault, [fault], both[:1]).problem.startswith("no episode says of node2")


def test_of_some_faults_nothing_has_to_be_told():
    """A loose cable, say: nobody noticed."""
    fault = thrown("flap", "node1")
    assert tell(fault, [fault], []).finding is Finding.NOTHING


@pytest.mark.parametrize(
    ("kind", "aside", "hosts"),
    [("kill-spare", "warm_worker_died", ["node2"]), ("full-disk", "checkpoint_failed", [])],
)
def test_a_fault_that_changes_no_group_has_an_episode_of_its_own(kind, aside, hosts):
    """Of that node, and while it lasts."""
    fault = thrown(kind, *hosts)
    facts = {"host": hosts[0]} if hosts else {}
    right = TimelineEntry(aside, 101.0, facts=facts)
    assert tell(fault, [fault], [right]).episodes == (right,)
    others = [TimelineEntry(aside, 90.0, facts=facts), shrank("node_lost", "node3")]
    if hosts:
        others.append(TimelineEntry(aside, 101.0, facts={"host": "node3"}))
    told = tell(fault, [fault], others)
    assert told.finding is Finding.MISSING and aside in told.problem


def test_what_came_on_the_heels_of_another_may_be_told_with_it():
    """The group was stopped once, for one of them; but it was stopped."""
    node, worker = thrown("kill-node", "node1"), thrown("kill-worker", "node2", number=2, volley=1)
    story = [shrank("node_lost", "node1")]
    assert tell(node, [node, worker], story).finding is Finding.TOLD
    assert tell(worker, [node, worker], story).finding is Finding.SHARED
    assert tell(worker, [node, worker], []).finding is Finding.MISSING
    alone = thrown("kill-worker", "node2", number=2)
    assert tell(alone, [node, alone], story).finding is Finding.MISSING


def test_a_worker_that_was_stopped_is_told_as_a_hang():
    """The verdict is part of the story."""
    fault = thrown("freeze-worker", "node2")
    failed = shrank("worker_failed", "node2")
    hang = TimelineEntry("hang", 101.0, facts={"ranks": [{"rank": 1, "host": "node2"}]})
    assert "'hang'" in tell(fault, [fault], [failed]).problem
    assert tell(fault, [fault], [hang, failed]).finding is Finding.TOLD


def test_a_damaged_checkpoint_is_not_gone_on_from():
    """The one before is, or a newer one."""
    fault = thrown("damage", "node2", damaged_step=40)
    for step, finding in ((40, Finding.MISSING), (20, Finding.TOLD), (60, Finding.TOLD)):
        cost = Cost(reached_step=70, resumed_step=step, lost_steps=70 - step, pause_s=1.0)
        told = tell(fault, [fault], [shrank("worker_failed", "node2", cost=cost)])
        assert told.finding is finding
    assert (told.lost_steps, told.pause_s) == (10, 1.0)
