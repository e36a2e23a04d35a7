"""How many workers a node runs, and which tasks of a run live."""

import json
import os

import pytest

from hpc_elastic.agent.supervise import num_workers
from hpc_elastic.agent.tasks import LocalTasks, SlurmTasks
from hpc_elastic.config import AgentSettings
from hpc_elastic.errors import ConfigError, SlurmCommandError
from hpc_elastic.rundir import Entry, RunSpec
from hpc_elastic.slurm.states import TaskState


@pytest.mark.parametrize(
    ("wanted", "gpus", "expected"),
    [(3, 8, 3), ("gpu", 2, 2), ("cpu", 2, 16), ("auto", 2, 2), ("auto", 0, 1)],
)
def test_workers_of_a_node(wanted, gpus, expected, monkeypatch):
    """A number is taken as it is; the words ask torch for GPUs and Slurm for CPUs."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert num_workers(wanted, cpus=16) == expected


def test_gpu_without_a_gpu_says_which_key_asks_for_one(monkeypatch):
    """The remedy is a setting."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"launcher\.gpus_per_node"):
        num_workers("gpu", cpus=16)


def spec(submission, tasks) -> RunSpec:
    """A run with these slots."""
    entry = Entry("function", "f", "f.py")
    return RunSpec("r", 1, 4, 1, 0, entry, str(submission), tasks, agent=AgentSettings())


class FakeClient:
    """Answers what it is told to, and remembers what it was asked."""

    def __init__(self, states: list[TaskState] | None) -> None:
        self.states = states
        self.cancelled: list[str] = []

    def tasks(self, job_ids):
        """The states of the tasks of these jobs."""
        self.asked = sorted(job_ids)
        if self.states is None:
            raise SlurmCommandError(["squeue"], 1, "Unable to contact slurm controller")
        return {s.task: s for s in self.states}

    def cancel(self, tasks, *, pending_only=False):
        """Take note of what is cancelled."""
        assert pending_only
        self.cancelled += tasks


def state(task: str, word: str) -> TaskState:
    """A task in a state."""
    return TaskState(task=task, state=word, reason="None", node="")


def test_a_run_sees_its_own_running_tasks_over_all_its_arrays(tmp_path):
    """Other runs' tasks, pending ones, and arrays that are not submitted yet do not count."""
    (tmp_path / "array-0.jobid").write_text("70\n")
    (tmp_path / "array-1.jobid").write_text("80\n")
    words = {"70_1": "RUNNING", "70_2": "RUNNING", "70_3": "PENDING", "80_0": "RUNNING"}
    client = FakeClient([state(t, w) for t, w in words.items()])
    tasks = SlurmTasks(spec(tmp_path, [(0, 1), (0, 3), (1, 0), (2, 0)]), client)
    assert tasks.running() == {"70_1", "80_0"}
    assert client.asked == ["70", "80"]
    tasks.cancel_pending()
    assert client.cancelled == ["70_1", "70_3", "80_0"]


def test_a_slurm_that_does_not_answer_is_no_answer(tmp_path, caplog):
    """Nobody knows what runs, and the log says so once."""
    (tmp_path / "array-0.jobid").write_text("70")
    tasks = SlurmTasks(spec(tmp_path, [(0, 0)]), FakeClient(None))
    assert tasks.running() is None and tasks.is_running("70_0") is None
    assert caplog.text.count("Slurm does not answer") == 1


def test_a_local_task_runs_while_its_process_does(tmp_path):
    """A table entry whose process is gone does not count."""
    (tmp_path / "array-0.jobid").write_text("9")
    table = {
        "9_0": {"state": "RUNNING", "pid": os.getpid()},
        "9_1": {"state": "RUNNING", "pid": 2**22 + 1},
        "9_2": {"state": "PENDING", "pid": None},
        "9_3": {"state": "RUNNING", "pid": os.getpid()},
    }
    (tmp_path / "local-tasks.json").write_text(json.dumps(table))
    assert LocalTasks(spec(tmp_path, [(0, 0), (0, 1), (0, 2)])).running() == {"9_0"}


def test_a_local_run_is_found_in_whichever_array_it_was_laid_out(tmp_path):
    """Runs of a sweep whose settings differ, or of a later batch, are not in the first array."""
    (tmp_path / "array-0.jobid").write_text("9")
    (tmp_path / "array-1.jobid").write_text("10")
    lives = {"state": "RUNNING", "pid": os.getpid()}
    (tmp_path / "local-tasks.json").write_text(json.dumps({"9_0": lives, "10_0": lives}))
    assert LocalTasks(spec(tmp_path, [(1, 0)])).running() == {"10_0"}
