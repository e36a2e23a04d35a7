"""Nodes that are too few for too long are requeued."""

import random
from dataclasses import replace

import pytest
from groups import FIRST, A, B, SentBack, decisions, machine, notes, resumed, running, training

from hpc_elastic.rendezvous.log_entry import RoundRules
from hpc_elastic.rendezvous.round_state import RoundPhase, RoundState


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
    m.agent_lost(B, "silent", 500.0)
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


def test_whoever_joins_after_that_goes_back_too():
    """For the same time as the others."""
    m = machine(min_nodes=2, below_min_timeout_s=10.0)
    m.join(A, 0.0)
    (given,) = decisions(m.tick(20.0))
    assert decisions(m.join(B, 21.0)) == [SentBack((B,), given.delay_s, all=False)]
    assert m.agent_lost(A, "its connection closed", 21.0) == []


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
    parks = late.run.backoff.late_agents({replace(B, attempt=attempt): 0.0}, 50.0)
    assert bool(parks) is not kept


def test_a_run_that_trains_or_has_no_queue_waits_for_nothing_in_vain():
    """The answer is old, or its nodes are never requeued."""
    trains = training(A, B, min_nodes=2, below_min_timeout_s=300.0)
    stays = machine(min_nodes=2)
    stays.join(A, 0.0)
    for m in (trains, stays):
        assert m.sweep_answered("others hold it", 1.0) == []
        assert m.sweep_answered("others hold it", 20.0) == []
