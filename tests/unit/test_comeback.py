"""Tasks that are gone are brought back, and not before Slurm has said so twice."""

import pytest
from groups import A, B, C, running, training

from hpc_elastic.rendezvous.actions import ClearHolds
from hpc_elastic.rendezvous.comeback import GIVE_UP_S
from hpc_elastic.rendezvous.machine import Machine
from hpc_elastic.slurm.states import TaskState


def held(task: str, restarts: int = 1) -> TaskState:
    """A task that Slurm holds for two minutes after a requeue."""
    return TaskState(task, "PENDING", "BeginTime", restarts=restarts, starts_in_s=118.0)


def lost() -> Machine:
    """A round of A and C, whose third member B was lost."""
    m = training(A, B, C)
    m.gone(B, "its connection closed", 5.0)
    m.join(A, 5.1)
    m.join(C, 5.1)
    m.slurm_says(running(A, B, C), 5.2, 5.2)
    assert m.members == (A, C)
    return m


def says(m: Machine, state: TaskState, now: float) -> list[tuple[str, ...]]:
    """Let Slurm answer; return which tasks are brought back."""
    actions = m.slurm_says(running(A, C) | {state.task: state}, now, now)
    return [a.tasks for a in actions if isinstance(a, ClearHolds)]


def test_slurm_is_asked_about_a_lost_task_while_the_others_train():
    """Until it is back."""
    m = lost()
    assert m.wants_slurm
    m.join(B, 9.0)
    for agent in (A, C):
        m.join(agent, 9.1)
    m.slurm_says(running(A, B, C), 9.2, 9.2)
    assert m.members == (A, C, B) and not m.wants_slurm


def test_a_held_task_is_brought_back_once():
    """Two seconds after it was first seen, for its start time changes while its attempt ends."""
    m = lost()
    assert says(m, held(B.task), 10.0) == []
    assert m.comebacks.are_due
    assert says(m, held(B.task), 11.9) == []
    assert says(m, held(B.task), 12.0) == [(B.task,)]
    assert says(m, held(B.task), 20.0) == []


def test_a_task_that_does_not_move_is_brought_back_again():
    """Slurm may not have answered; until it has ended for good."""
    m = lost()
    state = TaskState(B.task, "NODE_FAIL")
    when = [now for now in range(10, 100) if says(m, state, float(now))]
    assert when == [12, 29, 46, 63]
    assert when[-1] - when[0] < GIVE_UP_S


def test_a_task_that_is_not_held_any_more_was_only_just_queued():
    """It starts by itself."""
    m = lost()
    says(m, held(B.task), 10.0)
    assert says(m, TaskState(B.task, "PENDING", "Resources", restarts=1), 12.0) == []
    assert not m.comebacks.are_due


def test_a_task_that_the_run_gave_back_stays_away():
    """That was the purpose."""
    m = lost()
    m.patience.away[B.task] = B.attempt
    for now in (10.0, 12.0, 14.0):
        assert says(m, held(B.task), now) == []


@pytest.mark.parametrize("word", ["PREEMPTED", "TIMEOUT", "NODE_FAIL", "FAILED"])
def test_a_task_that_slurm_has_ended_is_brought_back_too(word):
    """It may be requeued, or replaced. FAILED is one whose agent was killed."""
    m = lost()
    ended = TaskState(B.task, word, restarts=0)
    assert says(m, ended, 10.0) == [] and says(m, ended, 12.0) == [(B.task,)]


def test_a_task_that_failed_before_it_ever_joined_is_left_alone():
    """It would fail again; nothing was lost with it."""
    m = lost()
    never = TaskState("7_9", "FAILED", restarts=0)
    assert says(m, never, 10.0) == [] and says(m, never, 12.0) == []


def test_a_later_attempt_that_failed_before_it_joined_is_left_alone():
    """The one that was lost has come back, and another thing is wrong."""
    m = lost()
    later = TaskState(B.task, "FAILED", restarts=1)
    assert says(m, later, 10.0) == [] and says(m, later, 12.0) == []
    assert not m.wants_slurm


@pytest.mark.parametrize("word", ["CANCELLED", "COMPLETED", "OUT_OF_MEMORY"])
def test_a_task_that_ended_for_another_reason_is_left_alone(word):
    """The user's scancel is respected; and Slurm need not be asked any more."""
    m = lost()
    ended = TaskState(B.task, word, restarts=0)
    assert says(m, ended, 10.0) == [] and says(m, ended, 12.0) == []
    assert not m.wants_slurm


def test_a_task_that_does_not_move_has_ended_for_good():
    """Slurm need not be asked about it any more."""
    m = lost()
    ended = TaskState(B.task, "PREEMPTED", restarts=0)
    says(m, ended, 10.0)
    says(m, ended, 12.0)
    assert m.wants_slurm
    says(m, ended, 12.0 + GIVE_UP_S)
    assert not m.wants_slurm


def test_a_node_of_a_gang_that_failed_is_not_brought_back_alone():
    """The gang's job is one, and runs on."""
    m = lost()
    for now in (10.0, 12.0):
        assert says(m, TaskState("9.1", "NODE_FAIL", restarts=0), now) == []


def test_a_task_that_was_given_back_meanwhile_is_left_alone():
    """The decision to bring it back may have waited for a record to be written."""
    m = lost()
    assert m.not_given_back([B.task]) == (B.task,)
    m.patience.away[B.task] = m.muster.lost[B.task]
    assert m.not_given_back([B.task, "7_9"]) == ("7_9",)


def brought_back(m: Machine, state: TaskState) -> ClearHolds:
    """Let Slurm show a task so for two seconds; return what the leader does."""
    says(m, state, 10.0)
    actions = m.slurm_says(running(A, C) | {state.task: state}, 12.0, 12.0)
    (action,) = (a for a in actions if isinstance(a, ClearHolds))
    return action


def test_a_task_that_fell_silent_may_run_still():
    """Its node was cut off perhaps, and may be back at any time."""
    m = training(A, B, C)
    m.fell_silent(B, "silent", 5.0)
    assert brought_back(m, held(B.task)) == ClearHolds((B.task,), {B.task: "node2"})


def test_a_task_that_slurm_has_given_up_while_it_was_heard_may_run_still():
    """Slurm's daemon on its node has died; its processes live."""
    m = training(A, B, C)
    m.slurm_says(running(A, C) | {B.task: held(B.task)}, 6.0, 6.0)
    assert brought_back(m, held(B.task)) == ClearHolds((B.task,), {B.task: "node2"})


def test_a_task_whose_connection_has_closed_does_not_run_any_more():
    """Its process has ended, and its node was there to say so."""
    assert brought_back(lost(), held(B.task)) == ClearHolds((B.task,), {})
