"""Lost tasks are restarted, once Slurm has reported them lost twice."""

from dataclasses import replace

import pytest

from groups import A, B, C, D, decisions, machine, notes, running, training
from hpc_elastic.rendezvous.effects import ClearHolds, Exclude
from hpc_elastic.rendezvous.log_entry import Agent
from hpc_elastic.rendezvous.round_state import RoundPhase, RoundState
from hpc_elastic.rendezvous.task_recovery import (
    GIVE_UP_S,
    OUTAGE_TRIES,
    START_TRIES,
    LostTaskRecovery,
)
from hpc_elastic.run.events import LossReason
from hpc_elastic.slurm.job_state import TaskState


def held(task: str, restarts: int = 1) -> TaskState:
    """A task that Slurm holds for two minutes after a requeue."""
    return TaskState(task, "PENDING", "BeginTime", restarts=restarts, starts_in_s=118.0)


def lost(**changes) -> RoundState:
    """A round of A and C, whose third member B was lost."""
    m = training(A, B, C, max_nodes=3, **changes)
    m.agent_lost(B, LossReason.CONNECTION_CLOSED, 5.0)
    m.join(A, 5.1)
    m.join(C, 5.1)
    m.slurm_answered(running(A, B, C), 5.2, 5.2)
    assert m.run.ranks.members == (A, C)
    return m


def restarted(m: RoundState, state: TaskState, now: float) -> list[tuple[str, ...]]:
    """Return the tasks that the leader restarts after this answer of Slurm."""
    actions = m.slurm_answered(running(A, C) | {state.task: state}, now, now)
    return [a.tasks for a in actions if isinstance(a, ClearHolds)]


def test_slurm_is_queried_about_a_lost_task_while_the_others_train():
    """Until the task is back."""
    m = lost()
    assert m.run.wants_slurm
    m.join(B, 9.0)
    for agent in (A, C):
        m.join(agent, 9.1)
    m.slurm_answered(running(A, B, C), 9.2, 9.2)
    assert m.run.ranks.members == (A, C, B) and not m.run.wants_slurm


def test_a_held_task_is_restarted_once():
    """Two seconds after it was first reported, since its start time changes while it ends."""
    m = lost()
    assert restarted(m, held(B.task), 10.0) == []
    assert m.run.recovery.are_due
    assert restarted(m, held(B.task), 11.9) == []
    assert restarted(m, held(B.task), 12.0) == [(B.task,)]
    assert restarted(m, held(B.task), 20.0) == []


def test_a_task_that_does_not_move_is_restarted_again():
    """A command to Slurm may be lost; the task ends for good after a time."""
    m = lost()
    state = TaskState(B.task, "NODE_FAIL")
    when = [now for now in range(10, 100) if restarted(m, state, float(now))]
    assert when == [12, 29, 46, 63]
    assert when[-1] - when[0] < GIVE_UP_S


@pytest.mark.parametrize("state", ["FAILED", "NODE_FAIL", "PREEMPTED"])
def test_a_task_that_may_not_be_requeued_any_more_has_ended_for_good(state):
    """The leader does not restart it, but does restart one that is in the queue already."""
    m = lost(max_requeues=0)
    over = TaskState(B.task, state, restarts=0)
    assert [restarted(m, over, float(now)) for now in range(10, 40)] == [[]] * 30
    assert m.run.recovery.num_over == 1 and not m.run.recovery.are_awaited
    again = lost(max_requeues=1)
    assert restarted(again, replace(over, restarts=1), 10.0) == []
    assert restarted(again, replace(over, restarts=1), 12.0) == []
    assert restarted(again, held(B.task), 14.0) == [] and restarted(again, held(B.task), 16.0)


def test_a_task_that_fails_before_it_joins_is_not_tried_again_beyond_its_requeues():
    """Its event has ``again`` false."""
    m = lost(max_requeues=0)
    failed = TaskState(D.task, "FAILED", "NonZeroExitCode", "node9", restarts=0)
    (note,) = notes(m.slurm_answered(running(A, C) | {D.task: failed}, 10.0, 10.0), "start_failed")
    assert note.fields["again"] is False


def test_a_task_that_is_not_held_any_more_starts_by_itself():
    """It was only just queued."""
    m = lost()
    restarted(m, held(B.task), 10.0)
    assert restarted(m, TaskState(B.task, "PENDING", "Resources", restarts=1), 12.0) == []
    assert not m.run.recovery.are_due


def test_a_task_that_the_run_requeued_is_not_restarted():
    """It stays away until its delay is over."""
    m = lost()
    m.run.backoff.requeued[B.task] = B.attempt
    for now in (10.0, 12.0, 14.0):
        assert restarted(m, held(B.task), now) == []


@pytest.mark.parametrize("word", ["PREEMPTED", "TIMEOUT", "NODE_FAIL", "FAILED", "OUT_OF_MEMORY"])
def test_a_task_that_slurm_has_ended_is_restarted_too(word):
    """It may be requeued or replaced. It is FAILED if its agent was killed."""
    m = lost()
    ended = TaskState(B.task, word, restarts=0)
    assert restarted(m, ended, 10.0) == [] and restarted(m, ended, 12.0) == [(B.task,)]


def not_launched(attempt: int, host: str, task: str = D.task) -> TaskState:
    """A task that its node could not start, as after an error of the node's disk."""
    return TaskState(task, "FAILED", "JobLaunchFailure", host, restarts=attempt)


HELD = "launch failed requeued held"


@pytest.mark.parametrize("word", ["FAILED", "OUT_OF_MEMORY", "BOOT_FAIL", "LAUNCH_FAILED"])
@pytest.mark.parametrize("task", [B.task, D.task])
def test_a_task_that_failed_before_it_joined_starts_elsewhere(word, task):
    """The first attempt of a task, or one that is later than the lost one."""
    m = lost()
    failed = TaskState(task, word, node="node9", restarts=1)
    assert restarted(m, failed, 10.0) == []
    (back,) = [a for a in m.slurm_answered(view(failed), 12.0, 12.0) if isinstance(a, ClearHolds)]
    assert back.tasks == (task,) and back.failed_on == {task: ("node9",)}
    assert restarted(m, failed, 13.0) == []


def test_a_task_whose_node_died_after_its_requeue_is_restarted():
    """Its agent could not request the next attempt. Its start has not failed: it had joined."""
    m = lost()
    m.run.backoff.requeued[D.task] = 0
    died = TaskState(D.task, "FAILED", node="node9", restarts=0)
    actions = m.slurm_answered(view(died), 10.0, 10.0)
    assert notes(actions, "start_failed") == [] and m.run.policy.excluded == ()
    assert restarted(m, died, 12.0) == [(D.task,)]
    assert restarted(m, held(D.task), 30.0) == [], "it stays away otherwise"


def view(*states: TaskState) -> dict[str, TaskState]:
    """Slurm's answer while A and C train."""
    return running(A, C) | {state.task: state for state in states}


def test_a_task_that_slurm_holds_because_its_node_could_not_start_it_is_restarted():
    """Slurm would hold it until a user releases it."""
    m = lost()
    state = TaskState(D.task, "PENDING", HELD, "node9", restarts=1)
    restarted(m, state, 10.0)
    assert restarted(m, state, 12.0) == [(D.task,)] and m.run.policy.excluded == ("node9",)


def test_a_node_that_cannot_start_a_task_is_avoided_at_once():
    """No script has run there that could be to blame; the event has Slurm's reason."""
    m = lost()
    actions = m.slurm_answered(view(not_launched(0, "node9")), 10.0, 10.0)
    (note,) = notes(actions, "start_failed")
    assert note.fields == {
        "task": D.task, "host": "node9", "state": "FAILED", "reason": "JobLaunchFailure",
        "hosts": ["node9"], "again": True,
    }  # fmt: skip
    (excluded,) = [a for a in actions if isinstance(a, Exclude)]
    assert excluded.hosts == ("node9",) and "JobLaunchFailure" in excluded.why
    assert notes(m.slurm_answered(view(not_launched(0, "node9")), 11.0, 11.0), "start_failed") == []


def test_a_host_that_is_excluded_while_a_group_trains_does_not_fence_it():
    """An entry would be the end of its workers: they could save nothing more."""
    m = lost()
    index = m.run.entry.index
    m.slurm_answered(view(not_launched(0, "node9")), 10.0, 10.0)
    assert m.run.policy.excluded == ("node9",) and m.run.entry.index == index


def test_a_task_that_fails_by_itself_before_it_joins_is_one_strike():
    """Its setup may be wrong; a second task that fails there makes the node more likely."""
    m = lost()
    for attempt, task in enumerate((B.task, D.task), start=1):
        assert m.run.policy.excluded == ()
        failed = TaskState(task, "FAILED", "NonZeroExitCode", "node9", restarts=attempt)
        m.slurm_answered(view(failed), 10.0, 10.0)
    assert m.run.policy.excluded == ("node9",)


@pytest.mark.parametrize(("trained", "tries"), [(False, 3), (True, 11)])
def test_a_task_that_fails_everywhere_is_not_tried_for_ever(trained, tries):
    """It is not the fault of a node; the run avoids at most as many nodes as it may have."""
    m, back, failures = lost(), [], []
    m.run.recovery.has_trained = trained
    for attempt in range(15):
        now, failed = 1000.0 * attempt, not_launched(attempt, f"node{10 + attempt}")
        failures += notes(m.slurm_answered(view(failed), now, now), "start_failed")
        for pause_s in (2.0, 700.0, 702.0):
            back += restarted(m, failed, now + pause_s)
    assert set(back) == {(D.task,)}
    again = [note.fields["again"] for note in failures]
    assert again[:tries] == [True] * (tries - 1) + [False]
    assert len(m.run.policy.excluded) <= m.run.rules.max_nodes


def test_an_outage_of_the_file_system_does_not_end_tasks_for_good():
    """A run that has trained tries them for an hour, more and more rarely, on any node."""
    m, now, tried = lost(), 10.0, []
    for attempt in range(1, START_TRIES + OUTAGE_TRIES + 1):
        failed = TaskState(B.task, "FAILED", "NonZeroExitCode", f"node{attempt}", restarts=attempt)
        last, began = [], now
        while not last and now < began + 1000.0:
            answer = m.slurm_answered(view(failed), now, now)
            last = [effect for effect in answer if isinstance(effect, ClearHolds)]
            now += 2.0
        tried += [(now - began, dict(effect.failed_on)[B.task]) for effect in last]
    assert len(tried) == START_TRIES + OUTAGE_TRIES - 1
    assert [pause_s < 10.0 for pause_s, _ in tried] == [True] * 2 + [False] * OUTAGE_TRIES
    assert 3000.0 < now - 10.0 - 1000.0 < 3600.0
    assert {hosts for _, hosts in tried[2:]} == {()}
    assert not m.run.awaits_tasks and m.run.recovery.num_over == 1


def test_what_is_known_of_restarts_is_bounded():
    """Of attempts that Slurm does not report any more nothing is kept."""
    m = lost()
    for attempt in range(50):
        for pause_s in (0.0, 2.5):
            now = 100.0 * attempt + pause_s
            restarted(m, TaskState(D.task, "PREEMPTED", restarts=attempt), now)
    recovery = m.run.recovery
    assert len(recovery._restarted) <= 1 and len(recovery._last_tried) <= 1


def test_failed_starts_are_counted_from_zero_once_the_task_has_joined():
    """Only failures in a row count."""
    m = lost()
    for attempt in range(START_TRIES - 1):
        m.slurm_answered(
            view(not_launched(attempt, "node9", B.task)), 10.0 + attempt, 10.0 + attempt
        )
    m.join(replace(B, attempt=7), 20.0)
    m.agent_lost(replace(B, attempt=7), LossReason.CONNECTION_CLOSED, 21.0)
    m.slurm_answered(view(not_launched(8, "node9", B.task)), 22.0, 22.0)
    assert m.run.recovery.tried_hosts(B.task) == ("node9",)
    assert restarted(m, not_launched(8, "node9", B.task), 24.0) == [(B.task,)]


def test_tasks_of_two_arrays_with_one_index_are_two_tasks():
    """Each pool has an array; a task and the one that replaces it have one slot."""
    recovery = LostTaskRecovery()

    def fail(task: str, host: str, slot: int) -> list[str]:
        state = replace(not_launched(0, host, task), slot=slot)
        return [host for f in recovery.failed_starts({task: state}, {}, {}) for host in f.hosts]

    assert fail("100_0", "node1", 0) == ["node1"]
    assert fail("101_0", "node2", 4) == ["node2"]
    assert fail("205_0", "node3", 0) == ["node1", "node3"], "it was submitted in place of 100_0"
    recovery.on_join(Agent("101_0", 1, 4, "node5", 1))
    assert recovery.tried_hosts("101_0") == () and recovery.tried_hosts("205_0") != ()
    recovery.on_join(Agent("207_0", 0, 0, "node5", 1))
    assert recovery.tried_hosts("205_0") == ()


def test_slurm_is_queried_about_tasks_that_have_not_joined_yet():
    """Only Slurm reports their failure; not once all tasks have joined or ended."""
    m = training(A, B)
    assert m.run.wants_slurm and m.run.awaits_tasks
    m.slurm_answered(running(A, B, s2="CANCELLED", s3="COMPLETED"), 1.0, 1.0)
    assert not m.run.wants_slurm


def test_a_run_that_forms_waits_for_a_task_whose_node_could_not_start_it():
    """Even if it needs all its nodes; after the last try it ends with Slurm's reason."""
    m = machine(min_nodes=2, max_nodes=2)
    m.join(A, 0.0)
    for attempt in range(START_TRIES):
        assert m.run.phase is RoundPhase.FORMING
        failed = running(A) | {B.task: not_launched(attempt, f"node{5 + attempt}", B.task)}
        actions = m.slurm_answered(failed, 10.0 * attempt + 1, 10.0 * attempt + 1)
    (_, ending) = decisions(actions)[-1]
    message = ending.failure.summary()
    assert "FAILED, JobLaunchFailure" in message and "node5, node6, node7" in message
    assert "sinfo -R" in message


@pytest.mark.parametrize("word", ["CANCELLED", "COMPLETED", "DEADLINE"])
def test_a_task_that_ended_for_another_reason_is_not_restarted(word):
    """The user's scancel is respected, and Slurm is not queried any more."""
    m = lost()
    ended = TaskState(B.task, word, restarts=0)
    assert restarted(m, ended, 10.0) == [] and restarted(m, ended, 12.0) == []
    assert not m.run.wants_slurm


def test_a_task_that_does_not_move_has_ended_for_good():
    """Slurm is not queried about it any more."""
    m = lost()
    ended = TaskState(B.task, "PREEMPTED", restarts=0)
    restarted(m, ended, 10.0)
    restarted(m, ended, 12.0)
    assert m.run.wants_slurm
    restarted(m, ended, 12.0 + GIVE_UP_S)
    assert not m.run.wants_slurm


def test_a_failed_node_of_a_coallocated_job_is_not_restarted_alone():
    """The other nodes of the job go on."""
    m = lost()
    for now in (10.0, 12.0):
        assert restarted(m, TaskState("9.1", "NODE_FAIL", restarts=0), now) == []


def restart_of(m: RoundState, state: TaskState) -> ClearHolds:
    """Let Slurm report this state for two seconds; return the effect of the restart."""
    restarted(m, state, 10.0)
    actions = m.slurm_answered(running(A, C) | {state.task: state}, 12.0, 12.0)
    (action,) = (a for a in actions if isinstance(a, ClearHolds))
    return action


def test_a_task_whose_heartbeats_stopped_may_still_run():
    """Its node may be cut off, and return at any time."""
    m = training(A, B, C)
    m.run.note_silence(B)
    m.agent_lost(B, LossReason.SILENT, 5.0)
    assert restart_of(m, held(B.task)) == ClearHolds((B.task,), {B.task: "node2"})


def test_a_task_that_ended_for_slurm_while_its_agent_was_connected_may_still_run():
    """Slurm's daemon on its node has died; its processes live."""
    m = training(A, B, C)
    m.slurm_answered(running(A, C) | {B.task: held(B.task)}, 6.0, 6.0)
    assert restart_of(m, held(B.task)) == ClearHolds((B.task,), {B.task: "node2"})


def test_a_task_whose_connection_has_closed_does_not_run_any_more():
    """Its process has ended, since its node closed the connection."""
    assert restart_of(lost(), held(B.task)) == ClearHolds((B.task,), {})
