"""When an agent takes the place of a leader that it can not reach, and when not."""

from dataclasses import replace

import pytest
from followers import (
    ENTRY,
    LEADER,
    LIVENESS,
    MANY,
    REFUSED,
    UNREACHABLE,
    Search,
    agent,
    following,
    of,
)
from groups import A, B, C, D

from hpc_elastic.rendezvous.effects import Claim, Connect, Disconnect, QuerySlurm, ReadLog
from hpc_elastic.rendezvous.follower_state import CONFIRM_REFUSAL_S, LeaderFailureDetector
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig
from hpc_elastic.rendezvous.log_entry import Agent, LogEntry

# ---- taking its place ---------------------------------------------------------------------


def test_a_port_that_refuses_is_confirmed_before_the_leader_counts_as_dead():
    """It may have been restarting; then the second in line claims almost at once."""
    search = Search(agent(B))
    search.refused, search.beats = REFUSED, 0.5
    when = search.until_claim(10.0)
    assert when is not None and CONFIRM_REFUSAL_S <= when <= 1.0
    assert search.inquiries == [], "nobody needs Slurm's word on that"


def test_a_leader_that_is_silent_and_renews_its_lease_is_never_deposed():
    """Others follow it: it is this agent that is cut off."""
    search = Search(agent(D))
    search.beats = 1.0
    assert search.until_claim(120.0) is None


@pytest.mark.parametrize("phase_s", [0.0, 0.15, 0.4, 0.75])
def test_a_lease_may_be_renewed_as_seldom_as_the_leader_of_many_does(phase_s):
    """A third of heartbeat_timeout_s, however short the heartbeats of a small run would be."""
    search = Search(agent(D, phase_s, HeartbeatConfig(0.2, 3.0)), phase_s)
    search.beats = 1.0
    assert search.until_claim(60.0) is None


def test_a_leader_that_is_silent_and_renews_nothing_is_dead():
    """After heartbeat_timeout_s, and once its lease has run out."""
    search = Search(agent(D))
    search.lease = 7
    when = search.until_claim(60.0)
    assert when is not None and 3.0 < when < 6.5


def test_a_lease_that_stops_being_renewed_runs_out():
    """However long it was renewed before."""
    search = Search(agent(D))
    search.beats = 0.5
    assert search.until_claim(20.0) is None
    search.beats, search.lease = 0.0, 40
    when = search.until_claim(60.0)
    assert when is not None and 21.0 < when < 26.5


def test_a_leader_that_was_followed_is_missed_since_it_was_heard():
    """It is not waited for twice."""
    f = following(D)
    f.received({"type": "heartbeat"}, 9.0)
    now = 9.0
    while not of(f.tick(now), Disconnect):
        now += 0.25
    f.log_read(5, ENTRY, 1, now)
    search = Search(f, now)
    search.lease = 1
    when = search.until_claim(60.0)
    assert when is not None and when < 9.0 + 3.0 + 5.0


def test_a_damaged_entry_is_a_leader_out_of_reach():
    """Its number is taken, its lease is nobody's: the next one is claimed after the time-out."""
    search = Search(agent(B))
    search.number, search.beats = 6, 0.5
    when = search.until_claim(60.0)
    assert when is not None and 3.0 < when < 5.0


def test_an_entry_that_may_be_read_in_part_is_not_passed_over():
    """Where files may be 60 s old, one that was linked just now may yet be whole."""
    search = Search(agent(B, 0.0, HeartbeatConfig.of(0.5, 3.0, 4, 60.0)))
    search.number, search.beats = 6, 0.5
    when = search.until_claim(120.0)
    assert when is not None and 60.0 <= when < 65.0


def test_a_claim_follows_the_damaged_entry():
    """With the newest one that verifies as what is known."""
    f = agent(B)
    f.log_read(6, ENTRY, None, 0.0)
    f.log_read(6, ENTRY, None, 3.5)
    assert f.log_read(6, ENTRY, None, 3.6) == [Claim(7, ENTRY, possibly_alive=True)]


def test_another_leader_begins_the_wait_anew():
    """The time that was waited for one does not count for the next."""
    search = Search(agent(D))
    search.lease = 1
    assert search.until_claim(2.9) is None
    search.entry = replace(ENTRY, index=6, term=3)
    search.number = 6
    when = search.until_claim(60.0)
    assert when is not None and when > 5.9


def test_members_claim_one_after_the_other_in_rank_order():
    """Ten thousand of them do not fall upon the file system at once."""

    def claims_at(me: Agent, entry: LogEntry = ENTRY) -> float:
        search = Search(agent(me), entry=entry)
        f = search.f
        f.tick(0.0)
        f.log_read(5, entry, None, 0.0)
        f.not_connected("refused", 0.0, refused=True)
        now = 0.0
        while not of(f.log_read(5, entry, None, now), Claim):
            f.not_connected("refused", now, refused=True)
            now = round(now + 0.01, 3)
        return now

    second, third = claims_at(B), claims_at(C)
    assert 0.015 < third - second < 0.03
    assert claims_at(MANY.members[-1], MANY) - second < 1.1


def test_a_leader_whose_port_refuses_has_ended():
    """Its node is there to say so."""
    f, now, effects = agent(B), 0.0, []
    f.tick(now)
    while not of(effects, Claim):
        f.not_connected("refused", now, refused=True)
        now += 0.1
        assert now < 10.0
        effects = f.log_read(5, ENTRY, None, now)
    assert of(effects, Claim) == [Claim(6, ENTRY, possibly_alive=False)]


def test_a_newcomer_stands_last_in_line():
    """Members of the last round hold its state."""
    newcomer = Agent("7_9", 0, 9, "node9", 1)
    search = Search(agent(newcomer))
    search.refused = REFUSED
    assert search.until_claim(10.0) is not None


def test_an_attempt_to_connect_ends_with_the_claim():
    """Its answer would come from a leader that is no more."""
    f = agent(D)
    f.tick(0.0)
    f.log_read(5, ENTRY, 1, 0.0)
    f.not_connected("no route", 0.1, refused=UNREACHABLE)
    f.log_read(5, ENTRY, 1, 1.0)
    now, effects = 1.0, []
    while not of(effects, Claim):
        now += 0.1
        assert now < 10.0
        looks = of(f.tick(now), ReadLog)
        effects = f.log_read(5, ENTRY, 1, now) if looks else []
    assert effects == [Disconnect(), Claim(6, ENTRY, possibly_alive=True)]
    assert f.not_connected("no route", now, refused=UNREACHABLE) == []


def test_a_claim_that_fails_is_tried_again():
    """The file system was away, or somebody was faster."""
    search = Search(agent(B))
    search.refused = REFUSED
    first = search.until_claim(10.0)
    assert first is not None
    search.pending = search.f.claimed(None, search.now)
    assert search.until_claim(10.0) is not None


# ---- Slurm's word, and sleep --------------------------------------------------------------


@pytest.mark.parametrize(("me", "asks"), [(A, True), (B, True), (C, True), (D, False)])
def test_the_first_three_members_ask_slurm(me, asks):
    """Once a term; ten thousand squeues would hurt."""
    entry = replace(ENTRY, leader=replace(LEADER, task="7_9"))
    search = Search(agent(me), entry=entry)
    search.beats = 0.5
    assert search.until_claim(20.0) is None
    assert search.inquiries == (["7_9"] if asks else [])


def test_slurms_word_that_the_leader_does_not_run_is_enough():
    """No lease of a task that is gone is waited for."""
    f = agent(B)
    f.tick(0.0)
    f.log_read(5, ENTRY, 1, 0.0)
    assert QuerySlurm("7_0") in f.not_connected("no route", 0.1, refused=UNREACHABLE)
    search = Search(f, 0.2)
    search.beats = 0.5
    search.pending = f.slurm_answered("7_0", False, 0.2)
    when = search.until_claim(10.0)
    assert when is not None and when < 1.0


@pytest.mark.parametrize(("task", "runs"), [("7_0", True), ("7_0", None), ("7_3", False)])
def test_other_words_of_slurm_change_nothing(task, runs):
    """That it runs, that nobody knows, or that somebody else does not run."""
    search = Search(agent(B))
    search.beats = 0.5
    search.until_claim(0.5)
    search.pending = search.f.slurm_answered(task, runs, search.now)
    assert search.until_claim(20.0) is None


def test_slurms_word_does_not_outlive_a_contact():
    """The leader has answered since."""
    f = agent(B)
    f.tick(0.0)
    f.log_read(5, ENTRY, 1, 0.0)
    f.not_connected("no route", 0.1, refused=UNREACHABLE)
    f.slurm_answered("7_0", False, 0.2)
    f.connected(0.3)
    f.disconnected("its connection closed", 1.0)
    assert not of(f.log_read(5, ENTRY, 1, 1.0), Claim)
    search = Search(f, 1.0)
    search.beats = 0.5
    assert search.until_claim(20.0) is None


def test_an_agent_that_slept_deposes_nobody_for_its_own_sleep():
    """What it saw before says nothing of now."""
    search = Search(agent(D))
    search.beats = 0.5
    assert search.until_claim(2.0) is None
    search.now += 600.0
    assert search.until_claim(20.0) is None


def test_an_agent_that_slept_watches_the_lease_anew():
    """Its leader may have slept as long, and need a moment to renew it."""
    search = Search(agent(D))
    search.lease = 1
    assert search.until_claim(2.0) is None
    search.now += 600.0
    assert search.until_claim(2.5) is None
    search.beats = 0.5
    assert search.until_claim(20.0) is None


def test_an_agent_that_slept_through_refusals_confirms_them_anew():
    """The leader may have come back meanwhile."""
    f = agent(B)
    f.tick(0.0)
    f.log_read(5, ENTRY, 1, 0.0)
    f.not_connected("refused", 0.0, refused=REFUSED)
    f.tick(600.0)
    assert not of(f.log_read(5, ENTRY, 2, 600.0), Claim)


def test_a_look_that_took_long_proves_nothing_of_that_time():
    """The lease may have been read when it began: two looks have to be so far apart."""
    watch = LeaderFailureDetector(term=2, since=0.0, followed=True)
    watch.record_lease(7, 3.0, 3.1)
    watch.record_lease(7, 3.2, 60.0)
    assert not watch.is_dead(LIVENESS, 60.0, damaged=False)
    watch.record_lease(7, 60.1, 60.2)
    assert watch.is_dead(LIVENESS, 60.2, damaged=False)


def test_a_lease_that_can_not_be_read_has_not_lapsed():
    """Nobody is deposed because the file system of others does not answer."""
    f = following(B)
    now = 0.0
    while now < 60.0:
        now = round(now + 0.1, 1)
        looks = of(f.tick(now), ReadLog)
        effects = f.log_unreadable("input/output error", now) if looks else []
        assert not of(effects, Claim)
    assert f.log_read(5, ENTRY, 1, now) == [Connect(ENTRY)]


def test_a_lease_on_files_that_may_be_old_lapses_later():
    """Where a file that is read anew may be 60 s old, its lease may be renewed all the while."""
    old = HeartbeatConfig.of(0.5, 3.0, 4, 60.0)
    watch = LeaderFailureDetector(term=2, since=0.0, followed=True)
    watch.record_lease(7, 3.0, 3.1)
    watch.record_lease(7, 65.0, 65.1)
    assert not watch.is_dead(old, 65.1, damaged=False)
    watch.record_lease(7, 65.7, 65.8)
    assert watch.is_dead(old, 65.8, damaged=False)
    assert old.election_s > old.lapse_s
