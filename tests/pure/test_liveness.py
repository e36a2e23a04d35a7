"""Who is heard lives, and who hears enough leads; Slurm is asked politely."""

from dataclasses import replace
from itertools import pairwise

import pytest
from leaders import (
    HERE,
    LIVENESS,
    after,
    join,
    leading,
    meanwhile,
    of,
    passed,
    rejoin,
    say,
    told,
    training,
)

from groups import A, B, C, D, running
from hpc_elastic.rendezvous.effects import (
    Append,
    Disconnect,
    Effect,
    Note,
    QueryTasks,
    RenewLease,
    StepDown,
)
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig, LeaderState
from hpc_elastic.rendezvous.log_entry import Agent, Endpoint, LogEntry, claim
from hpc_elastic.rendezvous.messages import CheckpointAnnounced, Close, Heartbeat, Join, Leave, Stop
from hpc_elastic.rendezvous.round_state import RoundPhase
from hpc_elastic.run.events import LossReason

# ---- who lives ----------------------------------------------------------------------------


def test_a_broken_connection_is_a_loss_at_once():
    """The others' workers are stopped, even those that hang in a collective."""
    leader = training(A, B)
    effects = leader.disconnected(B, LossReason.CONNECTION_CLOSED, 2.0)
    assert told(effects, Stop) == [A]
    assert leader.disconnected(B, LossReason.CONNECTION_CLOSED, 2.1) == []


def test_an_agent_that_leaves_is_gone_at_once():
    """It says why."""
    effects = say(training(A, B), B, Leave("taken by SIGTERM"), 2.0)
    assert told(effects, Stop) == [A]
    (gone,) = [e for e in effects if isinstance(e, Note) and e.kind == "node_lost"]
    assert gone.fields["why"] == "taken by SIGTERM"


def test_a_silent_agent_is_lost_after_heartbeat_timeout_s():
    """Its connection is abandoned, which would not break by itself."""
    leader = training(A, B, C)
    assert of(passed(leader, 4.0, A, C), Disconnect) == []
    say(leader, A, Heartbeat(progress={}), 4.1)
    say(leader, C, Heartbeat(progress={}), 4.1)
    effects = leader.tick(4.1)
    assert of(effects, Disconnect) == [Disconnect(B)] and told(effects, Stop) == [A, C]


def test_who_fell_silent_may_run_still_until_it_is_heard_or_hangs_up():
    """The next entry says so, for the next leader."""
    leader = training(A, B, C)
    passed(leader, 5.0, A, C)
    assert leader.run.recovery.possibly_alive == {B.task: B.host}
    rejoin(leader, A, 5.1)
    rejoin(leader, C, 5.1)
    (append,) = of(leader.slurm_answered(running(A, B, C), 5.2), Append)
    assert append.entry.possibly_alive == {B.task: B.host}
    assert leading(append.entry).run.recovery.possibly_alive == {B.task: B.host}
    leader.connected(B, 6.0)
    assert leader.run.recovery.possibly_alive == {}


def test_who_hangs_up_has_ended():
    """Even where Slurm has said before that its task is gone."""
    leader = training(A, B, C)
    leader.run.recovery.possibly_alive[B.task] = B.host
    leader.disconnected(B, LossReason.CONNECTION_CLOSED, 2.0)
    assert leader.run.recovery.possibly_alive == {}


def test_whatever_an_agent_says_shows_that_it_lives():
    """Beats or others."""
    leader = training(A, B)
    for now in (2.5, 4.5, 6.5):
        say(leader, A, CheckpointAnnounced(step=1, paused=0, index=2), now)
        say(leader, B, Heartbeat(progress={}), now)
        assert of(leader.tick(now), Disconnect) == []


def test_a_leader_that_slept_forgives_everybody():
    """It was not they who were silent; those who are will be found out."""
    leader = training(A, B)
    leader.tick(1.5)
    assert of(leader.tick(60.0), Disconnect) == []
    assert of(meanwhile(leader, 62.5, since=60.5), Disconnect) == []
    assert {e.agent for e in of(leader.tick(63.0), Disconnect)} == {A, B}


def test_an_agent_that_connects_anew_was_lost():
    """Its workers have been stopped: its round is over."""
    leader = training(A, B)
    effects = leader.connected(B, 2.0)
    assert effects[0] == Disconnect(B) and told(effects, Stop) == [A]


def test_a_stranger_is_not_listened_to():
    """Only agents that are connected count."""
    leader = training(A)
    assert say(leader, B, Close(), 2.0) == []
    assert say(leader, B, Join(request=1), 2.0) == []


def test_a_new_leader_waits_for_the_members_of_the_last_round():
    """Twice as long as silence may last; then they are lost."""
    leader = after(A, B, C)
    for agent in (A, B):
        join(leader, agent, 0.1)
    assert of(leader.slurm_answered(running(A, B, C), 0.2), Append) == []
    assert of(meanwhile(leader, 6.0, A, B, since=0.5), Append) == []
    effects = meanwhile(leader, 7.0, A, B, since=6.5)
    (append,) = of(effects, Append)
    assert append.entry.members == (A, B)


def test_a_new_leader_does_not_wait_for_an_attempt_whose_next_one_has_come():
    """A member that was requeued while nobody led."""
    leader = after(A, B)
    again = Agent(B.task, 1, B.slot, "node4", 1)
    join(leader, A, 0.1)
    join(leader, again, 0.2)
    (append,) = of(leader.slurm_answered(running(A, again), 0.3), Append)
    assert append.entry.members == (A, again)
    assert leader.run.phase is RoundPhase.RUNNING


def test_a_new_leader_does_not_wait_for_the_leader_before():
    """Its claim has noted that it is lost."""
    before = LogEntry(4, 2, Endpoint("10.0.0.7", 1, A.task, 0), round=3, members=(A, B))
    leader = leading(claim(5, before, HERE, 1000.0))
    join(leader, B, 0.1)
    assert of(leader.slurm_answered(running(A, B), 0.2), Append)


def test_a_member_that_finds_the_new_leader_is_not_lost():
    """Its place is kept, while it stops its workers."""
    leader = after(A, B)
    join(leader, A, 0.1)
    leader.connected(B, 0.2)
    passed(leader, 9.0, A, B)
    assert B in leader.run.participants.pending_rejoin


# ---- the lease, and which side may go on --------------------------------------------------


def renews(leader: LeaderState, now: float, *alive: Agent) -> bool:
    """Whether the lease is renewed in the next second."""
    return RenewLease() in meanwhile(leader, now + 1.0, *alive, since=now)


def test_the_lease_is_renewed_with_every_second_tick():
    """While a leader hears its members, or enough for the first round."""
    leader = leading()
    join(leader, A, 0.1)
    assert of(meanwhile(leader, 5.0, A, since=0.5), RenewLease) == 5 * [RenewLease()]
    assert of(meanwhile(training(A, B), 5.5, A, B), RenewLease) == 5 * [RenewLease()]


@pytest.mark.parametrize(("heard", "renewed"), [((A, B, C), True), ((A, B), True), ((A,), False)])
def test_a_leader_that_hears_less_than_half_renews_no_lease(heard, renewed):
    """The others have fallen silent: it may be the one that is cut off."""
    leader = training(A, B, C, D)
    passed(leader, 5.0, *heard)
    assert renews(leader, 5.5, *heard) is renewed


def unrenewed(leader: LeaderState, until: float, *alive: Agent) -> list[Effect]:
    """Let time pass in which no renewal of the lease is done; return all effects."""
    effects, now = [], 1.0
    while now < until:
        now += 0.5
        for agent in alive:
            say(leader, agent, Heartbeat(progress={}), now)
        effects += leader.tick(now)
    return effects


def test_a_leader_that_can_not_renew_its_lease_steps_down_before_others_may_take_over():
    """One of its members is not heard: it may be alive, and see that the lease has lapsed."""
    leader = training(A, B, C)
    assert of(unrenewed(leader, 4.0, A, B, C), StepDown) == []
    assert of(meanwhile(leader, 8.0, A, B, since=4.5), StepDown) == [], "it is renewed"
    leader = training(A, B, C)
    effects = unrenewed(leader, 1.0 + 3.0 + LIVENESS.lapse_s, A, B)
    assert of(effects, StepDown) == [StepDown()]
    assert leader.fenced


def test_a_leader_all_of_whose_members_are_heard_may_wait_for_its_file_system():
    """Nobody looks at its lease; a decision that can not be recorded is another matter."""
    leader = training(A, B)
    assert of(unrenewed(leader, 60.0, A, B), StepDown) == []
    leader = training(A, B)
    say(leader, A, Leave(why="test"), 1.2)
    rejoin(leader, B, 1.3)
    assert of(leader.slurm_answered(running(B), 1.4), Append)
    assert of(unrenewed(leader, 12.0, B), StepDown) == [StepDown()]


def test_a_leader_whose_members_hung_up_renews_its_lease():
    """A connection that closes shows that the network works."""
    leader = training(A, B, C, D)
    for agent in (B, C, D):
        leader.disconnected(agent, LossReason.CONNECTION_CLOSED, 2.0)
    passed(leader, 5.0, A)
    assert renews(leader, 5.5, A)


def test_a_leader_that_may_be_cut_off_closes_nothing_while_others_elect():
    """Twice heartbeat_timeout_s; if nobody did, the others are dead, and it goes on."""
    leader = training(A, B, C)
    passed(leader, 4.5, A)
    assert leader.run.phase is RoundPhase.FORMING
    rejoin(leader, A, 4.6)
    leader.slurm_answered(running(A), 4.7)
    assert leader.run.not_before == 4.5 + 6.0
    assert of(meanwhile(leader, 10.0, A, since=5.0), Append) == []
    say(leader, A, Heartbeat(progress={}), 10.5)
    assert of(leader.tick(10.5), Append)


def test_a_leader_that_hears_them_again_goes_on():
    """The network was away for a moment."""
    leader = training(A, B, C)
    passed(leader, 4.5, A)
    effects = rejoin(leader, A, 4.5)
    for agent in (B, C):
        effects += join(leader, agent, 4.6, request=2)
    effects += leader.tick(4.7)
    assert renews(leader, 5.0, A, B, C)
    assert of(effects, Append), "nobody waits for an election that nobody needs"


def test_slurm_may_say_that_the_silent_ones_have_ended():
    """Then nobody of them leads another group."""
    leader = training(A, B, C)
    passed(leader, 4.5, A)
    rejoin(leader, A, 4.6)
    assert not renews(leader, 4.7, A)
    leader.slurm_answered(running(A, s1="NODE_FAIL", s2="COMPLETED"), 4.8)
    assert renews(leader, 4.9, A)


def test_a_leader_below_min_nodes_renews_no_lease():
    """It could decide nothing: whoever can not reach it may try to lead."""
    leader = training(A, B, min_nodes=2)
    leader.disconnected(B, LossReason.CONNECTION_CLOSED, 2.0)
    assert not renews(leader, 2.1, A)
    join(leader, B, 2.2, request=2)
    assert renews(leader, 2.3, A, B)


# ---- heartbeats ---------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "every_s"), [(1, 0.5), (2500, 0.5), (4000, 0.8), (9000, 1.0)])
def test_many_agents_beat_more_seldom(size, every_s):
    """So many a second that one leader can take them; a third of heartbeat_timeout_s at most."""
    assert HeartbeatConfig.of(0.5, 3.0, size) == HeartbeatConfig(every_s, 3.0)


def test_a_slow_heartbeat_is_left_as_it_was_set():
    """Whatever a third of heartbeat_timeout_s is."""
    assert HeartbeatConfig.of(2.0, 3.0, 9000) == HeartbeatConfig(2.0, 3.0)


def test_all_agents_hear_a_beat_with_every_tick():
    """By which they know that their leader lives."""
    leader = training(A, B)
    for now in (1.5, 2.0):
        assert told(leader.tick(now), Heartbeat) == [A, B]


def test_the_last_report_of_each_members_workers_is_kept():
    """For the status; and the first rank's gives the outlook."""
    leader = training(A, B)
    say(leader, B, Heartbeat(progress={"step": 3, "total": 100, "loss": 0.5}), 2.0)
    assert leader.progress == {B: {"step": 3, "total": 100, "loss": 0.5}}
    assert leader.run.estimator.outlook.restart_cost_s is None
    for now, step in ((3.0, 10), (4.0, 20)):
        say(leader, A, Heartbeat(progress={"step": step, "total": 100, "loss": None}), now)
    assert leader.run.estimator.outlook.restart_cost_s == 2.0
    assert leader.run.estimator.outlook.remaining_s == 8.0
    leader.disconnected(A, LossReason.CONNECTION_CLOSED, 5.0)
    assert set(leader.progress) == {B}


# ---- Slurm --------------------------------------------------------------------------------


def asks(effects: list[Effect]) -> bool:
    """Whether Slurm is asked."""
    return QueryTasks() in effects


def test_slurm_is_asked_as_soon_as_somebody_waits():
    """Not before: nobody would do anything with the answer."""
    leader = leading()
    assert not asks(leader.tick(0.5))
    leader.connected(A, 1.0)
    assert asks(say(leader, A, Join(request=1), 1.0))


def test_a_question_under_way_is_not_repeated():
    """However long squeue hangs."""
    leader = leading()
    assert asks(join(leader, A, 1.0))
    assert not asks(join(leader, B, 1.1)) and not asks(leader.tick(100.0))


def test_slurm_gets_ten_times_its_answering_time_to_rest():
    """A slurmctld that is slow is not hurried by anybody."""
    leader = leading(min_nodes=4)
    join(leader, A, 1.0)
    leader.slurm_answered(running(A), 3.0)
    assert not asks(join(leader, B, 4.0)) and not asks(leader.tick(22.9))
    assert asks(leader.tick(23.1))


def questions(leader: LeaderState, until: float, *alive: Agent) -> list[float]:
    """When Slurm is asked, if it answers at once and nothing ever changes."""
    asked, now = [], 1.0
    while now < until:
        now += 0.5
        effects = [e for a in alive for e in say(leader, a, Heartbeat(progress={}), now)]
        if asks([*effects, *leader.tick(now)]):
            asked.append(now)
            leader.slurm_answered(running(*alive), now)
    return asked


def test_slurm_is_asked_ever_more_seldom():
    """Once a minute in the end."""
    leader = leading(min_nodes=2)
    join(leader, A, 1.0)
    leader.slurm_answered(running(A), 1.0)
    asked = questions(leader, 1000.0, A)
    pauses = [b - a for a, b in pairwise(asked)]
    assert pauses[0] <= 1.0 and pauses == sorted(pauses)
    assert pauses[-1] == 60.0 and len(asked) < 30


def test_a_join_hurries_the_next_question():
    """Its sender may be the last one that is waited for."""
    leader = leading(min_nodes=3)
    join(leader, A, 1.0)
    leader.slurm_answered(running(A), 1.0)
    last = questions(leader, 500.0, A)[-1]
    assert asks(join(leader, B, last + 0.5))


def test_nobody_asks_slurm_while_a_full_group_trains():
    """Ten thousand nodes cost slurmctld nothing then."""
    leader = training(A, B)
    leader.slurm_answered(running(A, B), 1.0)
    assert questions(leader, 100.0, A, B) == []


def test_a_round_that_breaks_asks_anew():
    """At once, or as soon as it is polite."""
    leader = training(A, B, min_nodes=1)
    leader.slurm_answered(running(A, B), 1.1)
    leader.disconnected(B, LossReason.CONNECTION_CLOSED, 50.0)
    assert asks(rejoin(leader, A, 50.1))


def test_slurm_is_asked_about_a_node_that_is_parked():
    """How long it may stay says whether it is worth a restart."""
    leader = training(A, B, scale_up="on_restart")
    leader.slurm_answered(running(A, B), 1.1)
    leader.run.rules = replace(leader.run.rules, max_nodes=4)
    assert asks(join(leader, C, 50.0))


def test_an_answer_is_judged_by_when_it_was_asked_for():
    """An agent that joined in between may have been started after that."""
    leader = leading(min_nodes=2)
    join(leader, A, 1.0)
    join(leader, B, 2.0)
    leader.slurm_answered(running(A, s1="PENDING"), 3.0)
    assert leader.run.ranks.members == (A, B)
