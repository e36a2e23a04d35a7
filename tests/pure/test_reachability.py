"""Which agents reach which others, and the smallest set of nodes that a round leaves out."""

import random
from dataclasses import replace
from itertools import combinations

import pytest

from groups import FIRST, A, B, C, D, decisions, kind, machine, notes, running
from hpc_elastic.rendezvous.effects import Send
from hpc_elastic.rendezvous.log_entry import Agent, Endpoint, Failure, RoundRules
from hpc_elastic.rendezvous.messages import Join, Probe, Probed
from hpc_elastic.rendezvous.reachability import (
    ANSWER_S,
    RETRY_S,
    Reachability,
    smallest_cover,
)
from hpc_elastic.rendezvous.replica_state import ReplicaState
from hpc_elastic.rendezvous.round_state import RoundPhase, RoundState
from hpc_elastic.run.events import LossReason

AGENTS = tuple(Agent(f"7_{slot}", 0, slot, f"node{slot + 1}", 1) for slot in range(300))


def graph_of(pairs):
    """A graph from its pairs."""
    graph = {}
    for a, b in pairs:
        graph.setdefault(a, set()).add(b)
        graph.setdefault(b, set()).add(a)
    return graph


def cover(pairs):
    """A smallest set of agents that touches each pair."""
    graph = graph_of(pairs)
    return smallest_cover(graph, sorted(graph, key=lambda a: a.slot))


def touches_all(chosen, pairs):
    """Whether one of each pair is chosen."""
    return all(a in chosen or b in chosen for a, b in pairs)


def test_the_left_out_set_is_the_smallest():
    """Compared with all sets, for random graphs of seven nodes."""
    rng = random.Random(1)
    for _ in range(200):
        share = rng.random()
        pairs = [p for p in combinations(AGENTS[:7], 2) if rng.random() < share]
        found = cover(pairs)
        assert touches_all(found, pairs)
        smaller = combinations(AGENTS[:7], max(0, len(found) - 1))
        assert not found or not any(touches_all(set(s), pairs) for s in smaller)


def test_large_groups_are_decided_soon():
    """Halves that do not reach each other, one node without a link, and random cuts of 64 nodes."""
    halves = [(a, b) for a in AGENTS[:32] for b in AGENTS[32:64]]
    assert len(cover(halves)) == 32
    assert cover([(AGENTS[5], b) for b in AGENTS[6:64]]) == {AGENTS[5]}
    rng = random.Random(2)
    pairs = [p for p in combinations(AGENTS[:64], 2) if rng.random() < 0.5]
    assert touches_all(cover(pairs), pairs)


class Network:
    """Answers the probes of a run's agents."""

    def __init__(self, rounds, cut=(), silent=()):
        self.rounds, self.cut, self.silent = rounds, set(cut), set(silent)
        self.num_probes = 0

    def join(self, *agents, now=0.0):
        """Let these agents join, with a port each; return the effects."""
        effects = []
        for agent in agents:
            self.rounds.run.reach.add(agent, [("10.0.0.1", 1 + agent.slot)])
            effects += self.rounds.join(agent, now, Join(1))
        return [*effects, *self.carry_on(effects, now)]

    def carry_on(self, effects, now):
        """Answer the probes in these effects, and those that follow; return all effects."""
        found = []
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Probe):
                (agent,) = effect.agents
                peers = effect.message.peers
                self.num_probes += len(peers)
                if agent in self.silent:
                    continue
                failed = [t for t in peers if (agent.task, t) in self.cut]
                number = effect.message.number
                self.rounds.run.reach.answered(agent, Probed(number, failed))
                found += self.rounds.tick(now)
        return [*found, *self.carry_on(found, now)] if found else []

    def tick(self, now):
        """Let time pass."""
        effects = self.rounds.tick(now)
        return [*effects, *self.carry_on(effects, now)]

    def form(self, *agents, now=0.0):
        """Let these agents join, which are all tasks of the run; return the effects."""
        return [*self.join(*agents, now=now), *self.slurm(*agents, now=now)]

    def slurm(self, *agents, now=0.0):
        """Slurm reports that these are all tasks."""
        effects = self.rounds.slurm_answered(running(*agents), now, now)
        return [*effects, *self.carry_on(effects, now)]


def pair(a, b):
    """A cut in both directions."""
    return [(a.task, b.task), (b.task, a.task)]


def members(network):
    """The members of the last round."""
    return network.rounds.run.ranks.members


def start(cut=(), silent=(), agents=(A, B, C, D), **rules):
    """A run whose agents have joined and are all that there are."""
    network = Network(machine(**rules), cut, silent)
    return network, network.form(*agents)


@pytest.mark.parametrize("directions", ["both", "one", "other"])
def test_a_round_leaves_the_smallest_set_of_nodes_out(directions):
    """A pair of followers that do not reach each other, in one direction or in both."""
    cut = {"both": pair(C, D), "one": pair(C, D)[:1], "other": pair(C, D)[1:]}[directions]
    network, effects = start(cut)
    assert members(network) == (A, B, C)
    (note,) = notes(effects, "left_out")
    assert note.fields["hosts"] == ["node4"] and note.fields["cut"] == ["node4 - node3"]


def test_a_node_that_reaches_nobody_is_left_out_alone():
    """It is in each of the pairs."""
    network, _ = start([*pair(B, A), *pair(B, C), *pair(B, D)])
    assert members(network) == (A, C, D)


def test_a_healthy_group_closes_at_once_and_is_probed_once():
    """Twelve probes for four nodes; the next round of the same nodes sends none."""
    network, effects = start()
    assert members(network) == (A, B, C, D) and not notes(effects, "left_out")
    assert network.num_probes == 12
    network.rounds._break(1.0, "a newcomer", "regroup")
    network.form(A, B, C, D, now=1.0)
    assert network.rounds.run.phase is RoundPhase.RUNNING and network.num_probes == 12


def test_a_newcomer_is_probed_against_the_members_before_it_is_admitted():
    """One that does not reach a member waits; the others go on."""
    network, _ = start(pair(A, D), agents=(A, B, C))
    effects = network.join(D, now=5.0)
    assert members(network) == (A, B, C) and network.rounds.run.phase is RoundPhase.RUNNING
    assert notes(effects, "left_out")[0].fields["hosts"] == ["node4"]
    network.cut.clear()
    effects = network.tick(5.0 + RETRY_S)
    assert "stop" in map(kind, decisions(effects))  # scale_up=immediate: it joins now
    assert notes(effects, "left_out")[0].fields["hosts"] == []


def test_all_pairs_are_probed_again_after_a_failure_which_costs_nothing_if_a_cut_explains_it():
    """A pair that is cut during a round: its workers fail, and no restart is spent."""
    network, _ = start(agents=(A, B, C))
    network.cut.update(pair(B, C))
    failure = Failure(B.task, B.host, 1, 0, 5.0, "Timed out waiting 1800000ms", exit_code=1)
    network.rounds.worker_failed([failure], B, 5.0)
    network.form(A, B, C, now=6.0)
    assert members(network) == (A, B)
    assert network.rounds.run.policy.restarts == 0


def test_a_cut_in_a_round_breaks_it_without_a_failure():
    """A member reports that it makes no step: the pairs are probed."""
    network, _ = start(agents=(A, B, C))
    network.cut.update(pair(B, C))
    network.rounds.run.reach.suspect(40.0)
    effects = network.tick(40.0)
    (stopped,) = notes(effects, "round_stopped")
    assert stopped.fields["cause"] == "cut_off"
    assert "node3 and node2 do not reach each other" in stopped.fields["reason"]
    network.form(A, B, C, now=41.0)
    assert members(network) == (A, B) and network.rounds.run.policy.restarts == 0


def test_a_failure_of_its_own_costs_a_restart_while_another_node_is_left_out():
    """The node was not in the round that failed."""
    network, _ = start(pair(C, D))
    failure = Failure(B.task, B.host, 1, 0, 5.0, "ValueError: no", exit_code=1)
    network.rounds.worker_failed([failure], B, 5.0)
    network.form(A, B, C, now=6.0)
    assert members(network) == (A, B, C) and network.rounds.run.policy.restarts == 1


def test_too_few_nodes_that_reach_each_other_wait_and_are_probed_again():
    """With min_nodes=3, three nodes with a cut do not train until it is healed."""
    network, _ = start(pair(B, C), agents=(A, B, C), min_nodes=3)
    assert network.rounds.run.phase is RoundPhase.FORMING
    network.cut.clear()
    network.tick(RETRY_S + 1)
    assert members(network) == (A, B, C)


def test_a_node_that_does_not_answer_is_neither_reached_nor_cut():
    """The round waits for its answer for a bounded time, and then closes with it."""
    network, _ = start(silent=[B])
    assert network.rounds.run.phase is RoundPhase.FORMING
    network.tick(ANSWER_S)
    assert members(network) == (A, B, C, D)


def test_an_agent_without_a_port_is_not_probed():
    """Agents of an earlier version, for example."""
    rounds = machine()
    for agent in (A, B):
        rounds.join(agent, 0.0)
    rounds.slurm_answered(running(A, B), 0.0, 0.0)
    assert rounds.run.ranks.members == (A, B)


def test_the_leader_and_the_node_that_was_left_out_before_decide_between_two():
    """Of two nodes the one that leads stays, and the choice does not alternate."""
    run = RoundState(
        replace(FIRST, leader=Endpoint("10.0.0.1", 1, D.task, 0)), machine().run.rules, 0.0,
        random.Random(1),
    )  # fmt: skip
    network = Network(run, pair(C, D))
    network.form(A, B, C, D)
    assert members(network) == (A, B, D)
    network.rounds._break(50.0, "x", "node_lost")
    network.form(A, B, C, D, now=50.0)
    assert members(network) == (A, B, D)


def test_a_group_of_thousands_probes_few_pairs():
    """Each agent has logarithmically many peers; 64 nodes probe all pairs."""
    for size, most in ((64, 63), (300, 18)):
        reach = Reachability()
        for agent in AGENTS[:size]:
            reach.add(agent, [("10.0.0.1", 1)])
        sent = reach.probe(AGENTS[:size], 0.0)
        assert len(sent) == size
        assert max(len(e.message.peers) for e in sent) == most


def test_replicas_that_do_not_reach_each_other_are_left_out():
    """With ft=true: before the first round, and when steps fail later."""
    rules = RoundRules(1, 4, 2, 60.0, 5.0, ft=True)
    network = Network(ReplicaState(FIRST, rules, 0.0, random.Random(1)), pair(C, D))
    network.form(A, B, C, D)
    assert members(network) == (A, B, C)
    network.cut.update(pair(B, C))
    network.rounds.run.reach.suspect(100.0)
    effects = network.tick(100.0)
    assert members(network) == (A, B)
    assert any(kind(d) == "stop" and d.agents == (C,) for d in decisions(effects))


def test_replicas_below_min_nodes_give_way_to_a_group_that_is_large_enough():
    """One member does not reach two nodes that wait: the others are min nodes without it."""
    rules = RoundRules(3, 4, 2, 60.0, 5.0, ft=True)
    network = Network(ReplicaState(FIRST, rules, 0.0, random.Random(1)))
    network.form(A, B, C)
    network.rounds.agent_lost(A, LossReason.SILENT, 50.0)
    assert members(network) == (B, C)
    network.cut.update((*pair(C, A), *pair(C, D)))
    network.join(replace(A, attempt=1), D, now=60.0)
    network.tick(61.0)
    assert set(members(network)) == {B, replace(A, attempt=1), D}
