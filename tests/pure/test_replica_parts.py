"""What else differs for replicas: their agent, their lighthouse, the fence, the settings."""

import json
import random

import pytest

from followers import ENTRY, LEADER, LIVENESS, delivered, place, request_of
from groups import A, B, C, failure
from hpc_elastic import should_checkpoint
from hpc_elastic.config.resolve import resolve
from hpc_elastic.errors import CheckpointFencedError, ConfigError
from hpc_elastic.ft.messages import (
    NO_QUORUM,
    QuorumAborted,
    QuorumRequest,
    QuorumResults,
    ReplicaStatus,
    Shutdown,
    WorkersLost,
)
from hpc_elastic.rendezvous.effects import Connect, Deliver, ReadLog, Send, SendToLeader
from hpc_elastic.rendezvous.follower_state import FollowerState
from hpc_elastic.rendezvous.leader_state import LeaderState
from hpc_elastic.rendezvous.log_entry import LogEntry, RoundRules, RunEnding, claim
from hpc_elastic.rendezvous.messages import (
    TO_LEADER,
    Failed,
    Finished,
    QuorumMessage,
    Reattach,
    Stop,
)
from hpc_elastic.rendezvous.replica_state import SETTLES_WITHIN_S
from hpc_elastic.run import fencing
from hpc_elastic.transport.messages import unpack
from hpc_elastic.worker import checkpoint_trigger

# ---- an agent without its leader ----------------------------------------------------------


def connected(f: FollowerState, entry: LogEntry, now: float) -> list:
    """Let an agent find the leader of an entry; return what it does then."""
    f.tick(now)
    assert Connect(entry) in f.log_read(entry.index, entry, 1, now)
    return f.connected(now)


def placed() -> FollowerState:
    """A replica's agent with a place in a round."""
    f = FollowerState(B, LIVENESS, 0.0, stays=True)
    f.join()
    ask = request_of(connected(f, ENTRY, 0.0))
    f.received(place(ask, ENTRY.index), 0.0)
    return f


def test_the_leaders_death_does_not_stop_the_workers():
    """The agent looks for the next leader at once, and tells him by which entry it is here."""
    f = placed()
    effects = f.disconnected("reset", 1.0)
    assert delivered(effects, Stop) == [] and ReadLog() in effects
    newer = claim(6, ENTRY, LEADER, 1000.0)
    f.log_read(ENTRY.index, ENTRY, 1, 1.0)
    f.not_connected("refused", 1.1, refused=True)
    assert connected(f, newer, 2.0) == [SendToLeader(Reattach(index=5, number=2, replica=0))]


def test_what_became_of_the_workers_meanwhile_is_told_again():
    """The leader before may not have recorded it."""
    f = placed()
    f.report(Finished())
    f.disconnected("reset", 1.0)
    f.log_read(ENTRY.index, ENTRY, 1, 1.0)
    f.not_connected("refused", 1.1, refused=True)
    effects = connected(f, claim(6, ENTRY, LEADER, 1000.0), 2.0)
    assert [type(e.message) for e in effects] == [Reattach, Finished]
    assert effects[1].message.index == 5


def test_a_leader_that_wants_them_stopped_is_obeyed():
    """Then the agent joins anew."""
    f = placed()
    stop = Stop(reason="formed anew")
    assert f.received(stop, 1.0) == [Deliver(stop)]
    assert request_of(f.join()) > 0


# ---- the lighthouse beside the leader ------------------------------------------------------


ASK = QuorumRequest(
    quorum_step=0, step=0, state_version="t", quorum_id=NO_QUORUM, commit_failures=0,
    min_replicas=1, shrink_only=False, store="host:1", metadata=("m",),
)  # fmt: skip


def quorum() -> LeaderState:
    """The leader of B and C; B is in a quorum, with none beside it, and C is new."""
    before = LogEntry(4, 2, LEADER, round=3, members=(B, C))
    rules = RoundRules(1, 4, 2, 60.0, 5.0, ft=True)
    leader = LeaderState(claim(5, before, LEADER, 0.0), rules, LIVENESS, 0.0, random.Random(1))
    for agent in (B, C):
        leader.connected(agent, 0.0)
        leader.received(agent, Reattach(index=4, number=3, replica=agent.slot), 0.0)
    says(leader, B, ReplicaStatus(7, 0, 1, 0, is_aborted=False), 0.0)
    says(leader, C, ReplicaStatus(NO_QUORUM, 0, 0, 0, is_aborted=False), 0.0)
    return leader


def says(leader: LeaderState, agent, message, now: float) -> list:
    """Let an agent's replica send a message; what is sent to replicas then."""
    return sent(leader.received(agent, QuorumMessage(message), now))


def sent(effects: list) -> list:
    """What is sent to replicas: whom, and the message."""
    sends = [e for e in effects if isinstance(e, Send) and isinstance(e.message, QuorumMessage)]
    return [(e.agents[0], e.message.message) for e in sends]


def passes(leader: LeaderState, since: float, until: float) -> list:
    """Let time pass; what is sent to replicas."""
    ticks = [since + 0.05 * n for n in range(int((until - since) / 0.05) + 1)]
    return [s for now in ticks for s in sent(leader.tick_quorum(now))]


def is_placed(told: list, agent) -> bool:
    """Whether an agent's replica is given a place in a quorum."""
    return any(to == agent and isinstance(m, QuorumResults) for to, m in told)


def test_a_replica_that_gets_a_place_takes_part():
    """From then on the run waits for it."""
    leader = quorum()
    says(leader, B, WorkersLost("it ended"), 1.0)
    leader.received(B, Failed([failure(B)], index=4), 1.0)
    assert is_placed([*says(leader, C, ASK, 1.1), *passes(leader, 1.1, 3.0)], C)
    assert C in leader.rounds.taking_part


def test_a_newcomer_waits_while_another_ends():
    """If that one is done, the newcomer would begin alone from the start."""
    leader = quorum()
    says(leader, B, Shutdown(), 1.0)
    told = [*says(leader, C, ASK, 1.1), *passes(leader, 1.1, 1.0 + SETTLES_WITHIN_S)]
    leader.received(B, Finished(index=4), 1.0 + SETTLES_WITHIN_S)
    assert not is_placed([*told, *passes(leader, 3.0, 9.0)], C)


def test_a_leader_that_is_cut_off_keeps_no_quorum():
    """Another may have been elected; what happened reaches the lighthouse once that is clear."""
    leader = quorum()
    leader.is_cut_off = lambda now: True
    assert says(leader, B, QuorumAborted(7, "its step failed"), 1.0) == []
    assert says(leader, C, ASK, 1.1) == [] and passes(leader, 1.1, 9.0) == []
    leader.is_cut_off = lambda now: False
    assert is_placed([*says(leader, B, ASK, 9.1), *passes(leader, 9.1, 11.0)], C)


def test_what_is_no_message_of_a_replica_is_refused():
    """The connection that it came by ends."""
    with pytest.raises(ValueError, match="unknown message type"):
        unpack({"type": "ft", "message": {"type": "nonsense"}}, TO_LEADER, 1.0)


# ---- the fence ----------------------------------------------------------------------------


@pytest.fixture
def fenced(tmp_path, monkeypatch):
    """Writes the newest entry; this worker is A's, placed by entry 2."""
    monkeypatch.setenv(fencing.VARIABLE, str(fencing.entry_path(tmp_path, 2)))
    monkeypatch.setenv(fencing.REPLICA_VARIABLE, fencing.replica(A.task, A.attempt, A.slot))
    fencing.entry_path(tmp_path, 2).touch()

    def write(**fields) -> None:
        entry = LogEntry(3, 1, LEADER, **fields)
        fencing.entry_path(tmp_path, 3).write_text(entry.encode_signed(b"secret"))

    return write


def test_a_replica_may_commit_as_long_as_it_is_a_member(fenced):
    """Whatever else has been decided since it was placed, the next leader included."""
    fencing.check_fence()
    fenced(members=(B, A), lost={B.task: 0})
    fencing.check_fence()


@pytest.mark.parametrize(
    "fields",
    [
        {"members": (B,)},
        {"members": (A, B), "lost": {A.task: 0}},
        {"members": (A, B), "ending": RunEnding("succeeded")},
    ],
    ids=["departed", "lost", "the end"],
)
def test_a_replica_that_is_no_member_may_not_commit(fenced, fields):
    """It was paused or cut off, and the others went on without it."""
    fenced(**fields)
    with pytest.raises(CheckpointFencedError, match="entry 3"):
        fencing.check_fence()


def test_a_replicas_staged_files_say_nothing_about_others(fenced, monkeypatch):
    """An entry that is older than another's does not make them leftovers."""
    assert fencing.fencing_token() == "f2s0"
    monkeypatch.delenv(fencing.REPLICA_VARIABLE)
    assert fencing.fencing_token() == "r2"


# ---- settings, and the script's question --------------------------------------------------


def test_ft_is_off_unless_it_is_asked_for():
    """As a truth value."""
    local = {"backend": "local"}
    assert not resolve({"launcher": local}).ft
    assert resolve({"launcher": local, "ft": True}).ft
    with pytest.raises(ConfigError, match="ft='yes': allowed is true or false"):
        resolve({"launcher": local, "ft": "yes"})


def test_replicas_are_always_admitted():
    """A run that never grows can not have them."""
    with pytest.raises(ConfigError, match=r"launcher\.scale_up"):
        resolve({"launcher": {"backend": "local", "scale_up": "on_restart"}, "ft": True})


def test_somebody_else_may_answer_when_to_save(monkeypatch):
    """It is told whether the script's own period says so, by the count of steps or the clock."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    asked: list[tuple[int, bool, bool]] = []

    def rule(step: int, by_step: bool, by_time: bool) -> bool:
        asked.append((step, by_step, by_time))
        return by_step and step > 2

    checkpoint_trigger.set_checkpoint_policy(rule)
    try:
        assert [should_checkpoint(step, every_steps=2) for step in (1, 2, 3, 4)] == [
            False, False, False, True,
        ]  # fmt: skip
    finally:
        checkpoint_trigger.set_checkpoint_policy(None)
    assert asked == [(step, step % 2 == 0, False) for step in (1, 2, 3, 4)]


def test_the_end_of_one_manager_leaves_the_policy_of_another():
    """Several may be in one process."""
    calls: list[int] = []

    def ended(*_: object) -> bool:
        return True

    checkpoint_trigger.set_checkpoint_policy(lambda step, *_: bool(calls.append(step)))
    try:
        checkpoint_trigger.drop_checkpoint_policy(ended)
        should_checkpoint(7, every_steps=2)
    finally:
        checkpoint_trigger.set_checkpoint_policy(None)
    assert calls == [7]


def test_the_clock_is_told_apart_from_the_count_of_steps():
    """The clocks of a replica's ranks differ, so that they have to agree on it."""
    asked: list[tuple[bool, bool]] = []
    checkpoint_trigger.set_checkpoint_policy(
        lambda _, by_step, by_time: asked.append((by_step, by_time)) or False
    )
    try:
        should_checkpoint(1, every_s=1e-9)
    finally:
        checkpoint_trigger.set_checkpoint_policy(None)
    assert asked == [(False, True)]


def test_an_entry_says_where_the_results_are():
    """Also when the leader dies before it has written the result."""
    entry = LogEntry(3, 1, LEADER, ending=RunEnding("succeeded", results="round-1.slot-2"))
    body = json.loads(json.loads(entry.encode_signed(b"secret"))["entry"])
    assert body["ending"]["results"] == "round-1.slot-2"
