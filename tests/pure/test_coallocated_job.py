"""A co-allocated job: the states of its tasks, and its end when its batch script is lost."""

import json
from pathlib import Path

import pytest

from hpc_elastic.errors import SlurmCommandError, SlurmEnvironmentError
from hpc_elastic.run.directory import ArrayFiles
from hpc_elastic.slurm.environment import SlurmEnvironment
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.scheduler import (
    NUM_RECORDERS,
    JobNodes,
    cancel_if_orphaned,
    mark_agent_ended,
    read_job_nodes,
    record_job_nodes,
    states_of,
)

SLOTS = {"8.0": 0, "8.1": 1, "8.2": 2, "9_0": 3}


def job(state: str, node: str = "", restarts: int = 0) -> TaskState:
    """The job's line in the queue."""
    return TaskState("8", state, node=node, restarts=restarts)


def seen(*listed: TaskState, given: JobNodes | None = None) -> dict[str, tuple[str, str]]:
    """State and node of each task."""
    states = states_of(SLOTS, {s.task: s for s in listed}, given)
    assert all((state.task, state.slot) == (name, SLOTS[name]) for name, state in states.items())
    return {name: (state.state, state.node) for name, state in states.items()}


def test_each_node_of_a_coallocated_job_has_the_state_of_the_job():
    """Node i of the list is the node with the id i; other tasks are as squeue lists them."""
    assert seen(job("RUNNING", "n[1-3]"), TaskState("9_0", "PENDING")) == {
        "8.0": ("RUNNING", "n1"),
        "8.1": ("RUNNING", "n2"),
        "8.2": ("RUNNING", "n3"),
        "9_0": ("PENDING", ""),
    }


@pytest.mark.parametrize("nodes", ["", "(null)[", "n1"])
def test_a_coallocated_job_without_known_nodes_still_has_a_state(nodes):
    """Pending it has none; a list that does not parse, or is too short, costs the names only."""
    assert {state for state, _ in seen(job("PENDING", nodes)).values()} == {"PENDING"}


def test_a_coallocated_job_that_slurm_does_not_know_has_no_state():
    """It has been forgotten, or was never submitted."""
    assert seen(TaskState("9_0", "RUNNING")) == {"9_0": ("RUNNING", "")}


def test_a_node_that_slurm_took_out_of_the_job_is_lost():
    """The others keep their ids, though the job's list is shorter now."""
    given = JobNodes(0, ("n1", "n2", "n3"))
    assert seen(job("RUNNING", "n[1,3]"), given=given) == {
        "8.0": ("RUNNING", "n1"),
        "8.1": ("NODE_FAIL", "n2"),
        "8.2": ("RUNNING", "n3"),
    }


def test_a_job_that_ends_gives_its_nodes_back_one_by_one():
    """A node that it no longer has is not lost then."""
    given = JobNodes(0, ("n1", "n2", "n3"))
    assert {s for s, _ in seen(job("COMPLETING", "n3"), given=given).values()} == {"COMPLETING"}


def test_what_was_recorded_of_an_earlier_attempt_does_not_count():
    """A requeued co-allocated job gets other nodes."""
    given = JobNodes(0, ("n1", "n2", "n3"))
    now = seen(job("RUNNING", "n[4-6]", restarts=1), given=given)
    assert now["8.0"] == ("RUNNING", "n4")


def environment(node_id: int, restarts: int = 0, nodes: str = "n[1-3]") -> SlurmEnvironment:
    """What a node of the job finds."""
    return SlurmEnvironment(
        {
            "SLURM_JOB_ID": "8",
            "SLURM_NODEID": str(node_id),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": nodes,
            "SLURM_RESTART_COUNT": str(restarts),
        }
    )


def test_the_first_nodes_record_what_the_job_was_given(tmp_path):
    """Several, lest one be lost; not all, for the file is shared by thousands."""
    files = ArrayFiles(tmp_path / "array-0")
    record_job_nodes(files, environment(NUM_RECORDERS))
    assert read_job_nodes(files) is None
    record_job_nodes(files, environment(NUM_RECORDERS - 1))
    assert read_job_nodes(files) == JobNodes(0, ("n1", "n2", "n3"))
    record_job_nodes(files, environment(0, restarts=1, nodes="n[4-6]"))
    assert read_job_nodes(files) == JobNodes(1, ("n4", "n5", "n6"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"attempt": "x", "hosts": []}', '{"attempt"'])
def test_a_record_that_is_no_record_is_none(tmp_path, text):
    """The node names are then those that squeue gives."""
    files = ArrayFiles(tmp_path / "array-0")
    files.nodes.write_text(text)
    assert read_job_nodes(files) is None


def test_a_node_list_that_does_not_parse_is_refused(tmp_path):
    """With the variable's name and value."""
    with pytest.raises(SlurmEnvironmentError, match=r"SLURM_STEP_NODELIST is 'n\[1-'"):
        record_job_nodes(ArrayFiles(tmp_path / "array-0"), environment(0, nodes="n[1-"))


class FakeClient:
    """Remembers what is cancelled."""

    def __init__(self, error: Exception | None = None) -> None:
        self.cancelled: list[str] = []
        self.error = error

    def cancel(self, tasks):
        """Take note, or fail."""
        self.cancelled += tasks
        if self.error:
            raise self.error


def test_a_coallocated_job_whose_first_agent_has_ended_ends_by_itself(tmp_path):
    """Its batch script was there to see it."""
    client = FakeClient()
    mark_agent_ended(tmp_path, environment(0))
    assert not cancel_if_orphaned("8.1", tmp_path, client, wait_s=0)
    assert client.cancelled == []


def test_a_coallocated_job_whose_first_agent_never_ends_is_cancelled(tmp_path):
    """Slurm would keep its nodes for as long as its time limit allows."""
    client = FakeClient()
    mark_agent_ended(tmp_path, environment(1))
    assert cancel_if_orphaned("8.1", tmp_path, client, wait_s=0)
    assert client.cancelled == ["8"]


def test_a_coallocated_job_that_can_not_be_cancelled_is_told(tmp_path, caplog):
    """The run's result does not depend on it."""
    client = FakeClient(SlurmCommandError(["scancel"], 1, "no answer"))
    assert not cancel_if_orphaned("8.1", tmp_path / "never made", client, wait_s=0)
    assert "holds its nodes" in caplog.text


def test_the_record_is_plain_json(tmp_path):
    """No pickle lies in the shared directory."""
    files = ArrayFiles(Path(tmp_path / "array-0"))
    record_job_nodes(files, environment(0))
    assert json.loads(files.nodes.read_text()) == {"attempt": 0, "hosts": ["n1", "n2", "n3"]}
