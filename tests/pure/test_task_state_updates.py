"""What the leader makes of Slurm's answer."""

import pytest

from groups import A, B, C, closed, decisions, failure, machine, notes, running, training
from hpc_elastic.rendezvous.round_state import RoundPhase
from hpc_elastic.slurm.job_state import TaskState


@pytest.mark.parametrize("word", ["COMPLETED", "NODE_FAIL", "PENDING"])
def test_slurms_word_settles_a_member_that_is_awaited(word):
    """A member that has ended, or is queued again, does not come back: nobody waits for it."""
    m = training(A, B)
    m.join(C, 1.0)
    m.join(A, 1.1)
    asked = m.slurm_answered(running(A, C, s1=word), 1.5, 1.6)
    assert decisions(asked) == [closed(2, (A, C), 0)]


def test_slurms_word_drops_an_agent_that_has_joined():
    """A node whose task was cancelled may hold its connection open for a while yet."""
    m = machine()
    m.join(A, 0.0)
    m.join(B, 0.0)
    asked = m.slurm_answered(running(A, s1="CANCELLED"), 0.5, 0.6)
    assert decisions(asked) == [closed(1, (A,), 0)]
    assert [n.fields["task"] for n in notes(asked, "node_lost")] == [B.task]


def test_slurms_word_drops_a_member_that_trains():
    """Asked about a newcomer, Slurm may say that a member is no more."""
    m = training(A, B, scale_up="on_restart")
    m.join(C, 1.0)
    asked = m.slurm_answered(running(A, C, s1="COMPLETED"), 1.5, 1.6)
    assert [d.agents for d in decisions(asked)] == [(A,)]
    assert m.run.phase is RoundPhase.FORMING


def test_an_agent_that_joined_after_slurm_was_asked_is_not_dropped():
    """The answer may be from before its task was started."""
    m = machine(min_nodes=2)
    m.join(A, 0.0)
    m.join(B, 1.0)
    m.slurm_answered(running(A, s1="PENDING"), 0.9, 1.5)
    assert m.run.ranks.members == (A, B)


def test_an_earlier_attempt_is_gone_once_slurm_counts_another():
    """A task that was requeued runs somewhere else, or will."""
    m = training(A, B)
    m.join(C, 1.0)
    m.join(A, 1.1)
    view = running(A, C) | {B.task: TaskState(B.task, "RUNNING", restarts=1)}
    m.slurm_answered(view, 1.5, 1.6)
    assert B not in m.run.participants.pending_rejoin


@pytest.mark.parametrize("word", ["RUNNING", "COMPLETING", "A_NEW_WORD"])
def test_nobody_is_dropped_whose_task_has_not_ended(word):
    """A task that is being ended takes its leave itself."""
    m = machine(min_nodes=2)
    m.join(A, 0.0)
    m.slurm_answered(running(s0=word), 0.5, 0.6)
    assert list(m.run.participants.joined) == [A]


def test_a_member_that_is_being_requeued_takes_its_leave_itself():
    """Slurm counts the next attempt before it has told this one to end."""
    m = training(A, B, scale_up="on_restart")
    m.join(C, 1.0)
    view = running(A, C) | {B.task: TaskState(B.task, "COMPLETING", restarts=1)}
    assert decisions(m.slurm_answered(view, 1.5, 1.6)) == []
    assert m.run.phase is RoundPhase.RUNNING and B in m.run.ranks.members


def test_a_task_that_slurm_does_not_know_is_not_dropped():
    """squeue forgets and overlooks; a node that is heard lives."""
    m = machine()
    m.join(A, 0.0)
    assert decisions(m.slurm_answered({}, 0.5, 0.6)) == [closed(1, (A,), 0)]


def test_one_answer_drops_the_ended_and_waits_for_the_running():
    """The round does not close between two lines of the same answer."""
    m = training(A, B)
    m.worker_failed([failure(A)], A, 1.0)
    m.join(A, 1.1)
    assert decisions(m.slurm_answered(running(A, C, s1="COMPLETED"), 1.5, 1.6)) == []
    assert m.run.participants.missing(m.run.rules.min_nodes) == [C.task]
    assert decisions(m.join(C, 2.0)) == [closed(2, (A, C), 0)]


def test_the_run_fails_when_min_nodes_can_not_come_together_any_more():
    """Two of four tasks have ended for good: nobody waits, and the reason names one of them."""
    m = machine(min_nodes=3)
    m.join(A, 0.0)
    asked = m.slurm_answered(running(A, s1="CANCELLED", s2="COMPLETED"), 0.1, 0.2)
    ((_, end),) = decisions(asked)
    assert end.status == "failed" and m.run.phase is RoundPhase.ENDED
    assert "task 7_1" in end.failure.summary() and "min nodes is 3" in end.failure.summary()


@pytest.mark.parametrize("word", ["NODE_FAIL", "PREEMPTED", "TIMEOUT", "PENDING", "COMPLETING"])
def test_a_run_waits_for_tasks_that_may_come_again(word):
    """What ended through no fault of its own is requeued or replaced; a job as a whole."""
    m = machine(min_nodes=3)
    m.join(A, 0.0)
    assert decisions(m.slurm_answered(running(A, s1=word, s2=word, s3=word), 0.1, 0.2)) == []
