"""Another task in the place of one that can not be requeued: recorded once, found by all."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from arrays import run_of
from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.run.directory import Submission
from hpc_elastic.slurm import quarantine, run_tasks
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.scheduler import run_states


class Client:
    """Stands for Slurm: gives every submission a new job id, and keeps what it was told."""

    def __init__(self, first=90, then=lambda: None):
        self.submitted = []
        self.released = []
        self.cancelled = []
        self._ids = count(first)
        self._then = then

    def resubmit(self, script, index, *, exclude, known):
        """Take a submission."""
        self.submitted.append((Path(script).name, index, sorted(exclude)))
        self._then()
        return str(next(self._ids))

    def release(self, task):
        """Take note of it."""
        self.released.append(task)

    def cancel(self, tasks):
        """Take note of it."""
        self.cancelled += tasks


def test_the_element_is_submitted_again_and_takes_the_slot(tmp_path):
    """The run's tasks have its name from then on, in the order of the slots."""
    run = run_of(tmp_path, "70", [(0, 1), (0, 3), (1, 0)])
    client = Client()
    assert run_tasks.current_names(run.load()) == ["70_1", "70_3", "71_0"]
    assert run_tasks.resubmit(run, "70_3", client) == "90_3"
    assert client.submitted == [("array-0.sbatch", 3, [])]
    assert client.released == ["90_3"]
    assert run_tasks.current_names(run.load()) == ["70_1", "90_3", "71_0"]
    listed = {name: TaskState(name, "RUNNING") for name in ("71_0", "90_3")}
    slots = {name: state.slot for name, state in run_states(run.load(), listed).items()}
    assert slots == {"90_3": 1, "71_0": 2}
    (tmp_path / ".hpc_elastic" / "array-0.replaced" / "odd.1").write_text("91\n")
    assert run_tasks.followed([Submission(tmp_path / ".hpc_elastic")]) == {"70_3": "90_3"}


def test_whoever_waits_for_the_run_sees_the_task_in_its_place(tmp_path):
    """Under the name that the task had at first; Slurm is asked once for both jobs."""
    run = run_of(tmp_path, "70", [(0, 0), (0, 1)])
    client = Client()
    run_tasks.resubmit(run, "70_1", client)
    asked = []

    def tasks(job_ids):  # of a job that Slurm has forgotten, the client asks once in its life
        asked.append(list(job_ids))
        words = {"70_0": "RUNNING", "70_1": "NODE_FAIL", "90_1": "PENDING"}
        return {name: TaskState(name, word) for name, word in words.items()}

    client.tasks = tasks
    states = run_tasks.list_followed(client, [Submission(tmp_path / ".hpc_elastic")], ["70"])
    assert asked == [["70", "90"]]
    assert (states["70_0"].state, states["70_1"]) == ("RUNNING", TaskState("70_1", "PENDING"))


def test_a_task_is_replaced_once_whoever_asks_and_how_often(tmp_path):
    """The second is told who stands there; nothing is submitted again."""
    run = run_of(tmp_path, "70", [(0, 0)])
    client = Client()
    assert [run_tasks.resubmit(run, "70_0", client) for _ in range(2)] == ["90_0"] * 2
    assert len(client.submitted) == 1


def test_peers_that_ask_at_once_make_one(tmp_path):
    """Whose record is there first has replaced the task; the others take theirs back."""
    run = run_of(tmp_path, "70", [(0, 0)])
    client = Client()
    with ThreadPoolExecutor(8) as pool:
        names = set(pool.map(lambda _: run_tasks.resubmit(run, "70_0", client), range(8)))
    (name,) = names
    assert client.released == [name]
    assert sorted(f"{job}_0" for job in [*client.cancelled, name[:2]]) == sorted(
        f"{90 + n}_0" for n in range(len(client.submitted))
    )


def test_what_could_not_be_written_down_is_taken_back(tmp_path):
    """Nobody would know of the job; whoever tries again makes one."""
    run = run_of(tmp_path, "70", [(0, 0)])
    records = Submission(tmp_path / ".hpc_elastic").array(0).replaced
    client = Client(then=records.touch)  # so that no record can be made
    with pytest.raises(OSError, match=records.name):
        run_tasks.resubmit(run, "70_0", client)
    assert (client.cancelled, client.released) == (["90"], [])
    records.unlink()
    assert run_tasks.resubmit(run, "70_0", Client(first=91)) == "91_0"


def test_a_replacement_can_be_replaced_in_its_turn(tmp_path):
    """Each has a number; the newest is the one that counts."""
    run = run_of(tmp_path, "70", [(0, 0)])
    client = Client()
    run_tasks.resubmit(run, "70_0", client)
    assert run_tasks.resubmit(run, "90_0", client) == "91_0"
    assert run_tasks.resubmit(run, "70_0", client) == "91_0"
    assert run_tasks.current_names(run.load()) == ["91_0"]
    assert run_tasks.followed([Submission(tmp_path / ".hpc_elastic")]) == {"70_0": "91_0"}


def test_more_than_nine_replacements_are_in_order(tmp_path):
    """Their numbers are numbers, not text."""
    run = run_of(tmp_path, "70", [(0, 0)])
    client, name = Client(100), "70_0"
    for _ in range(11):
        name = run_tasks.resubmit(run, name, client)
    assert run_tasks.current_names(run.load()) == ["110_0"]


def test_a_coallocated_job_is_replaced_as_a_whole(tmp_path):
    """Its nodes keep their ids; the array beside it is left alone."""
    run = run_of(tmp_path, "70", [(0, 0), (0, 1), (1, 0)], coallocate_min=True)
    client = Client()
    assert run_tasks.resubmit(run, "70.1", client) == "90"
    assert client.submitted == [("array-0.sbatch", None, [])]
    assert run_tasks.current_names(run.load()) == ["90.0", "90.1", "71_0"]
    assert run_tasks.followed([Submission(tmp_path / ".hpc_elastic")]) == {"70": "90"}


def test_a_run_that_has_ended_gets_no_replacement(tmp_path):
    """Nor does a task that is none of it."""
    run = run_of(tmp_path, "70", [(0, 0)])
    assert run_tasks.resubmit(run, "70_5", Client()) is None
    run.result.write_text("{}")
    client = Client()
    assert run_tasks.resubmit(run, "70_0", client) is None
    assert client.submitted == []


def test_a_replacement_that_was_made_while_the_run_ended_is_taken_back(tmp_path):
    """It was submitted before the result was there, and may not stay in the queue."""
    run = run_of(tmp_path, "70", [(0, 0)])
    client = Client(then=lambda: run.result.write_text("{}"))
    assert run_tasks.resubmit(run, "70_0", client) is None
    assert (client.cancelled, client.released) == (["90"], [])


def test_a_submission_that_fails_leaves_no_record(tmp_path):
    """The next one who looks tries again."""

    def fail():
        raise SlurmCommandError(["sbatch"], 1, "Unable to contact slurm controller")

    run = run_of(tmp_path, "70", [(0, 0)])
    with pytest.raises(SlurmCommandError):
        run_tasks.resubmit(run, "70_0", Client(then=fail))
    assert run_tasks.current_names(run.load()) == ["70_0"]
    assert run_tasks.resubmit(run, "70_0", Client()) == "90_0"


def test_a_replacement_avoids_the_nodes_that_the_run_avoids(tmp_path):
    """The blame that lasts longest stays; the user's own list, too."""
    run = run_of(tmp_path, "70", [(0, 0)])
    script = Submission(tmp_path / ".hpc_elastic").array(0).script
    script.write_text("#SBATCH --exclude=n[7-8],n9\n")
    client = Client()
    run_tasks.resubmit(run, "70_0", client)
    assert client.submitted == [("array-0.sbatch", 0, [])], "the script's line holds"
    quarantine.remember_excluded(run, ["n3"], "CUDA error", 90.0)
    quarantine.remember_excluded(run, ["n3", "n1"], "lost heartbeat", 80.0)
    client = Client(first=95)
    run_tasks.resubmit(run, "90_0", client)
    assert client.submitted == [("array-0.sbatch", 0, ["n1", "n3", "n7", "n8", "n9"])]
    stored = json.loads((run.path / "excluded_nodes.json").read_text())
    longer = {"why": "CUDA error", "until": 90.0, "is_lifted": False}
    other = {"why": "lost heartbeat", "until": 80.0, "is_lifted": False}
    assert stored == {"n3": longer, "n1": other}
    quarantine.remember_excluded(run, ["n1"], "silent", 99.0)
    assert quarantine.excluded(run)["n1"] == quarantine.Exclusion("silent", 99.0)


def test_nodes_that_two_exclude_at_once_are_both_avoided(tmp_path, monkeypatch):
    """Each reads the list, and writes it: what was lost that way is written again."""
    run, write = run_of(tmp_path, "70", [(0, 0)]), quarantine.write_atomic
    others = ['{"n1": "gpu"}']

    def overwritten(path, text):
        write(path, others.pop() if others else text)

    monkeypatch.setattr(quarantine, "write_atomic", overwritten)
    quarantine.remember_excluded(run, ["n3"], "CUDA error", 90.0)
    assert quarantine.excluded(run) == {
        "n1": quarantine.Exclusion("gpu", 0.0),
        "n3": quarantine.Exclusion("CUDA error", 90.0),
    }


def test_a_torn_list_of_nodes_is_no_list(tmp_path):
    """Another node is better than none."""
    run = run_of(tmp_path, "70", [(0, 0)])
    (run.path / "excluded_nodes.json").write_text("{")
    assert quarantine.excluded(run) == {}
