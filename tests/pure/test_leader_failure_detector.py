"""When an agent replaces a leader that it cannot reach, and when not."""

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
    connecting,
    delivered,
    following,
    of,
)
from groups import A, B, C, D
from hpc_elastic.rendezvous.effects import Claim, Connect, Disconnect, QuerySlurm, ReadLog
from hpc_elastic.rendezvous.follower_state import CONFIRM_REFUSAL_S, LeaderFailureDetector
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig
from hpc_elastic.rendezvous.log_entry import Agent, Failure, FailureCounters, LogEntry
from hpc_elastic.rendezvous.messages import Heartbeat, Waiting

# ---- claims ------------------------------------------------------------------------------


def test_a_port_that_refuses_is_confirmed_before_the_leader_counts_as_dead():
    """Then the second member claims almost at once."""
    search = Search(agent(B), refused=REFUSED, beats=0.5)
    when = search.until_claim(10.0)
    assert when is not None and CONFIRM_REFUSAL_S <= when <= 1.0
    assert search.queries == [], "no query of Slurm is necessary"


def test_a_leader_that_is_silent_and_renews_its_lease_is_never_deposed():
    """Others follow it: this agent is cut off."""
    search = Search(agent(D), beats=1.0)
    assert search.until_claim(120.0) is None


@pytest.mark.parametrize("phase_s", [0.0, 0.15, 0.4, 0.75])
def test_a_lease_may_be_renewed_as_rarely_as_in_a_large_run(phase_s):
    """Every third of heartbeat_timeout_s, however short the heartbeat interval is."""
    search = Search(agent(D, phase_s, HeartbeatConfig(0.2, 3.0)), phase_s, beats=1.0)
    assert search.until_claim(60.0) is None


def test_a_leader_that_is_silent_and_renews_nothing_is_dead():
    """After heartbeat_timeout_s, and once its lease has expired."""
    search = Search(agent(D), lease=7)
    when = search.until_claim(60.0)
    assert when is not None and 3.0 < when < 6.5


def test_a_lease_that_is_no_longer_renewed_expires():
    """However long it was renewed before."""
    search = Search(agent(D), beats=0.5)
    assert search.until_claim(20.0) is None
    search.beats, search.lease = 0.0, 40
    when = search.until_claim(60.0)
    assert when is not None and 21.0 < when < 26.5


def test_the_silence_of_a_followed_leader_counts_since_its_last_message():
    """The agent does not wait twice."""
    f = following(D)
    f.received(Heartbeat(), 9.0)
    now = 9.0
    while not of(f.tick(now), Disconnect):
        now += 0.25
    f.log_read(5, ENTRY, 1, now)
    search = Search(f, now, lease=1)
    when = search.until_claim(60.0)
    assert when is not None and when < 9.0 + 3.0 + 5.0


def test_a_damaged_entry_is_an_unreachable_leader():
    """Its index is taken, and it has no lease: the next one is claimed after the time-out."""
    search = Search(agent(B))
    search.number, search.beats = 6, 0.5
    when = search.until_claim(60.0)
    assert when is not None and 3.0 < when < 5.0


def test_an_entry_that_may_be_read_in_part_is_not_skipped():
    """If files may be 60 s old, a fresh entry may still become whole."""
    search = Search(agent(B, 0.0, HeartbeatConfig.of(0.5, 3.0, 4, 60.0)))
    search.number, search.beats = 6, 0.5
    when = search.until_claim(120.0)
    assert when is not None and 60.0 <= when < 65.0


def test_a_claim_follows_the_damaged_entry():
    """The claim takes over the newest entry that verifies."""
    f = agent(B)
    f.log_read(6, ENTRY, None, 0.0)
    f.log_read(6, ENTRY, None, 3.5)
    assert f.log_read(6, ENTRY, None, 3.6) == [Claim(7, ENTRY, possibly_alive=True)]


def test_another_leader_restarts_the_wait():
    """The wait for one leader does not count for the next."""
    search = Search(agent(D), lease=1)
    assert search.until_claim(2.9) is None
    search.entry = replace(ENTRY, index=6, term=3)
    search.number = 6
    when = search.until_claim(60.0)
    assert when is not None and when > 5.9


def test_members_claim_one_after_the_other_in_rank_order():
    """This limits the load on the file system in a run of ten thousand nodes."""

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
    """Its node answers that no process listens."""
    f, now, effects = agent(B), 0.0, []
    f.tick(now)
    while not of(effects, Claim):
        f.not_connected("refused", now, refused=True)
        now += 0.1
        assert now < 10.0
        effects = f.log_read(5, ENTRY, None, now)
    assert of(effects, Claim) == [Claim(6, ENTRY, possibly_alive=False)]


def test_a_newcomer_claims_last():
    """Members of the last round claim before it."""
    newcomer = Agent("7_9", 0, 9, "node9", 1)
    search = Search(agent(newcomer), refused=REFUSED)
    assert search.until_claim(10.0) is not None


def test_after_failed_terms_the_pause_grows_and_other_nodes_claim_first():
    """So that a fault of one node ends no run, and a fault of all is not tried at once again."""

    def claims_at(me: Agent, num_failed: int) -> float:
        failure = Failure(A.task, A.host, 0, 0, 0.0, "no socket", "TypeError", phase="lead")
        counters = FailureCounters(failed_terms=(failure,) * num_failed)
        entry = replace(ENTRY, counters=counters, gave_up=num_failed > 0)
        search = Search(agent(me), entry=entry, refused=REFUSED)
        when = search.until_claim(60.0)
        assert when is not None
        return when

    newcomer = Agent("7_9", 0, 9, "node9", 1)
    assert claims_at(A, 0) < 1.0
    pauses = [claims_at(A, n) - claims_at(A, n - 1) for n in (1, 2, 3)]
    assert pauses[0] > 2.5 and pauses == sorted(pauses) and claims_at(A, 3) < 15.0
    for num_failed in (1, 2, 3):
        assert max(claims_at(B, num_failed), claims_at(newcomer, num_failed)) + 1.5 < claims_at(
            A, num_failed
        )


def test_the_death_of_a_leader_after_failed_terms_costs_no_pause():
    """Its own term has not failed."""
    failure = Failure(A.task, A.host, 0, 0, 0.0, "no socket", "TypeError", phase="lead")
    counters = FailureCounters(failed_terms=(failure,) * 3)
    search = Search(agent(A), entry=replace(ENTRY, counters=counters), refused=REFUSED)
    when = search.until_claim(10.0)
    assert when is not None and when < 1.0


def test_an_agent_names_the_error_of_the_leader_that_it_does_not_reach():
    """Its log, and the time-out of its wait, show it."""
    failure = Failure(A.task, A.host, 0, 0, 0.0, "no socket", "TypeError", phase="lead")
    f = agent(B)
    f.tick(0.0)
    counters = FailureCounters(failed_terms=(failure,))
    f.log_read(5, replace(ENTRY, counters=counters, gave_up=True), None, 0.0)
    (news,) = delivered(f.not_connected("refused", 0.1, refused=REFUSED), Waiting)
    assert news.text == "term 2 has failed: the leader, task 7_0 on node1: TypeError: no socket"


def test_an_attempt_to_connect_ends_with_the_claim():
    """Its answer would come from a replaced leader."""
    f = connecting(D)
    f.not_connected("no route", 0.1, refused=UNREACHABLE)
    f.log_read(5, ENTRY, 1, 1.0)
    now, effects = 1.0, []
    while not of(effects, Claim):
        now += 0.1
        assert now < 10.0
        reads = of(f.tick(now), ReadLog)
        effects = f.log_read(5, ENTRY, 1, now) if reads else []
    assert effects == [Disconnect(), Claim(6, ENTRY, possibly_alive=True)]
    assert f.not_connected("no route", now, refused=UNREACHABLE) == []


def test_a_claim_that_fails_is_tried_again():
    """The file system failed, or another agent was first."""
    search = Search(agent(B), refused=REFUSED)
    first = search.until_claim(10.0)
    assert first is not None
    search.pending = search.f.claimed(None, search.now)
    assert search.until_claim(10.0) is not None


# ---- Slurm's answer, and suspension ---------------------------------------------------------


@pytest.mark.parametrize(("me", "queries"), [(A, True), (B, True), (C, True), (D, False)])
def test_the_first_three_members_query_slurm(me, queries):
    """Once a term, to limit the load on slurmctld."""
    entry = replace(ENTRY, leader=replace(LEADER, task="7_9"))
    search = Search(agent(me), entry=entry, beats=0.5)
    assert search.until_claim(20.0) is None
    assert search.queries == (["7_9"] if queries else [])


def test_a_task_that_does_not_run_has_no_living_leader():
    """The agent does not wait for the lease of an ended task."""
    f = connecting(B)
    assert QuerySlurm("7_0") in f.not_connected("no route", 0.1, refused=UNREACHABLE)
    search = Search(f, 0.2, beats=0.5)
    search.pending = f.slurm_answered("7_0", False, 0.2)
    when = search.until_claim(10.0)
    assert when is not None and when < 1.0


@pytest.mark.parametrize(("task", "runs"), [("7_0", True), ("7_0", None), ("7_3", False)])
def test_other_answers_of_slurm_change_nothing(task, runs):
    """The task runs, its state is unknown, or another task does not run."""
    search = Search(agent(B), beats=0.5)
    search.until_claim(0.5)
    search.pending = search.f.slurm_answered(task, runs, search.now)
    assert search.until_claim(20.0) is None


def test_an_answer_of_slurm_does_not_outlive_a_connection():
    """The leader has answered since."""
    f = connecting(B)
    f.not_connected("no route", 0.1, refused=UNREACHABLE)
    f.slurm_answered("7_0", False, 0.2)
    f.connected(0.3)
    f.disconnected("its connection closed", 1.0)
    assert not of(f.log_read(5, ENTRY, 1, 1.0), Claim)
    search = Search(f, 1.0, beats=0.5)
    assert search.until_claim(20.0) is None


def test_a_suspended_agent_deposes_no_leader_for_that_time():
    """Its earlier observations are out of date."""
    search = Search(agent(D), beats=0.5)
    assert search.until_claim(2.0) is None
    search.now += 600.0
    assert search.until_claim(20.0) is None


def test_a_suspended_agent_observes_the_lease_anew():
    """Its leader may have been suspended as well, and needs time to renew it."""
    search = Search(agent(D), lease=1)
    assert search.until_claim(2.0) is None
    search.now += 600.0
    assert search.until_claim(2.5) is None
    search.beats = 0.5
    assert search.until_claim(20.0) is None


def test_a_suspended_agent_confirms_refusals_anew():
    """The leader may have restarted meanwhile."""
    f = connecting(B)
    f.not_connected("refused", 0.0, refused=REFUSED)
    f.tick(600.0)
    assert not of(f.log_read(5, ENTRY, 2, 600.0), Claim)


def test_a_slow_read_proves_nothing_about_its_own_duration():
    """The lease may have been read at its start: two reads must be that far apart."""
    watch = LeaderFailureDetector(term=2, since=0.0, followed=True)
    watch.record_lease(7, 3.0, 3.1)
    watch.record_lease(7, 3.2, 60.0)
    assert not watch.is_dead(LIVENESS, 60.0, damaged=False)
    watch.record_lease(7, 60.1, 60.2)
    assert watch.is_dead(LIVENESS, 60.2, damaged=False)


def test_an_unreadable_lease_has_not_expired():
    """No leader is deposed because this agent's file system does not answer."""
    f = following(B)
    now = 0.0
    while now < 60.0:
        now = round(now + 0.1, 1)
        reads = of(f.tick(now), ReadLog)
        effects = f.log_unreadable("input/output error", now) if reads else []
        assert not of(effects, Claim)
    assert f.log_read(5, ENTRY, 1, now) == [Connect(ENTRY)]


def test_a_lease_on_files_that_may_be_old_expires_later():
    """If a file that is opened may be 60 s old, the lease may have been renewed since."""
    old = HeartbeatConfig.of(0.5, 3.0, 4, 60.0)
    watch = LeaderFailureDetector(term=2, since=0.0, followed=True)
    watch.record_lease(7, 3.0, 3.1)
    watch.record_lease(7, 65.0, 65.1)
    assert not watch.is_dead(old, 65.1, damaged=False)
    watch.record_lease(7, 65.7, 65.8)
    assert watch.is_dead(old, 65.8, damaged=False)
    assert old.election_s > old.lapse_s
