"""hpc_elastic.worker.checkpoint_trigger: when to save, on all ranks at the same step."""

import subprocess
import sys

import pytest

from hpc_elastic.worker import process_group
from hpc_elastic.worker.checkpoint_trigger import Clock, Period, PeriodDecision
from hpc_elastic.worker.shared_page import CheckpointRequest, SharedPage

ALONE = {"page": None, "rank": 0, "world_size": 1, "now": 0.0}


def in_run(tmp_path, rank=0):
    """Return the agent's side of a page, and the decision of the worker that has it."""
    agent = SharedPage.create(tmp_path, rank)
    return agent, PeriodDecision(SharedPage(tmp_path / f"worker-{rank}"), rank, 4, now=0.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"every_steps": 5, "every_s": 3.0}, r"one of .* not \['every_s', 'every_steps'\]"),
        ({"every_steps": 0}, "every_steps=0: must be above 0"),
        ({"every_s": -1.0}, "every_s=-1.0: must be above 0"),
        ({"overhead": 1.0}, "overhead=1.0: must be between 0 and 1"),
    ],
)
def test_impossible_periods_are_refused(given, message):
    """The message names the argument and its value."""
    with pytest.raises(ValueError, match=message):
        Period(**given)


@pytest.mark.parametrize(
    ("period", "saved"),
    [(Period(every_steps=4), [8, 12, 16]), (Period(every_s=10), [10, 20])],
)
def test_a_process_alone_saves_by_its_steps_or_its_clock(period, saved):
    """A count of steps is the run's, so a restart does not shift it."""
    decision = PeriodDecision(**ALONE)
    assert [s for s in range(6, 21) if decision.at(s, period, float(s))][:3] == saved


def test_a_share_of_time_follows_from_what_a_checkpoint_costs():
    """One that stops the training for 2 s may be made every 100 s at 2 %."""
    clock, period = Clock(0.0), Period(overhead=0.02)
    clock.called(1, 1.0)
    assert not clock.is_due(period, 29.0)
    assert clock.is_due(period, 30.0), "the first one, of unknown cost"
    clock.called(2, 30.0)
    for now in (31.0, 32.0):
        clock.called(int(now), now)
    clock.saves(period, 32.0)
    clock.called(33, 32.0 + 2.0 + 1.0)
    assert clock.cost_s == pytest.approx(2.0, abs=3.0)
    assert clock.is_due(period, 32.0 + clock.cost_s / 0.02)
    assert not clock.is_due(period, 31.9 + clock.cost_s / 0.02)


def test_the_cost_of_a_checkpoint_does_not_count_the_step_after_it():
    """Steps of one second, and a checkpoint of three."""
    clock, now = Clock(0.0), 0.0
    for step in range(20):
        now += 1.0
        clock.called(step, now)
    clock.saves(Period(), now)
    clock.called(20, now + 4.0)
    assert clock.cost_s == pytest.approx(3.0)


def test_a_step_counts_once_however_often_it_is_asked_about():
    """What a checkpoint costs is seen at the next step, not at a log line behind it."""
    clock, period, now = Clock(0.0), Period(), 0.0
    for step in range(20):
        now += 1.0
        clock.called(step, now)
        clock.called(step, now + 0.1)
    for asked_at in (now, now + 2.9):  # it takes 3 s
        clock.called(19, asked_at)
        clock.saves(period, asked_at)
    clock.called(20, now + 4.0)
    assert clock.cost_s == pytest.approx(3.0)


@pytest.mark.parametrize("in_a_run", [False, True])
def test_every_caller_of_a_step_gets_the_groups_answer(tmp_path, in_a_run):
    """A log line, or a best-of beside the main one, takes the answer from nobody."""
    agent, decision = in_run(tmp_path) if in_a_run else (None, PeriodDecision(**ALONE))
    main, other, rare = Period(every_s=10.0), Period(every_steps=1000), Period(every_steps=2)
    if agent is not None:
        agent.request_checkpoint(CheckpointRequest(1, 7, confirmed=True, pause=True))
    asked = [main, other, main, other, rare]
    found = {s: [decision.at(s, each, s * 2.0) for each in asked] for s in range(1, 9)}
    if in_a_run:
        assert found[7] == [True] * 5
    else:
        assert found[5] == [True, False, True, False, False]
    assert found[6] == [False, False, False, False, True]


def test_each_caller_has_a_period_of_its_own():
    """One that asks each minute does not put off another that asks each ten minutes."""
    decision = PeriodDecision(**ALONE)
    often, seldom = Period(every_s=60.0), Period(every_s=600.0)
    found: dict[Period, list[int]] = {each: [] for each in (seldom, often)}
    for minute in range(1, 21):
        for period, steps in found.items():
            if decision.at(minute, period, minute * 60.0):
                steps.append(minute)
    assert found[often] == list(range(1, 21)) and found[seldom] == [10, 20]


def test_nothing_given_is_two_percent():
    """A script that says nothing has checkpoints all the same."""
    assert Period().interval_s(1.0) == pytest.approx(50.0)


def test_in_a_run_the_first_rank_asks_for_a_periodic_checkpoint_once(tmp_path):
    """And again only where nothing came of it for a while."""
    agent, decision = in_run(tmp_path)
    period = Period(every_s=5.0)
    for tenth in range(100):
        assert not decision.at(tenth, period, tenth / 10)
    assert agent.read().wanted == 1
    for tenth in range(100, 200):
        decision.at(tenth, period, tenth / 10)
    assert agent.read().wanted == 2


def test_in_a_run_the_other_ranks_do_not_ask(tmp_path):
    """Their clocks may differ."""
    agent, decision = in_run(tmp_path, rank=1)
    decision.at(1, Period(every_s=5.0), 100.0)
    assert agent.read().wanted == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_in_a_run_every_rank_saves_at_the_agreed_step(tmp_path, rank):
    """Whatever its own period says."""
    agent, decision = in_run(tmp_path, rank)
    agent.request_checkpoint(CheckpointRequest(1, 12, confirmed=True))
    period = Period(every_steps=10)
    assert [s for s in range(1, 22) if decision.at(s, period, float(s))] == [10, 12, 20]


def test_outside_a_run_the_clock_of_the_first_rank_decides(monkeypatch):
    """All ranks save at the same steps, though their clocks differ; asked about once a second."""
    sent: list[list[int]] = []
    at_rank = 0

    def broadcast(row):
        if at_rank == 0:
            sent.append(row)
        return sent[-1]

    monkeypatch.setattr(process_group, "size", lambda: 2)
    monkeypatch.setattr(process_group, "broadcast_row", broadcast)
    ranks = [PeriodDecision(None, rank, 2, now=0.0) for rank in range(2)]
    period, saved = Period(every_s=10.0), ([], [])
    for step in range(1, 301):
        for at_rank, decision in enumerate(ranks):
            now = step * 0.1 * (1 + 3 * at_rank)
            answers = {decision.at(step, period, now) for _ in range(2)}
            assert len(answers) == 1, "twice at a step"
            if answers == {True}:
                saved[at_rank].append(step)
    assert saved[0] == saved[1] == [100, 200, 300]
    assert 30 <= len(sent) <= 50


def test_the_ranks_agree_again_where_the_count_of_steps_begins_anew(monkeypatch):
    """As in a second training of one process."""
    monkeypatch.setattr(process_group, "size", lambda: 2)
    monkeypatch.setattr(process_group, "broadcast_row", list)
    decision, period = PeriodDecision(None, 0, 2, now=0.0), Period(every_s=10.0)
    assert not decision.at(1000, period, 0.1)
    assert not decision.at(1001, period, 0.2)
    assert decision.at(1, period, 10.5)


def test_workers_outside_a_run_need_a_process_group_to_go_by_the_clock():
    """Said at the first step, with what to do instead."""
    decision = PeriodDecision(None, 0, 2, now=0.0)
    with pytest.raises(ValueError, match=r"init_process_group.*or give every_steps"):
        decision.at(1, Period(every_s=5.0), 1.0)
    assert decision.at(4, Period(every_steps=2), 2.0)


def test_outside_a_run_everything_may_be_called():
    """By a script alone: nothing is known, and nothing happens."""
    script = """
from hpc_elastic import release_node, preemption_deadline, should_checkpoint
assert [s for s in range(1, 7) if should_checkpoint(s, every_steps=3)] == [3, 6]
assert preemption_deadline() is None
release_node()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_node_can_not_be_left_in_the_past():
    """The message names the argument."""
    from hpc_elastic.worker.checkpoint_trigger import release_node

    with pytest.raises(ValueError, match="within_s=0: must be above 0"):
        release_node(within_s=0)
