"""Whether a node that joins late is worth a restart, and the requeue of one that is not."""

import pytest
from groups import A, B, C, SentBack, decisions, notes, pause, poll_none, running, stop, training

from hpc_elastic.rendezvous.group_change import Forecast, ProgressEstimator, should_scale_up
from hpc_elastic.rendezvous.round_state import RoundState
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
    assert "1 more nodes save about 500 s of 1000 s, a restart costs 10.0 s" in decision.why


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
    m.agent_lost(B, "silent", 1e6)
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
    assert "1 more nodes save about 33 s of 100 s, a restart costs 10.0 s" in note.fields["why"]


def test_the_decision_is_logged_again_only_when_it_changes():
    """A tick alone logs nothing."""
    m = growing(scale_up="checkpoint")
    m.join(C, 1.0)
    m.run.estimator = Fixed(remaining_s=90.0, restart_cost_s=10.0)
    assert notes(m.tick(10.0), "scale_up_decision") == []
    m.run.estimator = Fixed(remaining_s=20.0, restart_cost_s=10.0)
    (note,) = notes(m.tick(80.0), "scale_up_decision")
    assert note.fields["admit"] == "not now"


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
    assert decisions(m.agent_lost(C, "its connection closed", 22.5)) == []


def test_a_node_that_is_not_worth_a_restart_any_more_is_requeued():
    """Members that stay at a checkpoint are released."""
    m = growing(scale_up="checkpoint", below_min_timeout_s=10.0)
    m.join(C, 1.0)
    poll_none(m, (A, B), 1, 1.1)
    m.run.estimator = Fixed(remaining_s=20.0, restart_cost_s=10.0)
    let_go, given = decisions(m.tick(21.0))
    assert let_go == pause((A, B), 1, released=True) and given.agents == (C,)


def test_a_node_that_waits_for_a_checkpoint_is_not_requeued():
    """It is admitted at the next one."""
    m = growing(scale_up="checkpoint", below_min_timeout_s=10.0)
    m.checkpointed(A, 5, 0, 0.5)
    m.join(C, 1.0)
    poll_none(m, (A, B), 1, 1.1)
    assert decisions(m.tick(3600.0)) == []


def test_without_a_queue_a_node_that_is_not_admitted_stays():
    """A local run requeues no nodes."""
    m = growing(scale_up="on_restart")
    m.join(C, 1.0)
    assert decisions(m.tick(1e9)) == []
