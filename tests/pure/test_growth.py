"""Whether a node that joins late is worth a restart, and the requeue of one that is not."""

import pytest

from groups import A, B, C, D, SentBack, decisions, notes, pause, poll_none, running, stop, training
from hpc_elastic.rendezvous.effects import ClearHolds, Postpone
from hpc_elastic.rendezvous.group_change import (
    HELD_S,
    MEASURED_STEPS,
    Forecast,
    ProgressEstimator,
    should_scale_up,
)
from hpc_elastic.rendezvous.log_entry import decode_signed
from hpc_elastic.rendezvous.round_state import RoundState
from hpc_elastic.rendezvous.task_recovery import LONGEST_WAIT
from hpc_elastic.run.events import LossReason
from hpc_elastic.slurm.job_state import TaskState

# ---- whether to scale up ------------------------------------------------------------------


def test_admits_all_before_a_restart_was_measured():
    """The cost of a restart is unknown."""
    assert should_scale_up(2, [None, 5.0], Forecast(remaining_s=1.0)).admit == 2


def test_admits_all_if_the_end_of_the_run_is_unknown():
    """Any restart is repaid at some time."""
    assert should_scale_up(2, [None], Forecast(restart_cost_s=500.0)).admit == 1


@pytest.mark.parametrize(("remaining_s", "admit"), [(21.0, 1), (19.0, 0), (0.0, 0)])
def test_compares_the_time_saved_with_the_cost_of_a_restart(remaining_s, admit):
    """A second node halves the remaining time."""
    outlook = Forecast(remaining_s=remaining_s, restart_cost_s=10.0)
    assert should_scale_up(1, [None], outlook).admit == admit


@pytest.mark.parametrize(("nodes", "admit"), [(1, 0), (3, 3)])
def test_several_newcomers_share_one_restart(nodes, admit):
    """One node does not repay it, three do."""
    outlook = Forecast(remaining_s=30.0, restart_cost_s=10.0)
    assert should_scale_up(3, [None] * nodes, outlook).admit == admit


@pytest.mark.parametrize(("left_s", "admit"), [(21.0, 1), (20.0, 0), (0.0, 0)])
def test_a_node_whose_wall_time_ends_soon_is_not_worth_it(left_s, admit):
    """It must stay for two restarts: one when it joins, and one when it leaves."""
    decision = should_scale_up(1, [left_s], Forecast(restart_cost_s=10.0))
    assert decision.admit == admit
    assert ("wall time ends" in decision.why) == (not admit)


def test_a_node_that_leaves_soon_saves_time_only_until_then():
    """The time after its wall time does not count."""
    outlook = Forecast(remaining_s=1000.0, restart_cost_s=10.0)
    assert should_scale_up(9, [90.0], outlook).admit == 0
    assert should_scale_up(9, [900.0], outlook).admit == 1


def test_nodes_that_leave_soon_do_not_count_for_the_others():
    """The number to admit and the time saved are those of the nodes that stay."""
    outlook = Forecast(remaining_s=1000.0, restart_cost_s=10.0)
    decision = should_scale_up(1, [None, 5.0], outlook)
    assert decision.admit == 1
    assert "1 more node would save about 500 s of 1000 s, a restart costs 10.0 s" in decision.why


@pytest.mark.parametrize(("round_s", "admit"), [(21.0, 1), (19.0, 0), (None, 1)])
def test_a_newcomer_joins_anyway_when_the_round_breaks(round_s, admit):
    """A restart of its own saves only the time until the next one that nodes cause by leaving."""
    outlook = Forecast(remaining_s=1000.0, restart_cost_s=10.0, round_s=round_s)
    assert should_scale_up(1, [86400.0], outlook).admit == admit


def test_enough_newcomers_repay_a_restart_in_a_short_round():
    """The more of them wait, the more they save until the next restart."""
    outlook = Forecast(restart_cost_s=20.0, round_s=200.0)
    decision = should_scale_up(64, [None] * 7, outlook)
    assert decision.admit == 0
    assert "20 s of 200 s until nodes leave again, a restart costs 20.0 s" in decision.why
    assert should_scale_up(64, [None] * 8, outlook).admit == 8


# ---- the estimate -------------------------------------------------------------------------


def test_nothing_is_known_before_the_first_steps():
    """Neither the remaining time nor the cost of a restart."""
    estimate = ProgressEstimator()
    assert estimate.outlook == Forecast()
    estimate.record_step(5, 100, 1.0)
    estimate.on_close(2.0)
    assert estimate.outlook == Forecast()


def test_a_restart_costs_from_the_stop_to_the_first_step():
    """It ends the workers, forms the group and starts new workers."""
    estimate = ProgressEstimator()
    estimate.on_break(10.0)
    estimate.on_close(12.0)
    estimate.record_step(None, None, 13.0)
    estimate.record_step(7, None, 15.0)
    estimate.record_step(8, None, 16.0)
    assert estimate.outlook.restart_cost_s == 5.0


def test_the_remaining_time_follows_the_throughput_of_the_present_round():
    """Steps of an earlier, smaller group do not count."""
    estimate = ProgressEstimator()
    estimate.on_close(0.0)
    estimate.record_step(0, 100, 1.0)
    estimate.record_step(10, 100, 11.0)
    assert estimate.outlook.remaining_s == 90.0
    estimate.on_break(11.0)
    estimate.on_close(12.0)
    estimate.record_step(10, 100, 13.0)
    assert estimate.outlook.remaining_s is None
    estimate.record_step(20, 100, 18.0)
    assert estimate.outlook.remaining_s == 40.0


def test_without_a_total_the_remaining_time_is_unknown():
    """A script does not have to report its total steps."""
    estimate = ProgressEstimator()
    estimate.on_close(0.0)
    estimate.record_step(1, None, 1.0)
    estimate.record_step(2, None, 2.0)
    assert estimate.outlook.remaining_s is None


def test_a_run_beyond_its_total_has_nothing_left():
    """The remaining time is never negative."""
    estimate = ProgressEstimator()
    estimate.on_close(0.0)
    estimate.record_step(1, 5, 1.0)
    estimate.record_step(9, 5, 2.0)
    assert estimate.outlook.remaining_s == 0.0


def test_the_step_time_is_known_by_the_number_of_nodes():
    """Once a round has made some steps; a later round of the same size replaces it."""
    estimate = ProgressEstimator({4: 0.25})
    estimate.on_close(0.0, 2)
    estimate.record_step(0, None, 0.0)
    estimate.record_step(MEASURED_STEPS - 1, None, 10.0)
    assert estimate.step_times == {4: 0.25}, "too few steps"
    estimate.record_step(MEASURED_STEPS, None, MEASURED_STEPS / 2)
    assert estimate.step_times == {4: 0.25, 2: 0.5}
    estimate.on_close(100.0, 4)
    estimate.record_step(50, None, 101.0)
    assert estimate.step_times == {4: 0.25, 2: 0.5}
    estimate.record_step(100, None, 111.0)
    assert estimate.step_times == {4: 0.2, 2: 0.5}


def test_rounds_last_as_long_as_between_two_departures():
    """The mean counts from the first round, until now; growth does not count."""
    estimate = ProgressEstimator()
    estimate.on_close(100.0)
    for departed_at in (200.0, 201.0, 300.0, 400.0):
        estimate.on_break(departed_at, departs=True)
        estimate.on_close(departed_at + 0.5)
    assert estimate.outlook.round_s is None  # a burst shows no rate
    estimate.on_break(500.0)
    estimate.on_close(501.0)
    estimate.on_break(700.0, departs=True)
    assert estimate.outlook.round_s == 120.0
    estimate.on_close(701.0)
    estimate.record_step(1, None, 1100.0)
    assert estimate.outlook.round_s == 200.0


# ---- the round ----------------------------------------------------------------------------


class Fixed(ProgressEstimator):
    """Always forecasts the same."""

    outlook = None

    def __init__(self, **forecast) -> None:
        super().__init__()
        self.outlook = Forecast(**forecast)


def growing(**changes) -> RoundState:
    """Two nodes that train, with 100 s to go, and a restart of 10 s."""
    m = training(A, B, **changes)
    m.run.estimator = Fixed(remaining_s=100.0, restart_cost_s=10.0)
    return m


def test_grow_never_waits_for_another_reason():
    """The newcomer is admitted when the round breaks for another reason."""
    m = growing(scale_up="on_restart")
    assert decisions(m.join(C, 1.0)) == []
    assert decisions(m.tick(1e6)) == []
    m.agent_lost(B, LossReason.SILENT, 1e6)
    m.join(A, 1e6)
    m.slurm_answered(running(A, C), 1e6, 1e6)
    assert m.run.ranks.members == (A, C)


def test_a_newcomer_that_repays_the_restart_is_admitted():
    """It saves a third of 100 s and costs 10 s."""
    assert decisions(growing().join(C, 1.0)) == [stop((A, B), "node3 joins")]


@pytest.mark.parametrize("scale_up", ["immediate", "checkpoint"])
def test_a_newcomer_that_joins_too_late_is_not_admitted(scale_up):
    """The rest of the run is too short to repay the restart."""
    m = growing(scale_up=scale_up)
    m.run.estimator = Fixed(remaining_s=20.0, restart_cost_s=10.0)
    assert decisions(m.join(C, 1.0)) == []


def test_a_newcomer_whose_wall_time_ends_soon_is_not_admitted():
    """Slurm reports its time left."""
    m = growing(scale_up="checkpoint")
    m.join(C, 1.0)
    poll_none(m, (A, B), 1, 1.1)
    view = running(A, B) | {C.task: TaskState(C.task, "RUNNING", restarts=0, time_left_s=15.0)}
    assert decisions(m.slurm_answered(view, 1.5, 1.6)) == [pause((A, B), 1, released=True)]


def test_the_decision_is_logged_with_its_reason():
    """The waiting tasks, when they are admitted, and why."""
    (note,) = notes(growing(scale_up="checkpoint").join(C, 1.0), "scale_up_decision")
    assert note.fields["waiting"] == [C.task] and note.fields["admit"] == "checkpoint"
    assert (
        "1 more node would save about 33 s of 100 s, a restart costs 10.0 s" in note.fields["why"]
    )


def test_the_decision_is_logged_again_only_when_it_changes():
    """A tick alone logs nothing."""
    m = growing(scale_up="checkpoint")
    m.join(C, 1.0)
    m.run.estimator = Fixed(remaining_s=90.0, restart_cost_s=10.0)
    assert notes(m.tick(10.0), "scale_up_decision") == []
    m.run.estimator = Fixed(remaining_s=20.0, restart_cost_s=10.0)
    (note,) = notes(m.tick(80.0), "scale_up_decision")
    assert note.fields["admit"] == "not now"


def test_departures_are_counted_and_growth_is_not():
    """A node that is lost, and one that is preempted, break a round; a newcomer does too."""
    m = training(A, B, scale_up="immediate")
    for joined_at in (10.0, 110.0, 210.0, 310.0):
        m.join(C, joined_at)
        close(m, (A, B), (A, B, C), joined_at)
        m.agent_lost(C, LossReason.SILENT, joined_at + 50.0)
        close(m, (A, B), (A, B), joined_at + 50.0)
    assert m.run.estimator.outlook.round_s is None
    m.noticed(B, "signal", 5.0, 410.0)
    m.agent_lost(B, "left", 412.0)
    assert m.run.estimator.outlook.round_s == pytest.approx(412.0 / 5, abs=1.0)


def close(m, again, members, now) -> None:
    """Let members join again, and Slurm report the members of the next round as running."""
    for agent in again:
        m.join(agent, now)
    m.slurm_answered(running(*members), now, now)
    assert m.run.ranks.members == members


# ---- nodes that are not admitted ----------------------------------------------------------


def parked(**changes) -> RoundState:
    """A round with a node that is not admitted, and waits for ten seconds at least."""
    m = growing(below_min_timeout_s=10.0, **changes)
    assert decisions(m.join(C, 1.0)) == []
    return m


@pytest.mark.parametrize("changes", [{"scale_up": "on_restart"}, {"max_nodes": 2}])
def test_a_node_that_is_not_admitted_is_requeued(changes):
    """Another run can use it; the group goes on."""
    m = parked(**changes)
    assert decisions(m.tick(10.9)) == []
    (given,) = decisions(m.tick(21.0))
    assert isinstance(given, SentBack) and given.agents == (C,) and not given.all
    assert given.delay_s > 0.0


def test_a_node_is_requeued_once():
    """The end of its connection afterwards has no effect."""
    m = parked(scale_up="on_restart")
    m.tick(21.0)
    assert decisions(m.tick(22.0)) == []
    assert decisions(m.agent_lost(C, LossReason.CONNECTION_CLOSED, 22.5)) == []


def test_a_node_that_is_not_worth_a_restart_any_more_is_requeued():
    """Members that stay at a checkpoint are released."""
    m = growing(scale_up="checkpoint", below_min_timeout_s=10.0)
    m.join(C, 1.0)
    poll_none(m, (A, B), 1, 1.1)
    m.run.estimator = Fixed(remaining_s=20.0, restart_cost_s=10.0)
    let_go, given = decisions(m.tick(21.0))
    assert let_go == pause((A, B), 1, released=True) and given.agents == (C,)


def test_a_node_that_waits_for_a_checkpoint_is_not_requeued():
    """It is admitted at the next one, unless that is longer away than any node may wait."""
    m = growing(scale_up="checkpoint", below_min_timeout_s=10.0)
    m.checkpointed(A, 5, 0, 0.5)
    m.join(C, 1.0)
    poll_none(m, (A, B), 1, 1.1)
    assert decisions(m.tick(1.0 + 10.0 * LONGEST_WAIT - 1.0)) == []
    (given,) = decisions(m.tick(1.0 + 10.0 * LONGEST_WAIT))
    assert given.agents == (C,)


def test_without_a_queue_a_node_that_is_not_admitted_stays():
    """A local run requeues no nodes."""
    m = growing(scale_up="on_restart")
    m.join(C, 1.0)
    assert decisions(m.tick(1e9)) == []


# ---- the size up to which a run grows -----------------------------------------------------

USEFUL_2 = {1: 1.0, 2: 0.6, 3: 0.55}
"""The third node adds a fifth of a node's share, the second two thirds."""


def limited(*agents, times=USEFUL_2, **changes) -> RoundState:
    """A run on these nodes, of at most four, whose step times are known; and the first tick."""
    changes = {"min_efficiency": 0.5, "below_min_timeout_s": 10.0, **changes}
    m = training(*agents, **changes)
    m.run.estimator = ProgressEstimator(times)
    return m


def of(effects, *kinds) -> list:
    """Return the effects of some kinds."""
    return [effect for effect in effects if isinstance(effect, kinds)]


def test_a_run_whose_next_node_adds_too_little_holds_its_pending_tasks():
    """One event with the reason; the tasks are held again before they may start."""
    m = limited(A, B)
    effects = m.tick(20.0)
    (note,) = notes(effects, "growth_decision")
    assert note.fields["nodes"] == 2 and note.fields["grows"] is False
    assert "beyond 2 nodes a further node adds" in note.fields["why"]
    assert "min_efficiency is 50%" in note.fields["why"]
    assert of(effects, Postpone) == [Postpone(HELD_S)]
    later = [effect for now in range(21, 620) for effect in m.tick(float(now))]
    assert of(later, Postpone) == [Postpone(HELD_S)] and not notes(later, "growth_decision")


@pytest.mark.parametrize(
    ("changes", "times"),
    [({"min_efficiency": None}, USEFUL_2), ({}, {2: 0.6}), ({"min_efficiency": 0.1}, USEFUL_2)],
)
def test_a_run_grows_if_nothing_speaks_against_it(changes, times):
    """No limit was set, one size alone was measured, or each node adds enough."""
    m = limited(A, B, times=times, **changes)
    assert not of(m.tick(20.0), Postpone) and not m.run.growth.holds


def test_a_run_at_its_max_has_no_tasks_to_hold():
    """All of its nodes train; none is released."""
    m = limited(A, B, max_nodes=2)
    assert not of(m.tick(20.0), Postpone) and m.run.ranks.members == (A, B)


def test_a_node_that_comes_to_a_run_that_grows_no_further_goes_back_at_once():
    """It was on its way when the tasks were held."""
    m = limited(A, B)
    m.tick(20.0)
    effects = m.join(C, 21.0)
    assert decisions(effects) == [SentBack((C,), HELD_S)]
    (note,) = notes(effects, "scale_up_decision")
    assert note.fields["admit"] == "not now" and "beyond 2 nodes" in note.fields["why"]


def test_a_run_takes_in_only_as_many_as_it_has_use_for():
    """Of three nodes that come to one, the first."""
    m = limited(A)
    m.tick(20.0)
    m.join(C, 21.0)
    m.join(D, 21.0)
    m.join(A, 22.0)
    m.slurm_answered(running(A, C, D), 23.0, 23.0)
    assert m.run.ranks.members == (A, C)


def test_a_lost_member_is_replaced():
    """The pending tasks may start again, and the lost one is restarted."""
    m = limited(A, B)
    m.tick(20.0)
    effects = [*m.agent_lost(B, LossReason.SILENT, 30.0), *m.tick(30.1)]
    assert [postpone.delay_s < 30.0 for postpone in of(effects, Postpone)] == [True]
    (note,) = notes(effects, "growth_decision")
    assert note.fields["grows"] is True and note.fields["nodes"] == 1


def test_a_lost_task_that_is_not_needed_stays_away():
    """Three nodes had come; the run goes on with two, and Slurm holds the third."""
    m = limited(A, B, C, times={})
    m.agent_lost(C, LossReason.SILENT, 5.0)
    m.join(A, 6.0)
    m.join(B, 6.0)
    m.slurm_answered(running(A, B), 7.0, 7.0)
    m.run.estimator = ProgressEstimator(USEFUL_2)
    m.tick(20.0)
    held = TaskState(C.task, "PENDING", "BeginTime", restarts=1, starts_in_s=500.0)
    view = running(A, B) | {C.task: held}
    effects = [e for now in (20.0, 30.0, 60.0) for e in m.slurm_answered(view, now, now)]
    assert not of(effects, ClearHolds)


def test_a_run_grows_again_if_its_step_times_change():
    """A little is not enough, since step times vary."""
    m = limited(A, B)
    m.tick(20.0)
    m.run.estimator = ProgressEstimator({1: 1.0, 2: 0.52, 3: 0.36})
    (note,) = notes(m.tick(40.0), "growth_decision")
    assert note.fields["grows"] is True


def test_a_run_grows_up_to_its_share_beside_other_runs():
    """The share comes from its siblings' progress, and needs no min_efficiency."""
    m = limited(A, B, min_efficiency=None)
    m.run.growth.share = 2
    (note,) = notes(m.tick(20.0), "growth_decision")
    assert "worth more to other runs" in note.fields["why"]
    m.run.growth.share = 3
    assert [note.fields["grows"] for note in notes(m.tick(40.0), "growth_decision")] == [True]


def test_the_next_leader_knows_the_step_times():
    """They are in each entry of the log."""
    m = limited(A, B)
    m.agent_lost(B, LossReason.SILENT, 30.0)
    m.join(A, 31.0)
    m.slurm_answered(running(A), 32.0, 32.0)
    entry = decode_signed(m.run.entry.encode_signed(b"s"), b"s")
    assert entry is not None and entry.step_times == USEFUL_2
