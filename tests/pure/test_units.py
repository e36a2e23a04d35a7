"""Units: nodes that only work together, in one group and as replicas; one behaviour a test."""

import random
from dataclasses import replace

import pytest

from groups import (
    FIRST,
    A,
    B,
    C,
    D,
    closed,
    decisions,
    departed,
    ended,
    failure,
    kind,
    machine,
    notes,
    running,
)
from hpc_elastic.config.parse import parse_nodes
from hpc_elastic.config.schema import NodeRange
from hpc_elastic.errors import ConfigError
from hpc_elastic.rendezvous.effects import Announce, places
from hpc_elastic.rendezvous.log_entry import Agent, Endpoint, LogEntry, RoundRules
from hpc_elastic.rendezvous.messages import Join, Reattach
from hpc_elastic.rendezvous.replica_state import ReplicaState
from hpc_elastic.rendezvous.round_state import RankAssignment, RoundPhase, nearest_units
from hpc_elastic.slurm.environment import SlurmEnvironment

E, F = (Agent(f"7_{slot}", 0, slot, f"node{slot + 1}", 1) for slot in (4, 5))


def under(agent: Agent, switches: str) -> Agent:
    """An agent below these switches."""
    return replace(agent, switches=switches)


def rules(unit: int = 2, **changes) -> RoundRules:
    """Two to four nodes, two restarts."""
    defaults = {
        "min_nodes": unit, "max_nodes": 2 * unit, "max_restarts": 2,
        "straggler_timeout_s": 60.0, "last_call_s": 5.0, "below_min_timeout_s": None,
        "unit_nodes": unit,
    }  # fmt: skip
    return RoundRules(**{**defaults, **changes})


# ---- what a user writes -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "nodes"),
    [("4:16:4", NodeRange(4, 16, 4)), ("2:2:2", NodeRange(2, 2, 2)), ("1:8:1", NodeRange(1, 8))],
)
def test_a_range_in_multiples(value, nodes):
    """The third number is the nodes that work together."""
    assert parse_nodes(value, from_yaml=True) == nodes


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ("4:15:4", "write nodes: '4:16:4'"),
        ("1:4:2", "write nodes: '2:4:2'"),
        ("4:4:0", "such as '1:16'"),
        ("8:4:2", "write nodes: '4:8:2'"),
        (4 * 3600 + 16 * 60 + 4, "write nodes: '4:16:4'"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_with_those_that_do(value, remedy):
    """At submission, also where YAML has read the range as one number."""
    with pytest.raises(ConfigError) as caught:
        parse_nodes(value, from_yaml=True)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("address", "pattern", "switches"),
    [
        ("root.leaf2.n7", "switch.switch.node", "root.leaf2"),
        ("n7", "node", ""),
        (None, None, ""),
        ("root.leaf2.n7", None, ""),
    ],
)
def test_the_switches_of_a_node(address, pattern, switches):
    """As Slurm's topology plugin reports them."""
    given = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    found = {name: text for name, text in given.items() if text is not None}
    assert SlurmEnvironment(found).switches == switches


# ---- which nodes are a unit ---------------------------------------------------------------


def test_units_are_below_one_switch_where_there_are_enough_nodes():
    """What remains below one switch is combined below the next level."""
    nodes = [under(a, s) for a, s in zip((A, B, C, D, E, F), "xyxyxy", strict=True)]
    a, b, c, d, e, f = (under(n, f"root.{n.switches}") for n in nodes)
    assert nearest_units((a, b, c, d, e, f), 2) == [(a, c), (b, d), (e, f)]
    assert nearest_units((a, b, c, d, e, f), 3) == [(a, c, e), (b, d, f)]
    assert nearest_units((a, b, c, d), 3) == [(a, b, c)]


def test_a_unit_that_goes_on_keeps_its_ranks():
    """Its nodes are not exchanged."""
    before = RankAssignment((C, D, A, B))
    assert before.next([A, B, C, D, E], rules(max_nodes=6)).members == (C, D, A, B)


def test_a_unit_that_lost_a_node_is_completed_in_its_place():
    """By a node below the same switch, if there is one."""
    a, b, c, d = (under(n, s) for n, s in zip((A, B, C, D), "xxyy", strict=True))
    e, f = under(E, "x"), under(F, "y")
    before = RankAssignment((a, b, c, d))
    assert before.next([a, b, c, e, f], rules()).members == (a, b, c, f)
    assert before.next([b, c, d, e, f], rules()).members == (b, e, c, d)


def test_nodes_that_make_no_whole_unit_are_left_over():
    """Of two incomplete units one is made."""
    before = RankAssignment((A, B, C, D))
    assert before.next([A, B, C], rules()).members == (A, B)
    assert before.next([A, C], rules()).members == (A, C)
    assert before.next([A], rules()).members == ()


# ---- one group ----------------------------------------------------------------------------


def training(*agents: Agent, **changes):
    """A run of pairs whose first round has closed."""
    m = machine(**{"min_nodes": 2, "unit_nodes": 2, "max_nodes": 6, **changes})
    for agent in agents:
        m.join(agent, 0.0)
    m.slurm_answered(running(*agents), 0.0, 0.0)
    assert m.run.phase is RoundPhase.RUNNING
    return m


def test_a_group_has_whole_units():
    """The node that remains waits."""
    m = training(A, B, C)
    assert m.run.ranks.members == (A, B) and list(m.run.participants.joined) == [C]


def test_a_group_grows_by_a_unit():
    """Not before the unit is there."""
    m = training(A, B, C)
    (note,) = notes(m.tick(1.0), "scale_up_decision")
    decision = note.fields
    assert (decision["admit"], "2 nodes at a time" in decision["why"]) == ("not now", True)
    (told,) = decisions(m.join(D, 2.0))
    assert kind(told) == "stop"
    m.join(A, 3.0)
    m.join(B, 3.0)
    m.slurm_answered(running(A, B, C, D), 4.0, 4.0)
    assert m.run.ranks.members == (A, B, C, D)


def test_a_spare_takes_the_place_of_a_lost_node_without_slurm():
    """Slurm may still report the lost one as running."""
    m = training(A, B, C)
    m.agent_lost(B, "lost", 1.0)
    m.join(A, 1.5)
    assert decisions(m.slurm_answered(running(A, B, C), 2.0, 2.0)) == [closed(2, (A, C), 0)]


def test_a_spare_is_kept_however_long_it_waits():
    """More nodes than that go back to the queue when their time is over."""
    m = training(A, B, C, below_min_timeout_s=10.0, scale_up="on_restart")
    assert decisions(m.tick(1000.0)) == []
    m.join(D, 1000.0)
    m.join(E, 1000.0)
    (requeued,) = decisions(m.tick(2000.0))
    assert requeued.agents == (D, E)


def test_without_a_spare_the_group_shrinks_by_a_unit():
    """The node that is left over is the next spare."""
    m = training(A, B, C, D)
    m.agent_lost(B, "lost", 1.0)
    m.join(A, 1.5)
    m.join(C, 1.5)
    assert decisions(m.join(D, 1.5)) == []  # Slurm may start the lost task at once
    assert decisions(m.slurm_answered(running(A, C, D), 2.0, 2.0)) == [closed(2, (C, D), 0)]
    assert list(m.run.participants.joined) == [A]


# ---- sizes that are listed ----------------------------------------------------------------


def of_sizes(*agents: Agent, sizes=(1, 2, 4), **changes):
    """A run with some sizes only, whose first round has closed."""
    m = machine(min_nodes=sizes[0], max_nodes=sizes[-1], node_counts=sizes, **changes)
    for agent in agents:
        m.join(agent, 0.0)
    m.slurm_answered(running(*agents), 0.0, 0.0)
    return m


def test_a_group_has_a_listed_size():
    """The nodes that are over wait; the group grows when there are enough for the next size."""
    m = of_sizes(A, B, C)
    assert m.run.ranks.members == (A, B) and list(m.run.participants.joined) == [C]
    (note,) = notes(m.tick(1.0), "scale_up_decision")
    assert (note.fields["admit"], note.fields["why"]) == (
        "not now", "the group grows by 2 nodes at a time",
    )  # fmt: skip
    (told,) = decisions(m.join(D, 2.0))
    assert kind(told) == "stop"
    m.join(A, 3.0)
    m.join(B, 3.0)
    m.slurm_answered(running(A, B, C, D), 4.0, 4.0)
    assert m.run.ranks.members == (A, B, C, D)


def test_a_group_shrinks_to_a_listed_size():
    """The members of the lowest ranks go on; what is over takes the place of the next lost one."""
    m = of_sizes(A, B, C, D)
    m.agent_lost(B, "lost", 1.0)
    for agent in (A, C, D):
        m.join(agent, 1.5)
    m.slurm_answered(running(A, C, D), 2.0, 2.0)
    assert m.run.ranks.members == (A, C)
    m.agent_lost(A, "lost", 3.0)
    m.join(C, 3.5)
    m.slurm_answered(running(C, D), 4.0, 4.0)
    assert m.run.ranks.members == (C, D)


def test_a_node_that_no_listed_size_needs_returns_to_the_queue():
    """After the time that a node waits for others."""
    m = of_sizes(A, B, C, below_min_timeout_s=10.0)
    (requeued,) = decisions(m.tick(2000.0))
    assert requeued.agents == (C,)


def test_growth_is_limited_to_listed_sizes():
    """A share of nodes between two sizes is the lower one."""
    m = of_sizes(A, B, C, D)
    m.run.growth.share = 3
    m.tick(100.0)
    assert m.run.growth.max_nodes == 2


# ---- replicas -----------------------------------------------------------------------------


def replicas(*agents: Agent, **changes) -> ReplicaState:
    """A run whose replicas are pairs; its first round has closed, and all are in a quorum."""
    m = ReplicaState(FIRST, rules(ft=True, max_nodes=6, **changes), 0.0, random.Random(1))
    for agent in agents:
        m.join(agent, 0.0)
    m.slurm_answered(running(*agents), 0.0, 0.0)
    assert m.run.phase is RoundPhase.RUNNING
    for agent in m.run.ranks.members:
        m.joined_quorum(agent)
    return m


def resumed(*members: Agent, lost: dict[str, int]) -> ReplicaState:
    """The rules of the next leader."""
    leader = Endpoint("10.0.0.1", 4000, A.task, 0)
    entry = LogEntry(9, 3, leader, round=4, members=members, lost=lost)
    return ReplicaState(entry, rules(ft=True, max_nodes=6), 0.0, random.Random(1))


def test_each_unit_has_ranks_and_a_store_of_its_own():
    """The store of its first node."""
    store = ("10.0.0.3", 4711)
    requests = {a: Join(1) for a in (A, B, D)} | {C: Join(1, store)}
    entry = LogEntry(5, 1, FIRST.leader, round=2, members=(A, B, C, D))
    found = dict(places(Announce(entry, requests, {0: (A, B), 3: (C, D)})))
    assert [(found[a].group_rank, found[a].group_size) for a in (C, D)] == [(0, 2), (1, 2)]
    assert [(found[a].first_rank, found[a].world_size) for a in (C, D)] == [(0, 2), (1, 2)]
    assert (found[D].store, found[D].replica, found[B].replica) == (store, 3, 0)


def test_a_replica_is_admitted_once_its_unit_is_whole():
    """Nobody else is stopped."""
    m = replicas(A, B)
    assert decisions(m.join(C, 1.0)) == []
    assert decisions(m.join(D, 2.0)) == [closed(2, (A, B, C, D), 0, (C, D))]


def test_the_partner_of_a_lost_node_is_a_spare():
    """It stops its workers, and completes the next unit."""
    m = replicas(A, B, C, D)
    departure, told = decisions(m.agent_lost(B, "lost", 1.0))
    assert departure == departed(B, (C, D)) and told.agents == (A,)
    assert decisions(m.join(A, 2.0)) == []
    departure, told = decisions(m.agent_lost(C, "lost", 3.0))
    assert departure == departed(C, ()) and told.agents == (D,)
    assert m.run.phase is RoundPhase.FORMING
    m.join(D, 4.0)
    assert decisions(m.slurm_answered(running(A, D), 5.0, 5.0)) == [closed(2, (A, D), 0, (A, D))]


def test_a_replica_has_a_number_that_no_other_has():
    """The lowest that is free, below the most replicas, if that of its first node is taken."""
    m = replicas(A, B, C, D)
    m.agent_lost(B, "lost", 1.0)
    m.join(A, 2.0)
    m.agent_lost(D, "lost", 2.0)
    m.join(C, 3.0)
    m.join(replace(B, attempt=1), 3.0)
    assert {p.replica for p in m.placed.values()} <= {0, 1, 2}
    m = replicas(C, D, E, F)
    assert {a: p.replica for a, p in m.placed.items()} == {C: 1, D: 1, E: 2, F: 2}


def test_a_failed_worker_restarts_its_whole_unit_once():
    """Its partner fails of that; both reports are one failure."""
    m = replicas(A, B, C, D)
    (told,) = decisions(m.worker_failed([failure(B)], B, 1.0))
    assert kind(told) == "stop" and set(told.agents) == {A, B}
    m.worker_failed([failure(A)], A, 1.1)
    assert m.run.policy.restarts == 1
    (told,) = decisions(m.join(A, 2.0))
    assert (kind(told), told.agents) == ("stop", (B,))
    assert decisions(m.join(B, 2.0)) == [closed(2, (A, B, C, D), 1, (A, B))]


def test_the_failure_of_a_lost_nodes_partner_does_not_count():
    """Its collective broke before the leader had seen the loss."""
    m = replicas(A, B, C, D)
    m.worker_failed([failure(A)], A, 1.0)
    m.agent_lost(B, "lost", 1.1)
    m.join(A, 2.0)
    assert m.run.policy.restarts == 0


def test_the_run_has_succeeded_once_all_nodes_of_all_units_are_done():
    """The results are those of the first replica that is done."""
    m = replicas(A, B, C, D)
    assert decisions(m.finished(C, 1.0)) == []
    assert decisions(m.finished(D, 1.0)) == []
    m.finished(A, 2.0)
    assert decisions(m.finished(B, 2.0)) == [ended("succeeded", results="round-1.replica-1")]


def test_the_partner_of_a_lost_leader_is_a_spare():
    """The next leader decides so, and stops it when it reattaches."""
    m = resumed(A, B, C, D, lost={A.task: 0})
    assert decisions(m.drop_losses()) == [departed(A, (C, D))]
    m.reattached(C, Reattach(9, 4, 1), 0.5)
    (told,) = decisions(m.reattached(B, Reattach(9, 4, 0), 0.6))
    assert (kind(told), told.agents) == ("stop", (B,))
    m.reattached(D, Reattach(9, 4, 1), 0.7)
    m.join(B, 1.0)
    assert decisions(m.join(E, 2.0)) == [closed(5, (C, D, B, E), 0, (B, E))]
    assert m.placed[B].replica == 0


def test_only_the_first_node_represents_its_replica():
    """At the lighthouse: a spare or a second node is no replica."""
    m = replicas(A, B, C)
    assert [m.is_first(a) for a in (A, B, C)] == [True, False, False]
