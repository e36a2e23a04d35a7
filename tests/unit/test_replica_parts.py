"""What else differs for replicas: their agent, the keeper's desk, the fence, the settings."""

import asyncio
import json
import random

import pytest
from followers import LEADER, LIVENESS, RECORD, asked, told
from groups import A, B, C, failure

from hpc_elastic import should_checkpoint
from hpc_elastic.config.resolve import resolve
from hpc_elastic.errors import CheckpointFencedError, ConfigError
from hpc_elastic.rendezvous import leader as leader_module
from hpc_elastic.rendezvous.effects import Connect, Deliver, ReadLog, SendToLeader
from hpc_elastic.rendezvous.follower_state import FollowerState
from hpc_elastic.rendezvous.leader import QuorumBridge, replica_name
from hpc_elastic.rendezvous.log_entry import LogEntry, RoundRules, RunEnding, claim
from hpc_elastic.rendezvous.replica_state import ReplicaLeaderState
from hpc_elastic.run import fencing
from hpc_elastic.worker import checkpoint_trigger

# ---- an agent without its leader ----------------------------------------------------------


def connected(f: FollowerState, record: LogEntry, now: float) -> list:
    """Let an agent find the leader of a record; return what it does then."""
    f.tick(now)
    assert Connect(record) in f.looked(record.number, record, 1, now)
    return f.connected(now)


def placed() -> FollowerState:
    """A replica's agent with a place in a round."""
    f = FollowerState(B, LIVENESS, 0.0, stays=True)
    f.join()
    ask = asked(connected(f, RECORD, 0.0))
    f.received({"type": "round", "ask": ask, "record": RECORD.number, "number": 2}, 0.0)
    return f


def test_the_leaders_death_does_not_stop_the_workers():
    """The agent looks for the next leader at once, and tells him by which record it is here."""
    f = placed()
    effects = f.disconnected("reset", 1.0)
    assert told(effects, "stop") == [] and ReadLog() in effects
    newer = claim(6, RECORD, LEADER, 1000.0)
    f.looked(RECORD.number, RECORD, 1, 1.0)
    f.not_connected("refused", 1.1, refused=True)
    assert connected(f, newer, 2.0) == [SendToLeader({"type": "here", "record": 5, "number": 2})]


def test_what_became_of_the_workers_meanwhile_is_told_again():
    """The leader before may not have recorded it."""
    f = placed()
    f.report("finished")
    f.disconnected("reset", 1.0)
    f.looked(RECORD.number, RECORD, 1, 1.0)
    f.not_connected("refused", 1.1, refused=True)
    effects = connected(f, claim(6, RECORD, LEADER, 1000.0), 2.0)
    assert [e.message["type"] for e in effects] == ["here", "finished"]
    assert effects[1].message["record"] == 5


def test_a_leader_that_wants_them_stopped_is_obeyed():
    """Then the agent joins anew."""
    f = placed()
    stop = {"type": "stop", "reason": "formed anew"}
    assert f.received(stop, 1.0) == [Deliver(stop)]
    assert asked(f.join()) > 0


# ---- the keeper's desk --------------------------------------------------------------------


class Keeper:
    """Notes what it is told, and answers each ask with a place."""

    def __init__(self) -> None:
        self.heard: list[tuple] = []

    def arrived(self, replica, now):
        """An agent has connected."""
        self.heard.append(("arrived", replica))
        return []

    def said(self, replica, message, now):
        """It has said something."""
        self.heard.append((message["type"], replica))
        return [(replica, {"type": "placements"})] if message["type"] == "ask" else []

    def left(self, replica, why, now):
        """It is gone."""
        self.heard.append(("left", replica))
        return []

    def tick(self, now):
        """Nothing happens."""
        return []


def desk() -> tuple[QuorumBridge, Keeper, ReplicaLeaderState, list]:
    """The desk of a leader with A and B, which are in a quorum, and C, which is new."""
    keeper, sent = Keeper(), []
    before = LogEntry(4, 2, LEADER, round=3, members=(B, C))
    rules = RoundRules(1, 4, 2, 60.0, 5.0, ft=True)
    leader = ReplicaLeaderState(
        claim(5, before, LEADER, 0.0), rules, LIVENESS, 0.0, random.Random(1)
    )
    made = QuorumBridge(keeper, leader, lambda agent, message: sent.append((agent, message)))
    for agent in (B, C):
        leader.connected(agent, 0.0)
        leader.received(agent, {"type": "here", "record": 4, "number": 3}, 0.0)
        made.arrived(agent)
    made.said(B, {"type": "here", "quorum_id": 7})
    made.said(C, {"type": "here", "quorum_id": -1})
    keeper.heard.clear()
    return made, keeper, leader, sent


async def _for_a_moment(made: QuorumBridge) -> None:
    keeping = asyncio.create_task(made.keep())
    for _ in range(3):  # of its looks at least one is between these
        await asyncio.sleep(0.05)
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping


def test_what_the_keeper_answers_is_sent():
    """And who gets a place takes part from then on."""
    made, _, leader, sent = desk()
    made.said(C, {"type": "ask"})
    assert sent == [(C, {"type": "ft", "message": {"type": "placements"}})]
    assert C in leader.machine.taking_part


def test_a_newcomer_waits_while_another_ends(monkeypatch):
    """If that one is done, the newcomer would begin alone from the start."""
    monkeypatch.setattr(leader_module, "_SETTLES_WITHIN_S", 3600.0)
    made, keeper, leader, sent = desk()
    made.said(B, {"type": "bye"})
    made.said(C, {"type": "ask"})
    asyncio.run(_for_a_moment(made))
    assert keeper.heard == [("bye", replica_name(B))] and not sent
    leader.received(B, {"type": "finished", "record": 4}, 1.0)
    asyncio.run(_for_a_moment(made))
    assert ("ask", replica_name(C)) not in keeper.heard


def test_a_newcomer_goes_on_once_the_other_has_failed():
    """Then the run goes on."""
    made, keeper, leader, _ = desk()
    made.said(B, {"type": "lost", "why": "it ended"})
    made.said(C, {"type": "ask"})
    fields = failure(B).to_json()
    leader.received(B, {"type": "failed", "record": 4, "failures": [fields]}, 1.0)
    asyncio.run(_for_a_moment(made))
    assert ("ask", replica_name(C)) in keeper.heard


def test_a_leader_that_is_cut_off_keeps_no_quorum():
    """Another may have been elected; what happened is told to the keeper once that is clear."""
    made, keeper, leader, _ = desk()
    leader.is_cut_off = lambda now: True
    made.left(B, "silent")
    assert keeper.heard == []
    leader.is_cut_off = lambda now: False
    made.said(C, {"type": "at"})
    assert keeper.heard == [("left", replica_name(B)), ("at", replica_name(C))]


# ---- the fence ----------------------------------------------------------------------------


@pytest.fixture
def fenced(tmp_path, monkeypatch):
    """Writes the newest record; this worker is A's, placed by record 2."""
    monkeypatch.setenv(fencing.VARIABLE, str(fencing.record_path(tmp_path, 2)))
    monkeypatch.setenv(fencing.REPLICA_VARIABLE, fencing.replica(A.task, A.attempt, A.slot))
    fencing.record_path(tmp_path, 2).touch()

    def write(**fields) -> None:
        record = LogEntry(3, 1, LEADER, **fields)
        fencing.record_path(tmp_path, 3).write_text(record.seal(b"secret"))

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
    with pytest.raises(CheckpointFencedError, match="record 3"):
        fencing.check_fence()


def test_a_replicas_staged_files_say_nothing_about_others(fenced, monkeypatch):
    """A record that is older than another's does not make them leftovers."""
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

    checkpoint_trigger.answer_by(rule)
    try:
        assert [should_checkpoint(step, every_steps=2) for step in (1, 2, 3, 4)] == [
            False, False, False, True,
        ]  # fmt: skip
    finally:
        checkpoint_trigger.answer_by(None)
    assert asked == [(step, step % 2 == 0, False) for step in (1, 2, 3, 4)]


def test_the_clock_is_told_apart_from_the_count_of_steps():
    """The clocks of a replica's ranks differ, so that they have to agree on it."""
    asked: list[tuple[bool, bool]] = []
    checkpoint_trigger.answer_by(
        lambda _, by_step, by_time: asked.append((by_step, by_time)) or False
    )
    try:
        should_checkpoint(1, every_s=1e-9)
    finally:
        checkpoint_trigger.answer_by(None)
    assert asked == [(False, True)]


def test_a_record_says_where_the_results_are():
    """Also when the leader dies before it has written the result."""
    record = LogEntry(3, 1, LEADER, ending=RunEnding("succeeded", results="round-1.slot-2"))
    body = json.loads(json.loads(record.seal(b"secret"))["record"])
    assert body["ending"]["results"] == "round-1.slot-2"
