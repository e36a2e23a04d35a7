"""The rules of the rendezvous, one behaviour a test.

Growth, Slurm's word and the nodes that are too few have tests of their own.
"""

from dataclasses import replace

import pytest
from long_history import work_of

from groups import (
    A,
    B,
    C,
    D,
    closed,
    decisions,
    ended,
    failure,
    machine,
    notes,
    resumed,
    running,
    stop,
    training,
)
from hpc_elastic.rendezvous.log_entry import Agent, RunEnding
from hpc_elastic.rendezvous.round_state import RoundPhase
from hpc_elastic.run.events import LossReason

# ---- when a round closes ------------------------------------------------------------------


def test_closes_when_all_running_tasks_have_joined():
    """A round does not wait for tasks that are not RUNNING."""
    m = machine()
    assert decisions(m.join(A, 0.0)) == []
    assert decisions(m.slurm_answered(running(A, B, s2="PENDING", s3="COMPLETING"), 0.1, 0.1)) == []
    assert decisions(m.join(B, 1.0)) == [closed(1, (A, B), 0)]


def test_closes_at_max_nodes_without_asking():
    """With max nodes joined there is nobody to wait for."""
    m = machine(max_nodes=2)
    m.join(B, 0.0)
    assert decisions(m.join(A, 0.0)) == [closed(1, (A, B), 0)]


def test_waits_for_min_nodes_however_long():
    """Below min nodes neither Slurm's answer nor time closes a round, where nodes are kept."""
    m = machine(min_nodes=2)
    m.join(A, 0.0)
    assert decisions(m.slurm_answered(running(A), 0.0, 0.0)) == []
    assert decisions(m.tick(1e6)) == []


def test_last_call_where_slurm_is_silent():
    """Without Slurm's word a round closes once nobody has joined for a while."""
    m = machine()
    m.join(A, 0.0)
    m.slurm_answered(None, 0.0, 0.0)
    m.join(B, 4.0)
    assert decisions(m.tick(8.9)) == []
    assert decisions(m.tick(9.0)) == [closed(1, (A, B), 0)]


def test_a_slurm_that_falls_silent_leaves_the_last_call():
    """An answer from before is not gone by once Slurm stops answering."""
    m = machine()
    m.join(A, 0.0)
    m.slurm_answered(running(A, B), 0.0, 0.1)
    m.slurm_answered(None, 1.0, 4.9)
    assert decisions(m.tick(4.9)) == []
    assert decisions(m.tick(5.0)) == [closed(1, (A,), 0)]


def test_a_running_task_that_never_joins_delays_only_so_long():
    """A broken node that Slurm calls RUNNING does not hold the others up for ever."""
    m = machine()
    m.join(A, 0.0)
    m.slurm_answered(running(A, B), 0.0, 0.0)
    assert m.run.participants.missing(m.run.rules.min_nodes) == [B.task]
    assert decisions(m.tick(59.9)) == []
    assert decisions(m.tick(60.0)) == [closed(1, (A,), 0)]


def test_no_round_closes_before_its_time():
    """A leader that may be the one that is cut off closes nothing until others had their turn."""
    m = machine(max_nodes=2)
    m.run.not_before = 6.0
    m.join(A, 0.0)
    assert decisions(m.join(B, 1.0)) == []
    assert decisions(m.tick(5.9)) == []
    assert decisions(m.tick(6.0)) == [closed(1, (A, B), 0)]


def test_below_min_nodes_everybody_who_is_queued_is_missed():
    """What a group that can not start waits for is in the queue as well."""
    m = machine(min_nodes=3)
    m.join(A, 0.0)
    m.slurm_answered(running(A, B, s2="PENDING", s3="FAILED"), 0.0, 0.1)
    assert m.run.participants.missing(m.run.rules.min_nodes) == [B.task, C.task]


# ---- members and newcomers ----------------------------------------------------------------


def test_a_late_node_is_taken_in():
    """A newcomer breaks the round, and the next one has it as its last rank."""
    m = training(A, B)
    assert decisions(m.join(C, 10.0)) == [stop((A, B), "node3 joins")]
    m.join(B, 10.1)
    m.join(A, 10.2)
    asked = m.slurm_answered(running(A, B, C), 10.3, 10.3)
    assert decisions(asked) == [closed(2, (A, B, C), 0)]


def test_a_full_group_lets_a_newcomer_wait_until_a_place_is_free():
    """Beyond max nodes a node parks; it takes the place of the next that is lost."""
    m = training(A, B, max_nodes=2)
    assert decisions(m.join(C, 1.0)) == []
    m.agent_lost(A, LossReason.CONNECTION_CLOSED, 2.0)
    assert decisions(m.join(B, 2.1)) == [closed(2, (B, C), 0)]


def test_a_lost_member_costs_no_restart():
    """The others' collectives break because of the loss: nothing is spent."""
    m = training(A, B, C)
    m.worker_failed([failure(A, "Connection closed by peer")], A, 5.0)
    m.agent_lost(B, LossReason.SILENT, 5.1)
    m.join(A, 5.2)
    m.join(C, 5.3)
    started = m.slurm_answered(running(A, B, C), 5.4, 5.4)
    assert decisions(started) == [closed(2, (A, C), 0)]


def test_a_loss_noticed_before_the_failures_costs_no_restart_either():
    """The order in which the leader hears of a loss and of its victims does not matter."""
    m = training(A, B, C)
    m.agent_lost(B, LossReason.SILENT, 5.0)
    m.worker_failed([failure(A, "Connection closed by peer")], A, 5.1)
    m.join(A, 5.2)
    m.join(C, 5.3)
    assert decisions(m.slurm_answered(running(A, C), 5.4, 5.4)) == [closed(2, (A, C), 0)]


def test_a_task_that_was_lost_is_not_waited_for():
    """Slurm calls a dead node's task RUNNING for minutes."""
    m = training(A, B)
    m.agent_lost(B, LossReason.CONNECTION_CLOSED, 5.0)
    m.join(A, 5.1)
    assert decisions(m.slurm_answered(running(A, B), 5.2, 5.2)) == [closed(2, (A,), 0)]


def test_a_requeued_task_comes_back_as_a_newcomer():
    """The same task in its next attempt is another agent."""
    m = training(A, B)
    m.agent_lost(B, "preempted", 5.0)
    m.join(A, 5.1)
    m.slurm_answered(running(A), 5.2, 5.2)
    again = Agent(B.task, 1, B.slot, "node4", 1)
    assert decisions(m.join(again, 60.0)) == [stop((A,), "node4 joins")]
    m.join(A, 60.1)
    assert decisions(m.slurm_answered(running(A, again), 60.2, 60.2)) == [closed(3, (A, again), 0)]


def test_the_next_attempt_of_a_task_settles_the_one_before():
    """A node that was taken is not waited for once its task runs somewhere else."""
    m = training(A, B)
    m.worker_failed([failure(A, "Connection closed by peer")], A, 1.0)
    m.join(A, 1.1)
    again = Agent(B.task, 1, B.slot, "node4", 1)
    m.join(again, 1.2)
    asked = m.slurm_answered(running(A, again), 1.3, 1.3)
    assert decisions(asked) == [closed(2, (A, again), 1)]


def test_an_attempt_that_ends_late_takes_nothing_from_the_next_one():
    """The end of a task's old connection, after its next attempt has joined, is old news."""
    m = training(A, B)
    again = Agent(B.task, 1, B.slot, "node4", 1)
    m.join(again, 5.0)
    m.agent_lost(B, LossReason.SILENT, 5.1)
    m.join(A, 5.2)
    m.slurm_answered(running(A, again), 5.3, 5.3)
    assert m.run.ranks.members == (A, again)
    broken = m.worker_failed([failure(A)], A, 9.0)
    assert decisions(broken) == [stop((A, again), "a worker failed on node1")]


def test_a_member_that_joins_anew_breaks_the_round():
    """It has stopped its workers, for whatever reason: the others can not go on without them."""
    m = training(A, B)
    assert decisions(m.join(B, 5.0)) == [stop((A, B), "node2 joins anew")]
    m.join(B, 5.1)
    m.join(A, 5.2)
    assert decisions(m.slurm_answered(running(A, B), 5.3, 5.3)) == [closed(2, (A, B), 0)]


def test_ranks_are_stable():
    """Members keep their order whatever the order of joining; a lost one's place closes up."""
    m = training(A, B, C, D)
    m.agent_lost(B, LossReason.SILENT, 1.0)
    for agent in (D, C, A):
        m.join(agent, 1.1)
    asked = m.slurm_answered(running(A, C, D), 1.2, 1.2)
    assert decisions(asked) == [closed(2, (A, C, D), 0)]


def test_newcomers_follow_in_the_order_of_their_slots():
    """Not in the order in which they happened to join."""
    m = machine(max_nodes=3)
    for agent in (C, B, A):
        actions = m.join(agent, 0.0)
    assert decisions(actions) == [closed(1, (A, B, C), 0)]


def test_a_member_that_does_not_come_back_is_given_up():
    """A stopped member that neither joins nor disconnects can not block the others for ever."""
    m = training(A, B)
    m.join(C, 1.0)
    m.join(A, 2.0)
    m.slurm_answered(running(A, B, C), 2.0, 2.0)
    assert decisions(m.tick(60.9)) == []
    late = m.tick(61.0)
    assert decisions(late) == [closed(2, (A, C), 0)]
    assert [n.fields["task"] for n in notes(late, "node_lost")] == [B.task]


# ---- restarts, and the end ----------------------------------------------------------------


def test_a_workers_own_failure_spends_one_restart_of_the_run():
    """However many workers die of it, one failure is one restart."""
    m = training(A, B)
    stopped = m.worker_failed([failure(B, "Connection closed by peer", 1.0)], B, 1.0)
    assert decisions(stopped) == [stop((A, B), "a worker failed on node2")]
    m.worker_failed([failure(A, "ValueError: boom", 2.0)], A, 2.0)
    m.join(B, 2.1)
    m.join(A, 2.2)
    assert decisions(m.slurm_answered(running(A, B), 2.3, 2.3)) == [closed(2, (A, B), 1)]


def test_a_failure_that_a_stop_has_caused_spends_nothing():
    """A member's collectives break when the others are stopped for a newcomer before it is."""
    m = training(A, B, max_restarts=0)
    m.join(C, 1.0)
    m.join(A, 1.1)
    m.worker_failed([failure(B, "Connection reset by peer")], B, 1.2)
    m.join(B, 1.3)
    assert decisions(m.slurm_answered(running(A, B, C), 1.4, 1.4)) == [closed(2, (A, B, C), 0)]


def test_fails_with_the_first_cause_when_restarts_have_run_out():
    """The report shows the worker that raised, though a victim was heard of first."""
    m = training(A, B, max_restarts=0)
    victim, cause = failure(B, "Connection closed by peer", 1.0), failure(A, time=2.0)
    m.worker_failed([victim], B, 1.0)
    m.worker_failed([cause], A, 2.0)
    m.join(B, 2.1)
    assert decisions(m.join(A, 2.2)) == [ended("failed", cause, (victim,))]


def test_an_import_error_in_the_first_round_ends_the_run_at_once():
    """A script that can not be imported is not tried again."""
    m = training(A, B)
    broken = failure(A, "ModuleNotFoundError: No module named 'nosuch'", phase="import")
    m.worker_failed([broken], A, 1.0)
    m.join(A, 1.1)
    assert decisions(m.join(B, 1.2)) == [ended("failed", broken, ())]


def test_an_import_error_after_training_has_begun_is_an_ordinary_failure():
    """One bad node must not end a run that has trained elsewhere."""
    m = training(A)
    m.join(B, 1.0)
    m.join(A, 1.0)
    m.slurm_answered(running(A, B), 1.0, 1.0)
    m.worker_failed([failure(B, "ImportError: bad disk", phase="import")], B, 2.0)
    m.join(A, 2.1)
    m.join(B, 2.2)
    assert decisions(m.slurm_answered(running(A, B), 2.3, 2.3)) == [closed(3, (A, B), 1)]


def test_a_failure_of_somebody_who_is_no_member_changes_nothing():
    """What a node of an earlier round reports late has been judged without it."""
    m = training(A)
    assert m.worker_failed([failure(B)], B, 1.0) == []
    assert m.finished(B, 1.0) == [] and m.checkpointed(B, 5, 1, 1.0) == []
    assert m.run.phase is RoundPhase.RUNNING


def test_succeeds_when_every_member_is_done():
    """The run ends once, with the last member."""
    m = training(A, B)
    assert m.finished(A, 9.0) == []
    assert decisions(m.finished(B, 9.1)) == [ended("succeeded")]


def test_a_member_lost_before_all_are_done_means_another_round():
    """A member that was done works again: its peers can not finish without it."""
    m = training(A, B)
    m.finished(A, 9.0)
    assert decisions(m.agent_lost(B, LossReason.SILENT, 9.1)) == [
        stop((A,), "node2 is gone: silent")
    ]
    m.join(A, 9.2)
    assert decisions(m.slurm_answered(running(A), 9.3, 9.3)) == [closed(2, (A,), 0)]
    assert decisions(m.finished(A, 9.9)) == [ended("succeeded")]


def test_nothing_happens_after_the_end():
    """The leader tells a task that starts late (`leader_state`)."""
    m = training(A)
    m.finished(A, 9.0)
    assert m.join(B, 10.0) == []
    assert m.agent_lost(A, LossReason.CONNECTION_CLOSED, 10.0) == []
    assert m.tick(99.0) == [] and m.run.close() == []


def test_anybody_may_close_the_run_once():
    """torch's set_closed and shutdown end it for everybody."""
    m = training(A)
    assert decisions(m.run.close()) == [ended("closed")] and m.run.close() == []


# ---- a new leader -------------------------------------------------------------------------


def test_a_new_leader_goes_on_from_the_entry():
    """Rounds, restarts and ranks survive it, and a broken round costs nothing."""
    m = resumed(round=4, restarts=2, members=(B, A))
    m.worker_failed([failure(A)], A, 100.0)
    m.join(A, 100.1)
    assert m.run.participants.missing(m.run.rules.min_nodes) == [B.task]
    m.join(B, 100.2)
    assert decisions(m.slurm_answered(running(A, B), 100.3, 100.3)) == [closed(5, (B, A), 2)]


def test_a_new_leader_does_not_wait_for_tasks_that_were_lost():
    """Slurm may call them RUNNING for minutes."""
    m = resumed(round=2, members=(A, B), lost={B.task: 0})
    m.join(A, 100.0)
    assert decisions(m.slurm_answered(running(A, B), 100.1, 100.1)) == [closed(3, (A,), 0)]


def test_a_new_leader_of_a_run_that_has_ended_decides_nothing():
    """Whoever comes."""
    m = resumed(round=2, members=(A,), ending=RunEnding("succeeded"))
    assert m.run.phase is RoundPhase.ENDED and m.join(A, 100.0) == []


def test_a_round_of_the_same_members_has_no_event_for_each_of_them():
    """The event of the round names them; one that was lost since, or is new, has its own."""
    m = training(A, B, C)
    m.worker_failed([failure(A)], A, 1.0)
    assert notes(m.join(A, 1.1), "joined") == []
    m.agent_lost(B, LossReason.SILENT, 1.2)
    assert [n.fields["host"] for n in notes(m.join(B, 1.3), "joined")] == [B.host]
    assert [n.fields["host"] for n in notes(m.join(D, 1.4), "joined")] == [D.host]


# ---- large groups -------------------------------------------------------------------------


@pytest.mark.parametrize("below_min_timeout_s", [None, 300.0])
def test_the_work_for_an_agent_does_not_grow_with_their_number(below_min_timeout_s):
    """That joins, is lost with all others, and joins as another attempt; the run has one size."""

    def work(number: int) -> list[int]:
        m = machine(
            min_nodes=number, max_nodes=number, max_requeues=5,
            below_min_timeout_s=below_min_timeout_s,
        )  # fmt: skip
        first = [Agent(f"7_{slot}", 0, slot, f"node{slot}", 1) for slot in range(number)]
        again = [replace(agent, attempt=1) for agent in first]
        silent = LossReason.SILENT
        done = [
            work_of(lambda: [m.join(agent, 0.0) for agent in first]),
            work_of(lambda: [m.agent_lost(agent, silent, 9.0) for agent in first]),
            work_of(lambda: [m.join(agent, 20.0) for agent in again]),
        ]
        assert m.run.phase is RoundPhase.RUNNING and m.run.entry.round == 2
        return done

    few, many = work(50), work(200)
    assert all(most < 4 * least * 1.1 for least, most in zip(few, many, strict=True)), (few, many)
