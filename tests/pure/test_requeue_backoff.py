"""Nodes that are too few for too long are requeued."""

import random
from dataclasses import replace
from unittest.mock import ANY

import pytest

from groups import FIRST, A, B, C, SentBack, decisions, machine, notes, resumed, running, training
from hpc_elastic.config.schema import LauncherSettings, RendezvousSettings
from hpc_elastic.rendezvous.log_entry import RoundRules
from hpc_elastic.rendezvous.messages import Join
from hpc_elastic.rendezvous.round_state import RoundPhase, RoundState
from hpc_elastic.rendezvous.task_recovery import LONGEST_WAIT, RequeueBackoff, longest_join_s
from hpc_elastic.run.events import LossReason
from hpc_elastic.slurm.job_state import TaskState


def test_too_few_for_too_long_gives_every_node_back():
    """After a random time of one to two times below_min_timeout_s: one of two runs gives way."""
    m = machine(min_nodes=3, below_min_timeout_s=10.0)
    m.join(A, 0.0)
    m.join(B, 5.0)
    assert decisions(m.tick(9.9)) == []
    (given,) = decisions(m.tick(20.0))
    assert isinstance(given, SentBack) and given.agents == (A, B) and given.all
    assert m.run.phase is RoundPhase.DISBANDED and m.tick(99.0) == []


def test_nodes_are_kept_where_there_is_no_queue():
    """Without below_min_timeout_s a group waits for min nodes for ever."""
    m = machine(min_nodes=2)
    m.join(A, 0.0)
    assert decisions(m.tick(1e9)) == []


def test_the_wait_begins_anew_once_there_were_enough():
    """A group that has trained waits its full time again."""
    m = training(A, B, min_nodes=2, below_min_timeout_s=10.0)
    m.agent_lost(B, LossReason.SILENT, 500.0)
    m.join(A, 500.1)
    assert decisions(m.tick(509.9)) == []
    (given,) = decisions(m.tick(520.2))
    assert isinstance(given, SentBack) and given.all


@pytest.mark.parametrize(("before", "least", "most"), [(0, 7, 23), (2, 30, 90), (30, 300, 900)])
def test_the_time_away_doubles_and_is_random_within_its_range(before, least, most):
    """Half to one and a half of the mean; about ten minutes after many times."""
    requeued = set()
    for seed in range(40):
        m = machine(min_nodes=2, below_min_timeout_s=10.0)
        m.run.backoff.rng, m.run.backoff.times_requeued = random.Random(seed), before
        m.join(A, 0.0)
        (given,) = decisions(m.tick(20.0))
        requeued.add(given.delay_s)
    assert len(requeued) == 40 and least <= min(requeued) and max(requeued) <= most
    assert max(requeued) > 1.5 * min(requeued)


def test_the_wait_is_random_from_one_run_to_the_next():
    """Two runs that hold half of the nodes each do not requeue them at the same time."""

    def waited(seed: int) -> float:
        rules = RoundRules(2, 4, 2, 60.0, 5.0, below_min_timeout_s=10.0)
        m = RoundState(FIRST, rules, 0.0, random.Random(seed))
        m.join(A, 0.0)
        return next(t / 10 for t in range(1000) if decisions(m.tick(t / 10)))

    waits = {waited(seed) for seed in range(20)}
    assert len(waits) > 10 and min(waits) >= 10.0 and max(waits) <= 20.1


def test_waits_and_times_away_are_bounded_however_often_nodes_were_given_back():
    """With the defaults, no agent gives up before the run requeues it."""
    below, join = LauncherSettings().below_min_timeout_s, RendezvousSettings().join_timeout_s
    rules = RoundRules(2, 4, 2, 60.0, 5.0, below_min_timeout_s=below)
    for times in range(10_001):
        back = RequeueBackoff(rules, random.Random(times), times)
        assert back.is_over(LONGEST_WAIT * below) and not back.is_over(below - 1.0)
        assert 0.0 < back.time_away() <= 900.0
        assert 0.0 < back.time_away(60.0) <= 900.0
    assert LONGEST_WAIT * below < join


def test_an_agent_waits_longer_than_its_run():
    """Whatever the settings; without below_min_timeout_s for as long as its job may run."""
    assert longest_join_s(1800.0, 300.0) == 1800.0
    assert longest_join_s(1800.0, 900.0) > LONGEST_WAIT * 900.0
    assert longest_join_s(1800.0, None) > 365 * 86400.0


def test_whoever_joins_after_that_goes_back_too():
    """For the same time as the others."""
    m = machine(min_nodes=2, below_min_timeout_s=10.0)
    m.join(A, 0.0)
    (given,) = decisions(m.tick(20.0))
    assert decisions(m.join(B, 21.0)) == [SentBack((B,), given.delay_s, all=False)]
    assert m.agent_lost(A, LossReason.CONNECTION_CLOSED, 21.0) == []


def test_a_round_forgets_how_often_nodes_were_given_back():
    """The next shortage is a new one."""
    m = resumed(times_requeued=3)
    m.join(A, 100.0)
    m.slurm_answered(running(A), 100.1, 100.1)
    assert m.run.phase is RoundPhase.RUNNING and m.run.backoff.times_requeued == 0


def test_a_run_that_waits_in_vain_gives_its_nodes_back_once_that_is_sure():
    """Two answers some seconds apart; in between it may have got its nodes."""
    m = machine(min_nodes=2, below_min_timeout_s=300.0)
    m.join(A, 0.0)
    assert m.sweep_answered("others hold it", 1.0) == [] and m.sweep_answered(None, 3.0) == []
    assert (
        m.sweep_answered("others hold it", 5.0) == []
        and m.sweep_answered("others hold it", 8.0) == []
    )
    effects = m.sweep_answered("others hold it", 10.5)
    (given,) = decisions(effects)
    assert isinstance(given, SentBack) and given.agents == (A,) and given.all
    (note,) = notes(effects, "nodes_requeued")
    assert note.fields["why"] == "others hold it" and 30.0 <= given.delay_s <= 90.0
    assert m.run.phase is RoundPhase.DISBANDED


@pytest.mark.parametrize(("attempt", "kept"), [(0, False), (1, True)])
def test_a_node_whose_task_may_not_be_requeued_any_more_is_kept(attempt, kept):
    """A requeue would end the task, and the run: after a time-out, in a sweep, in training."""
    m = machine(min_nodes=2, below_min_timeout_s=10.0, max_requeues=1)
    m.join(replace(A, attempt=attempt), 0.0)
    assert m.run.is_short is not kept
    assert m.sweep_answered("others hold it", 1.0) == []
    assert bool(m.sweep_answered("others hold it", 8.0)) is not kept
    late = machine(min_nodes=2, below_min_timeout_s=10.0, max_requeues=1)
    late.join(replace(A, attempt=attempt), 0.0)
    assert bool(decisions(late.tick(21.0))) is not kept
    late.run.participants.joined = {replace(B, attempt=attempt): 0.0}
    assert bool(late.run.requeue_late(50.0)) is not kept


def test_a_run_that_trains_or_has_no_queue_waits_for_nothing_in_vain():
    """The answer is old, or its nodes are never requeued."""
    trains = training(A, B, min_nodes=2, below_min_timeout_s=300.0)
    stays = machine(min_nodes=2)
    stays.join(A, 0.0)
    for m in (trains, stays):
        assert m.sweep_answered("others hold it", 1.0) == []
        assert m.sweep_answered("others hold it", 20.0) == []


def test_the_wait_of_a_node_counts_under_each_leader():
    """Else several leaders in turn would let it wait until its agent gives up, which fails."""
    m = machine(min_nodes=3, below_min_timeout_s=10.0)
    m.join(A, 0.0, Join(4, waited_s=LONGEST_WAIT * 10.0 - 1.0))
    m.join(B, 0.0)
    assert decisions(m.tick(0.9)) == []
    (given,) = decisions(m.tick(1.1))
    assert isinstance(given, SentBack) and given.agents == (A, B) and given.all


def test_a_spare_that_has_waited_under_earlier_leaders_goes_back():
    """The group has its max nodes; the time under this leader alone would not be too long."""
    m = training(A, B, max_nodes=2, below_min_timeout_s=10.0)
    assert decisions(m.join(C, 5.0, Join(2, waited_s=20.0))) == [SentBack((C,), ANY)]


def test_a_newcomer_waits_for_a_checkpoint_until_its_agent_would_give_up():
    """It goes back before, and comes again: an agent that gives up fails."""
    m = training(A, B, max_nodes=3, below_min_timeout_s=10.0, scale_up="checkpoint")
    for agent in (A, B):
        m.checkpointed(agent, 1, 0, 1.0)
    m.join(C, 5.0)
    assert not any(isinstance(d, SentBack) for d in decisions(m.tick(54.0)))
    assert SentBack((C,), ANY) in decisions(m.tick(55.1))


def test_what_is_known_of_waiting_nodes_is_one_record_a_task():
    """However often its attempts have joined."""
    m = machine(min_nodes=2)
    for attempt in range(50):
        m.join(replace(A, attempt=attempt), float(attempt))
        m.agent_lost(replace(A, attempt=attempt), LossReason.CONNECTION_CLOSED, float(attempt))
    known = m.run.participants
    assert len(known.requests) == len(known._last_join) == 1


def test_nodes_wait_for_those_that_are_being_booted():
    """On a cloud a node takes minutes to come up; one that then stays away is waited for as any."""
    m = machine(min_nodes=2, below_min_timeout_s=10.0)
    m.join(A, 0.0)
    for now in (1.0, 20.0, 30.0):
        m.slurm_answered(running(A) | {B.task: TaskState(B.task, "CONFIGURING")}, now, now)
        assert decisions(m.tick(now)) == []
    m.slurm_answered(running(A, B), 31.0, 31.0)
    assert decisions(m.tick(35.0)) == []
    (given,) = decisions(m.tick(51.1))
    assert isinstance(given, SentBack) and given.all


def test_too_few_nodes_that_are_being_booted_keep_none():
    """Min nodes would not come together with them."""
    m = machine(min_nodes=3, below_min_timeout_s=10.0)
    m.join(A, 0.0)
    states = running(A) | {B.task: TaskState(B.task, "CONFIGURING")}
    (given,) = decisions(m.slurm_answered(states, 20.0, 20.0))
    assert isinstance(given, SentBack) and given.all
