"""How an agent finds a leader, and follows it."""

from dataclasses import replace
from itertools import pairwise

import pytest
from followers import (
    ENTRY,
    LEADER,
    MANY,
    agent,
    asked,
    following,
    of,
    told,
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
from hpc_elastic.rendezvous.follower_state import FollowerState
from hpc_elastic.rendezvous.log_entry import Endpoint, LogEntry, RunEnding

# ---- finding a leader ---------------------------------------------------------------------


def test_the_first_agent_of_a_run_claims_the_first_entry():
    """There is nobody to look for."""
    f = agent()
    assert f.tick(0.0) == [ReadLog()]
    assert f.log_read(0, None, None, 0.1) == [Claim(1, None, possibly_alive=True)]
    assert f.tick(0.2) == [], "one thing at a time"
    mine = LogEntry(1, 1, replace(LEADER, task=B.task))
    assert f.claimed(mine, 0.3) == [Lead(mine), ReadLog()]
    assert f.log_read(1, mine, None, 0.4) == [Connect(mine)]


def test_who_was_too_late_follows_the_winner():
    """It looks again, and finds the winner's entry; in its own time, for a cache may be stale."""
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
    """And asks for a place once it is connected."""
    following()


def test_looks_again_while_it_has_no_leader():
    """Ever more seldom; those who are first in line as often as a leader beats."""
    for me, longest_s in ((MANY.members[0], 0.5), (MANY.members[-1], 2.0)):
        f, looks, now = agent(me), [], 0.0
        f.log_read(5, MANY, 1, 0.0)
        while now < 20.0:
            if f.tick(now):
                looks.append(now)
                f.log_unreadable("EIO", now)
            now += 0.05
        pauses = [b - a for a, b in pairwise(looks)]
        assert pauses[0] < 0.3 and longest_s - 0.1 < max(pauses) < longest_s + 0.1


def test_a_file_system_that_does_not_answer_claims_nothing():
    """And the agent's thread knows what it waits for."""
    f = agent()
    f.tick(0.0)
    (news,) = told(f.log_unreadable("Stale file handle", 0.1), "news")
    assert "Stale file handle" in news["text"]
    for now in range(1, 100):
        assert not of(f.tick(float(now)), Claim)
        f.log_unreadable("Stale file handle", now + 0.5)


def test_one_question_to_the_file_system_at_a_time():
    """However long it hangs."""
    f = agent()
    assert f.tick(0.0) == [ReadLog()]
    assert not of([e for now in range(1, 50) for e in f.tick(now / 5)], ReadLog)


def test_an_attempt_to_connect_is_not_repeated_while_it_lasts():
    """It ends by itself."""
    f = agent()
    f.tick(0.0)
    f.log_read(5, ENTRY, None, 0.0)
    assert f.tick(0.5) == [ReadLog()]
    assert f.log_read(5, ENTRY, None, 0.5) == []


def test_an_attempt_to_reach_a_leader_that_was_replaced_is_given_up():
    """Its successor is connected to at once."""
    f = agent()
    f.tick(0.0)
    f.log_read(5, ENTRY, None, 0.0)
    f.tick(0.5)
    newer = replace(ENTRY, index=6, term=3, leader=Endpoint("10.0.0.2", 1, B.task, 0))
    assert f.log_read(6, newer, None, 0.5) == [Disconnect(), Connect(newer)]


def test_a_run_that_has_ended_is_over():
    """Whoever comes late reads so in the entry, and makes sure that there is a result."""
    f = agent()
    f.tick(0.0)
    ended = replace(ENTRY, ending=RunEnding("succeeded"))
    publish, tell = f.log_read(5, ended, None, 0.1)
    assert publish == PublishResult(ended)
    assert tell.message == {"type": "end", "status": "succeeded", "failure": None}
    assert f.tick(9.0) == [] and f.log_read(9, ENTRY, None, 9.0) == []


# ---- following ----------------------------------------------------------------------------


def test_beats_as_often_as_it_was_told():
    """Half a second at first; the leader of many asks for fewer."""

    def beats(f: FollowerState, begin: float, end: float) -> int:
        said, now = 0, begin
        while now < end:
            said += len(of(f.tick(now), SendToLeader))
            f.received({"type": "heartbeat"}, now)
            now = round(now + 0.1, 3)
        return said

    f = following()
    assert beats(f, 0.0, 10.05) == 20


def test_reports_name_the_round_that_they_are_of():
    """A leader ignores what belongs to another."""
    f = following()
    said = f.report("finished")
    beat = SendToLeader({"type": "heartbeat"})  # how far the workers came, before they have ended
    assert said == [beat, SendToLeader({"type": "finished", "index": 5})]
    assert agent().report("finished") == [], "without a leader the round is lost anyway"


def test_a_round_answers_the_last_request_only():
    """An earlier one was made before something else went wrong."""
    f = following()
    ask = asked(f.join())
    assert f.received({"type": "round", "request": ask - 1, "index": 6}, 1.0) == []
    placed = {"type": "round", "request": ask, "index": 7}
    assert f.received(placed, 1.1) == [Deliver(placed)]
    assert f.received({**placed, "index": 8}, 1.2) == [], "it has a place"


def test_a_stop_is_heard_once_it_has_a_place():
    """Whoever waits for a round has no workers to stop."""
    f = following()
    stop = {"type": "stop", "reason": "node3 joins"}
    assert f.received(stop, 1.0) == [Deliver(stop)]
    f.join()
    assert f.received(stop, 1.1) == []


@pytest.mark.parametrize(
    "message", [{"type": "checkpoint_request", "request": None}, {"type": "waiting"}]
)
def test_other_words_of_the_leader_reach_the_agent(message):
    """As they are."""
    assert following().received(message, 1.0) == [Deliver(message)]


@pytest.mark.parametrize("type_", ["end", "requeue"])
def test_the_leaders_last_word_ends_it(type_):
    """Nothing is looked for after that, whatever happens to the connection."""
    f = following()
    assert f.received({"type": type_}, 1.0) == [Deliver({"type": type_})]
    assert f.disconnected("its connection closed", 1.1) == []
    assert f.tick(99.0) == [] and f.received({"type": "stop"}, 99.0) == []


def test_a_broken_connection_stops_the_workers_and_looks_again():
    """At once."""
    effects = following().disconnected("its connection closed", 1.0)
    assert [type(e) for e in effects] == [Disconnect, Deliver, Deliver, ReadLog]
    assert "its connection closed" in told(effects, "stop")[0]["reason"]


def test_a_silent_leader_is_lost_after_heartbeat_timeout_s():
    """A connection to a node that has vanished does not break."""
    f, effects, now = following(), [], 0.0
    while not of(effects, Disconnect):
        now += 0.25
        effects = f.tick(now)
    assert now == 3.25 and "silent for" in told(effects, "stop")[0]["reason"]


def test_who_has_no_workers_is_not_told_to_stop_them():
    """It waits for a round as before."""
    f = following()
    f.join()
    assert told(f.disconnected("its connection closed", 1.0), "stop") == []


def test_a_request_outlives_its_leader():
    """The next one is asked as soon as it is found."""
    f = following()
    f.disconnected("its connection closed", 1.0)
    assert f.join() == []
    f.log_read(5, ENTRY, 1, 1.1)
    assert asked(f.connected(1.2))


def test_an_agent_that_slept_forgives_its_leader():
    """It was not the leader that was silent."""
    f = following()
    f.tick(0.5)
    assert not of(f.tick(60.0), Disconnect)
    times = [60.0 + 0.25 * n for n in range(1, 20)]
    assert next(t for t in times if of(f.tick(t), Disconnect)) == 62.25


def test_a_leader_that_another_has_replaced_is_left():
    """It is paused or cut off, and does not know."""
    f = following()
    f.tick(0.5)
    assert of(f.tick(0.8), ReadLog) == [ReadLog()], (
        "it has been silent for longer than a beat and a half"
    )
    newer = replace(ENTRY, index=6, term=3, leader=Endpoint("10.0.0.2", 1, C.task, 0))
    effects = f.log_read(6, newer, 1, 1.4)
    assert of(effects, Disconnect) and told(effects, "stop")


# ---- a node that is to be left ------------------------------------------------------------


def test_outside_a_round_a_node_under_notice_leaves_at_once():
    """It has nothing to lose, and would only be waited for."""
    f = agent()
    noticed, leaving = f.add_notice("signal", 5.0, 1.0)
    assert noticed == Deliver({"type": "noticed", "reason": "signal", "left_s": 5.0})
    assert leaving == Deliver({"type": "departed", "reason": "signal"})
    assert f.tick(2.0) == []


def test_a_node_that_waits_for_a_place_tells_the_leader_that_it_leaves():
    """The round that forms does not wait for it."""
    f = following()
    f.received({"type": "stop", "reason": "node3 joins"}, 1.0)
    f.join()
    effects = f.add_notice("signal", 5.0, 1.5)
    assert [e.message["type"] for e in of(effects, SendToLeader)] == ["leave"]
    assert told(effects, "departed") == [{"type": "departed", "reason": "signal"}]


def test_in_a_round_it_tells_the_leader_and_goes_on():
    """All ranks are to save before it leaves."""
    f = following()
    effects = f.add_notice("signal", 5.0, 1.0)
    assert of(effects, SendToLeader) == [
        SendToLeader({"type": "notice", "reason": "signal", "left_s": 5.0})
    ]
    assert told(effects, "departed") == []


@pytest.mark.parametrize("ends", ["stop", "lost"])
def test_when_its_round_is_over_it_leaves_instead_of_joining_again(ends):
    """However it ended; and it says so before its workers are dead."""
    f = following()
    f.add_notice("signal", 5.0, 1.0)
    if ends == "stop":
        effects = f.received({"type": "stop", "reason": "at the checkpoint of step 3"}, 2.0)
        assert [e.message["type"] for e in of(effects, SendToLeader)] == ["leave"]
    else:
        effects = f.disconnected("its connection closed", 2.0)
    kinds = [e.message["type"] for e in of(effects, Deliver)]
    assert kinds.index("stop") < kinds.index("departed")


def test_a_round_that_was_stopped_holds_no_node_under_notice():
    """Its workers are being stopped, and it has not asked for another place yet."""
    f = following()
    f.received({"type": "stop", "reason": "node3 joins"}, 1.0)
    assert told(f.add_notice("signal", 5.0, 1.5), "departed")


def test_the_nearest_deadline_counts_and_the_first_reason():
    """Later notices that leave more time say nothing new."""
    f = following()
    f.add_notice("time_limit", 100.0, 1.0)
    assert f.add_notice("asked", 200.0, 2.0) == []
    (say,) = of(f.add_notice("signal", 5.0, 3.0), SendToLeader)
    assert say.message == {"type": "notice", "reason": "time_limit", "left_s": 5.0}


def test_the_leader_may_ask_a_node_to_leave():
    """Somebody has written a notice file; it is kept until the agent confirms it, each time."""
    f = following()
    effects = f.received({"type": "notice", "left_s": 600.0}, 1.0)
    assert told(effects, "noticed") == [{"type": "noticed", "reason": "asked", "left_s": 600.0}]
    confirmed = SendToLeader({"type": "noticed"})
    told_leader = SendToLeader({"type": "notice", "reason": "asked", "left_s": 600.0})
    assert of(effects, SendToLeader) == [confirmed, told_leader]
    assert f.received({"type": "notice", "left_s": 600.0}, 2.0) == [confirmed]


def test_its_time_being_over_it_leaves_whatever_its_round_does():
    """The save was not agreed on in time."""
    f = following()
    f.add_notice("signal", 5.0, 1.0)
    effects = f.leave_now()
    assert told(effects, "departed") and [e.message["type"] for e in of(effects, SendToLeader)] == [
        "leave"
    ]
    assert f.leave_now() == [] and f.add_notice("signal", 1.0, 6.0) == []


def test_proposals_reach_the_workers_of_a_round_only():
    """What comes after the stop is meant for pages that are gone."""
    f = following()
    propose = {"type": "checkpoint_request", "request": None}
    assert f.received(propose, 1.0) == [Deliver(propose)]
    f.received({"type": "stop", "reason": "a worker failed"}, 1.1)
    assert f.received(propose, 1.2) == []
