"""A leader of replicas: whose reports count, and when silence is a loss, one behaviour a test."""

import random
from dataclasses import replace

from leaders import HERE, LIVENESS, join, meanwhile, of, say, told

from groups import A, B, C, D, failure
from hpc_elastic.rendezvous.effects import Announce, Append, Note, PublishResult, RenewLease, places
from hpc_elastic.rendezvous.leader_state import LeaderState
from hpc_elastic.rendezvous.log_entry import Agent, Endpoint, LogEntry, RoundRules, claim
from hpc_elastic.rendezvous.messages import Failed, Finished, Reattach, Stop
from hpc_elastic.run.events import LossReason

B2 = Agent(B.task, 1, B.slot, "node9", 1)


def leading(entry: LogEntry | None = None, **changes) -> LeaderState:
    """A leader that has just claimed its term, at time 0."""
    defaults = {
        "min_nodes": 1, "max_nodes": 4, "max_restarts": 2,
        "straggler_timeout_s": 60.0, "last_call_s": 5.0, "below_min_timeout_s": None, "ft": True,
    }  # fmt: skip
    entry = entry or claim(1, None, HERE, 1000.0)
    rules = RoundRules(**{**defaults, **changes})
    return LeaderState(entry, rules, LIVENESS, 0.0, random.Random(1))


def training(*agents: Agent, room: int = 0) -> LeaderState:
    """A leader whose first round was announced at time 1."""
    leader = leading(max_nodes=len(agents))
    for agent in agents:
        join(leader, agent, 1.0)
    leader.appended()
    leader.run.rules = replace(leader.run.rules, max_nodes=len(agents) + room)
    return leader


def after(*members: Agent) -> LeaderState:
    """A leader that took over, at time 0, from node 9's."""
    before = LogEntry(4, 2, Endpoint("10.0.0.7", 1, "7_7", 0), round=3, members=members)
    return leading(claim(5, before, HERE, 1000.0))


def here(leader: LeaderState, agent: Agent, now: float, entry: int = 4) -> list:
    """Let an agent connect and say that it is here."""
    connected = leader.connected(agent, now)
    return [
        *connected,
        *say(leader, agent, Reattach(index=entry, number=3, replica=agent.slot), now),
    ]


def test_each_node_is_a_group_of_its_own():
    """It gets ranks among its own workers only."""
    two = replace(B, nproc=2)
    leader = leading(max_nodes=2)
    join(leader, A, 1.0)
    join(leader, two, 1.0)
    (announce,) = of(leader.appended(), Announce)
    placed = dict(places(announce))
    assert [(p.first_rank, p.world_size, p.group_size) for p in placed.values()] == [
        (0, 1, 1),
        (0, 2, 1),
    ]


def test_only_a_newcomer_is_told_of_its_round():
    """It is announced once it is recorded; the entry names all."""
    leader = training(A, B, room=1)
    (append,) = of(join(leader, C, 2.0), Append)
    assert append.entry.members == (A, B, C)
    (announce,) = of(leader.appended(), Announce)
    assert [agent for agent, _ in places(announce)] == [C]


def test_reports_count_by_the_round_that_placed_the_reporter():
    """Others have been admitted since."""
    leader = training(A, B, room=1)
    mine = leader.at.index
    join(leader, C, 2.0)
    leader.appended()
    failed = Failed([failure(B)], index=mine)
    assert told(say(leader, B, failed, 3.0), Stop) == [B]
    assert told(say(leader, C, failed, 3.0), Stop) == []


def test_a_departure_is_recorded():
    """The next leader does not wait for it, and it can commit no checkpoint."""
    leader = training(A, B)
    (append,) = of(leader.disconnected(B, LossReason.CONNECTION_CLOSED, 2.0), Append)
    assert append.entry.members == (A,) and append.entry.lost == {B.task: 0}
    departed = {"task": B.task, "host": B.host, "nodes": 1}
    assert leader.appended() == [Note("replica_left", departed)]


def test_members_are_here_under_the_next_leader():
    """Nobody is told to stop, no round is closed, and their reports count."""
    leader = after(A, B)
    assert told([*here(leader, A, 0.1), *here(leader, B, 0.2)], Stop) == []
    assert of(say(leader, A, Finished(index=4), 1.0), Append) == []
    (append,) = of(say(leader, B, Finished(index=4), 1.0), Append)
    assert append.entry.ending is not None
    assert of(leader.appended(), PublishResult)


def test_who_does_not_find_the_next_leader_is_gone_after_a_while():
    """The others go on meanwhile."""
    leader = after(A, B, C)
    here(leader, A, 0.1)
    here(leader, B, 0.1)
    effects = meanwhile(leader, 5.5, A, B, since=0.1)
    assert of(effects, Append) == []
    (append,) = of(meanwhile(leader, 7.0, A, B, since=6.0), Append)
    assert append.entry.members == (A, B)


def test_a_leader_that_hears_nobody_takes_nobody_for_lost_at_first():
    """It may be the one that is cut off; if nobody else leads by then, the others are dead."""
    leader = training(A, B, C, D)
    effects = meanwhile(leader, 5.0, A)
    assert of(effects, Append) == []
    assert leader.is_cut_off(5.0)
    assert RenewLease() not in leader.tick(5.0)
    effects = meanwhile(leader, 12.0, A, since=5.5)
    assert not leader.is_cut_off(12.0)
    assert of(effects, Append)


def test_who_is_heard_again_while_the_leader_is_cut_off_stays():
    """The network was down for a moment."""
    leader = training(A, B, C, D)
    meanwhile(leader, 5.0, A)
    for agent in (B, C, D):
        here(leader, agent, 5.5, entry=leader.at.index)
    assert not leader.is_cut_off(5.5)
    assert of(meanwhile(leader, 12.0, A, B, C, D, since=5.5), Append) == []
    assert leader.rounds.run.ranks.members == (A, B, C, D)


def test_below_min_nodes_no_lease_is_renewed():
    """Whoever can not reach this leader may try to lead: this one can decide nothing."""
    leader = leading(min_nodes=2, max_nodes=2)
    join(leader, A, 1.0)
    join(leader, B, 1.0)
    leader.appended()
    assert RenewLease() in leader.tick(1.5)
    leader.disconnected(B, LossReason.CONNECTION_CLOSED, 2.0)
    assert RenewLease() not in leader.tick(2.5)
