"""A group that has not formed says who is missing, and where to look."""

from groups import A, B, C, machine, running, training
from hpc_elastic.rendezvous.run_status import waiting_for
from hpc_elastic.slurm.job_state import TaskState


def log_of(task: str, attempt: int) -> str:
    """Where the log of an attempt is."""
    return f"logs/{task}.{attempt}"


def no_logs(_task: str, _attempt: int) -> None:
    """Nobody knows where logs are."""


def test_a_task_that_runs_and_does_not_come_is_named_with_its_node_and_log():
    """There somebody will find out why."""
    m = machine()
    m.join(A, 0.0)
    view = running(A) | {B.task: TaskState(B.task, "RUNNING", node="node2", restarts=3)}
    m.slurm_answered(view, 0.0, 0.1)
    assert waiting_for(m.run, log_of) == (
        "1 of at least 1 node has joined; missing: 7_1 (RUNNING on node2), log logs/7_1.3"
    )


def test_a_task_in_the_queue_is_named_with_slurms_reason():
    """It has no log yet, and nobody but Slurm can help."""
    m = machine(min_nodes=2)
    m.join(A, 0.0)
    m.slurm_answered(running(A) | {B.task: TaskState(B.task, "PENDING", "Resources")}, 0.0, 0.1)
    assert waiting_for(m.run, log_of) == (
        "1 of at least 2 nodes have joined; missing: 7_1 (PENDING, Resources)"
    )


def test_a_member_that_does_not_come_back_is_named_with_its_host():
    """Its workers may hang where they were stopped."""
    m = training(A, B)
    m.join(C, 1.0)
    m.join(A, 1.1)
    assert waiting_for(m.run, log_of) == (
        "2 of at least 1 node has joined; missing: 7_1 on node2, "
        "which must stop its workers and join again, log logs/7_1.0"
    )


def test_a_log_that_nobody_knows_is_left_out():
    """Where a run was started by hand."""
    m = training(A, B)
    m.join(A, 1.1)
    assert "log" not in waiting_for(m.run, no_logs)


def test_where_nobody_is_known_to_be_missing():
    """Slurm was not asked yet, or does not answer, or has no other task."""
    m = machine(min_nodes=2)
    here, _, others = waiting_for(m.run, log_of).partition("; ")
    assert here == "0 of at least 2 nodes have joined"
    assert others == "no other task of the run is known to run or to be queued"


def test_of_very_many_the_first_are_named():
    """Ten thousand names help nobody."""
    m = machine(min_nodes=2)
    m.join(A, 0.0)
    view = {f"9_{i:04}": TaskState(f"9_{i:04}", "PENDING", "Priority") for i in range(1000)}
    m.slurm_answered(view, 0.0, 0.1)
    text = waiting_for(m.run, log_of)
    assert text.endswith("9_0019 (PENDING, Priority), and 980 more") and "9_0020" not in text
