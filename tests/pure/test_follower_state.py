"""How an agent finds a leader and follows it."""

from dataclasses import replace
from itertools import pairwise

import pytest

from followers import (
    ENTRY,
    LEADER,
    MANY,
    agent,
    connecting,
    delivered,
    following,
    of,
    place,
    request_of,
)
from groups import B, C
from hpc_elastic.rendezvous.effects import (
    Claim,
    Connect,
    Deliver,
    Disconnect,
    Lead,
    PublishResult,
    ReadLog,
    SendToLeader,
)
from hpc_elastic.rendezvous.log_entry import Endpoint, LogEntry, RunEnding
from hpc_elastic.rendezvous.messages import (
    CheckpointRequested,
    Departed,
    End,
    Finished,
    Heartbeat,
    Leave,
    Notice,
    NoticeConfirmed,
    NoticeRequest,
    PreemptionNotice,
    Requeue,
    Stop,
    Waiting,
)
from hpc_elastic.rendezvous.session import SessionState
from hpc_elastic.slurm.exit_action import Reason

# ---- finding a leader ---------------------------------------------------------------------


def test_the_first_agent_of_a_run_claims_the_first_entry():
    """There is no leader to follow."""
    f = agent()
    assert f.tick(0.0) == [ReadLog()]
    assert f.log_read(0, None, None, 0.1) == [Claim(1, None, possibly_alive=True)]
    assert f.tick(0.2) == [], "one operation at a time"
    mine = LogEntry(1, 1, replace(LEADER, task=B.task))
    assert f.claimed(mine, 0.3) == [Lead(mine), ReadLog()]
    assert f.log_read(1, mine, None, 0.4) == [Connect(mine)]


def test_an_agent_whose_claim_failed_follows_the_winner():
    """It reads the log again, after a pause, since a cache may be stale."""
    f = agent()
    f.tick(0.0)
    f.log_read(0, None, None, 0.0)
    effects, now = f.claimed(None, 0.1), 0.1
    while not effects:
        now += 0.05
        effects = f.tick(now)
    assert effects == [ReadLog()] and now <= 1.2
    winners = replace(ENTRY, index=1)
    assert f.log_read(1, winners, None, now) == [Connect(winners)]


def test_follows_the_leader_that_the_last_entry_names():
    """It requests a place once it is connected."""
    following()


def test_reads_the_log_again_while_it_has_no_leader():
    """The pauses grow; for the first members up to a heartbeat interval."""
    for me, longest_s in ((MANY.members[0], 0.5), (MANY.members[-1], 2.0)):
        f, reads, now = agent(me), [], 0.0
        f.log_read(5, MANY, 1, 0.0)
        while now < 20.0:
            if f.tick(now):
                reads.append(now)
                f.log_unreadable("EIO", now)
            now += 0.05
        pauses = [b - a for a, b in pairwise(reads)]
        assert pauses[0] < 0.3 and longest_s - 0.1 < max(pauses) < longest_s + 0.1


def test_a_file_system_that_does_not_answer_claims_nothing():
    """The agent's thread gets the reason."""
    f = agent()
    f.tick(0.0)
    (news,) = delivered(f.log_unreadable("Stale file handle", 0.1), Waiting)
    assert "Stale file handle" in news.text
    for now in range(1, 100):
        assert not of(f.tick(float(now)), Claim)
        f.log_unreadable("Stale file handle", now + 0.5)


def test_one_read_of_the_log_at_a_time():
    """However long the file system hangs."""
    f = agent()
    assert f.tick(0.0) == [ReadLog()]
    assert not of([e for now in range(1, 50) for e in f.tick(now / 5)], ReadLog)


def test_an_attempt_to_connect_is_not_repeated_while_it_lasts():
    """The attempt ends by itself."""
    f = connecting()
    assert f.tick(0.5) == [ReadLog()]
    assert f.log_read(5, ENTRY, None, 0.5) == []


def test_an_attempt_to_reach_a_leader_that_was_replaced_is_given_up():
    """The agent connects to its successor at once."""
    f = connecting()
    f.tick(0.5)
    newer = replace(ENTRY, index=6, term=3, leader=Endpoint("10.0.0.2", 1, B.task, 0))
    assert f.log_read(6, newer, None, 0.5) == [Disconnect(), Connect(newer)]


def test_a_run_that_has_ended_is_over():
    """An agent that comes late reads the end in the entry, and publishes the result."""
    f = agent()
    f.tick(0.0)
    ended = replace(ENTRY, ending=RunEnding("succeeded"))
    publish, deliver = f.log_read(5, ended, None, 0.1)
    assert publish == PublishResult(ended)
    assert deliver.message == End(status="succeeded", failure=None)
    assert f.tick(9.0) == [] and f.log_read(9, ENTRY, None, 9.0) == []


# ---- following ----------------------------------------------------------------------------


def test_sends_a_heartbeat_at_every_interval():
    """Half a second, as in the settings of the run."""
    f, num, now = following(), 0, 0.0
    while now < 10.05:
        num += len(of(f.tick(now), SendToLeader))
        f.received(Heartbeat(), now)
        now = round(now + 0.1, 3)
    assert num == 20


def test_reports_name_the_round_that_they_are_of():
    """A leader ignores the reports of another round."""
    f = following()
    sent = f.report(Finished())
    beat = SendToLeader(Heartbeat())  # how far the workers came, before they have ended
    assert sent == [beat, SendToLeader(Finished(index=5))]
    assert agent().report(Finished()) == [], "without a leader the report is dropped"


def test_a_round_answers_the_last_request_only():
    """An earlier request may be out of date."""
    f = following()
    request = request_of(f.join())
    assert f.received(place(request - 1, 6), 1.0) == []
    placed = place(request, 7)
    assert f.received(placed, 1.1) == [Deliver(placed)]
    assert f.received(place(request, 8), 1.2) == [], "it has a place already"


def test_a_stop_counts_only_in_a_round():
    """An agent that waits for a round has no workers to stop."""
    f = following()
    stop = Stop(reason="node3 joins")
    assert f.received(stop, 1.0) == [Deliver(stop)]
    f.join()
    assert f.received(stop, 1.1) == []


@pytest.mark.parametrize("message", [CheckpointRequested(request=None), Waiting("")])
def test_other_messages_of_the_leader_are_delivered(message):
    """Unchanged."""
    assert following().received(message, 1.0) == [Deliver(message)]


@pytest.mark.parametrize("last", [End("succeeded", None), Requeue(5.0)])
def test_the_leaders_last_message_ends_the_session(last):
    """The agent searches for no leader after that."""
    f = following()
    assert f.received(last, 1.0) == [Deliver(last)]
    assert f.disconnected("its connection closed", 1.1) == []
    assert f.tick(99.0) == [] and f.received(Stop(""), 99.0) == []


def test_a_broken_connection_stops_the_workers_and_reads_the_log():
    """At once."""
    effects = following().disconnected("its connection closed", 1.0)
    assert [type(e) for e in effects] == [Disconnect, Deliver, Deliver, ReadLog]
    assert "its connection closed" in delivered(effects, Stop)[0].reason


def test_a_silent_leader_is_lost_after_heartbeat_timeout_s():
    """The connection to a lost node does not break."""
    f, effects, now = following(), [], 0.0
    while not of(effects, Disconnect):
        now += 0.25
        effects = f.tick(now)
    assert now == 3.25 and "silent for" in delivered(effects, Stop)[0].reason


def test_an_agent_without_workers_gets_no_stop():
    """It still waits for a round."""
    f = following()
    f.join()
    assert delivered(f.disconnected("its connection closed", 1.0), Stop) == []


def test_a_request_outlives_its_leader():
    """The next leader gets it as soon as the agent is connected."""
    f = following()
    f.disconnected("its connection closed", 1.0)
    assert f.join() == []
    f.log_read(5, ENTRY, 1, 1.1)
    assert request_of(f.connected(1.2))


def test_the_time_that_an_agent_was_suspended_is_no_silence():
    """The leader was not silent."""
    f = following()
    f.tick(0.5)
    assert not of(f.tick(60.0), Disconnect)
    times = [60.0 + 0.25 * n for n in range(1, 20)]
    assert next(t for t in times if of(f.tick(t), Disconnect)) == 62.25


def test_a_replaced_leader_is_disconnected():
    """It is paused or cut off, and does not know that another one leads."""
    f = following()
    f.tick(0.5)
    assert of(f.tick(0.8), ReadLog) == [ReadLog()], (
        "silent for longer than one and a half heartbeats"
    )
    newer = replace(ENTRY, index=6, term=3, leader=Endpoint("10.0.0.2", 1, C.task, 0))
    effects = f.log_read(6, newer, 1, 1.4)
    assert of(effects, Disconnect) and delivered(effects, Stop)


# ---- a node under notice -----------------------------------------------------------------


def add_notice(f, reason: str, left_s: float, now: float):
    """Put a node under notice at a time."""
    return f.add_notice(PreemptionNotice(Reason(reason), now + left_s), now)


def test_outside_a_round_a_node_under_notice_leaves_at_once():
    """It has no steps to save."""
    f = agent()
    assert add_notice(f, "signal", 5.0, 1.0) == [Deliver(Departed(Reason.SIGNAL))]
    assert f.tick(2.0) == []


def test_a_node_under_notice_that_waits_for_a_place_reports_that_it_leaves():
    """The round that forms does not wait for it."""
    f = following()
    f.received(Stop(reason="node3 joins"), 1.0)
    f.join()
    effects = add_notice(f, "signal", 5.0, 1.5)
    assert [type(e.message) for e in of(effects, SendToLeader)] == [Leave]
    assert delivered(effects, Departed) == [Departed(Reason.SIGNAL)]


def test_in_a_round_the_notice_is_reported_and_the_node_stays():
    """All ranks save before it leaves."""
    f = following()
    effects = add_notice(f, "signal", 5.0, 1.0)
    assert of(effects, SendToLeader) == [SendToLeader(Notice(reason="signal", left_s=5.0))]
    assert delivered(effects, Departed) == []


@pytest.mark.parametrize("ends", ["stop", "lost"])
def test_a_node_under_notice_leaves_when_its_round_ends(ends):
    """For any reason, and it sends ``leave`` before its workers have ended."""
    f = following()
    add_notice(f, "signal", 5.0, 1.0)
    if ends == "stop":
        effects = f.received(Stop(reason="at the checkpoint of step 3"), 2.0)
        assert [type(e.message) for e in of(effects, SendToLeader)] == [Leave]
    else:
        effects = f.disconnected("its connection closed", 2.0)
    kinds = [type(e.message) for e in of(effects, Deliver)]
    assert kinds.index(Stop) < kinds.index(Departed)


def test_a_notice_after_the_stop_of_the_round_lets_the_node_leave_at_once():
    """Its workers are being stopped, and it has not requested another place yet."""
    f = following()
    f.received(Stop(reason="node3 joins"), 1.0)
    assert delivered(add_notice(f, "signal", 5.0, 1.5), Departed)


def test_the_nearest_deadline_counts_and_the_first_reason():
    """A later notice that leaves more time is ignored."""
    f = following()
    add_notice(f, "time_limit", 100.0, 1.0)
    assert add_notice(f, "asked", 200.0, 2.0) == []
    (send,) = of(add_notice(f, "signal", 5.0, 3.0), SendToLeader)
    assert send.message == Notice(reason="time_limit", left_s=5.0)


def test_the_leader_may_put_a_node_under_notice():
    """A notice file is kept until the agent confirms it, each time."""
    f = following()
    effects = f.received(NoticeRequest(left_s=600.0), 1.0)
    assert delivered(effects, PreemptionNotice) == [PreemptionNotice(Reason.ASKED, 601.0)]
    confirmed = SendToLeader(NoticeConfirmed())
    reported = SendToLeader(Notice(reason="asked", left_s=600.0))
    assert of(effects, SendToLeader) == [confirmed, reported]
    assert f.received(NoticeRequest(left_s=600.0), 2.0) == [confirmed]


def test_a_node_leaves_at_its_deadline():
    """The checkpoint was not agreed on in time."""
    f = following()
    add_notice(f, "signal", 5.0, 1.0)
    effects = f.leave_now()
    assert delivered(effects, Departed)
    assert [type(e.message) for e in of(effects, SendToLeader)] == [Leave]
    assert f.leave_now() == [] and add_notice(f, "signal", 1.0, 6.0) == []


def test_checkpoint_requests_reach_only_the_workers_of_a_round():
    """A request after the stop is out of date."""
    f = following()
    propose = CheckpointRequested(request=None)
    assert f.received(propose, 1.0) == [Deliver(propose)]
    f.received(Stop(reason="a worker failed"), 1.1)
    assert f.received(propose, 1.2) == []


# ---- how long it waits for a place --------------------------------------------------------


def waited(effects) -> float:
    """How long an agent says that it has waited, in its request for a place."""
    return next(e.message.waited_s for e in effects if isinstance(e, SendToLeader))


def test_each_leader_is_told_how_long_the_agent_has_waited():
    """The wait has one limit, whoever leads."""
    f = connecting()
    assert waited(f.connected(1.0)) == 1.0
    for now in range(2, 21):
        f.received(Waiting(text=""), float(now))
    f.disconnected("its node died", 20.0)
    f.log_read(6, replace(ENTRY, index=6, term=6), 1, 25.0)
    assert waited(f.connected(26.0)) == 26.0


def test_time_without_any_answer_is_no_wait():
    """The file system was away, or the agent was suspended: nobody could have placed it."""
    f = connecting()
    f.connected(1.0)
    f.disconnected("its node died", 20.0)
    f.log_unreadable("Stale file handle", 900.0)
    f.log_read(6, replace(ENTRY, index=6, term=6), 1, 1500.0)
    assert waited(f.connected(1501.0)) == 2.0
    assert f.waited_s == 2.0


def test_an_agent_does_not_give_up_for_time_that_is_no_wait():
    """It waits again for what is left of its time."""
    left = [0.0, 0.005, 0.01]
    state = SessionState()
    assert state.wait_for_outcome(0.01, lambda: None, lambda: left.pop(0)) is None
    assert left == []


def test_an_older_attempt_never_leads():
    """The log names a newer attempt of its task: it ends, even where no leader is left."""
    for entry in (
        replace(ENTRY, members=(replace(B, attempt=1),)),
        replace(ENTRY, lost={B.task: 1}),
        replace(ENTRY, leader=replace(LEADER, task=B.task, attempt=1)),
    ):
        f = agent(B)
        f.tick(0.0)
        effects = f.log_read(5, entry, None, 0.1)
        assert delivered(effects, End) and not of(effects, Claim, Connect)
        assert f.tick(99.0) == []
