"""The scheduler of a run: what it lists and what it does, in Slurm and in the local queue."""

import os
import time
from pathlib import Path

import pytest

from arrays import GONE, ME, run_of, write_table
from hpc_elastic.errors import LocalQueueError, SlurmCommandError
from hpc_elastic.report.run_view import read_view
from hpc_elastic.run.directory import Entry, RunDir, RunSpec, Submission
from hpc_elastic.slurm import quarantine, run_tasks
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.local_queue import LocalQueue
from hpc_elastic.slurm.run_tasks import current_names
from hpc_elastic.slurm.scheduler import QueueSnapshot, Scheduler, take_snapshot
from specs import spec_of


def spec(submission, tasks, **fields) -> RunSpec:
    """A run with these slots."""
    entry = Entry("function", "f", "f.py")
    return spec_of("r", 2, 4, 1, 0, entry, str(submission), tasks, **fields)


def of_spec(run: RunSpec, client=None) -> Scheduler:
    """The scheduler of a run whose directory is not needed."""
    return Scheduler(RunDir(Path("/nowhere")), run, client)


class FakeClient:
    """Answers what it is told to, and remembers what it was asked.

    Args:
        states: The tasks that it lists; None: it does not answer.
        fails: Tasks for whose requeue it does not answer.
        refuses: Tasks that it does not requeue.
        mute: Tasks whose avoided nodes it does not list.
    """

    def __init__(self, states, *, fails=(), refuses=(), mute=()) -> None:
        self.states = states
        self.fails, self.refuses, self.mute = fails, refuses, mute
        self.avoided: dict[str, tuple[str, ...]] = {}
        self.asked: list[list[str]] = []
        self.cancelled: list[str] = []
        self.postponed: list[tuple[list[str], float]] = []
        self.requeued: list[str] = []
        self.excluded_nodes: list[tuple[list[str], list[str]]] = []
        self.readmitted: list[tuple[list[str], str]] = []
        self.submitted: list[int | None] = []

    def tasks(self, job_ids, *, once=False):
        """The states of the tasks of these jobs."""
        self.asked.append(sorted(job_ids))
        if self.states is None:
            raise SlurmCommandError(["squeue"], 1, "Unable to contact slurm controller")
        return {s.task: s for s in self.states}

    def cancel(self, tasks, *, pending_only=False):
        """Record what is cancelled."""
        assert pending_only
        self.cancelled += tasks

    def postpone(self, tasks, delay_s, *, time_limit_s=None):
        """Record what is postponed."""
        self.postponed.append((list(tasks), delay_s))

    def requeue(self, task):
        """Requeue, or refuse to, or do not answer."""
        if task in self.fails:
            raise SlurmCommandError(["scontrol"], None, "no answer within 10 s")
        if task in self.refuses:
            disabled = "Requested operation is presently disabled"
            raise SlurmCommandError(["scontrol"], 1, disabled)
        self.requeued.append(task)

    def excluded(self, task):
        """The nodes that a task avoids, or no answer."""
        if task in self.mute:
            raise SlurmCommandError(["scontrol"], None, "no answer within 10 s")
        return self.avoided.get(task, ())

    def exclude(self, tasks, hosts, *, but=()):
        """Record it."""
        if list(hosts):
            self.excluded_nodes.append((list(tasks), sorted(hosts)))
        self.readmitted += [(list(tasks), host) for host in but]

    def resubmit(self, script, index, *, exclude, known):
        """Record it."""
        self.submitted.append(index)
        return "99"

    def release(self, task):
        """Do nothing."""


def words(view) -> dict[str, str]:
    """The states of a view."""
    return {name: state.state for name, state in view.items()}


def submitted(folder, **jobs: str) -> None:
    """Write the job ids of arrays: a0="70"."""
    for name, job_id in jobs.items():
        (folder / f"array-{name[1:]}.jobid").write_text(f"{job_id}\n")


def test_a_run_sees_its_own_tasks_over_all_its_arrays(tmp_path):
    """Other runs' tasks, and arrays that are not submitted yet, are no part of it."""
    submitted(tmp_path, a0="70", a1="80")
    listed = {"70_1": "RUNNING", "70_2": "RUNNING", "70_3": "PENDING", "80_0": "RUNNING"}
    client = FakeClient([TaskState(t, w, "Priority") for t, w in listed.items()])
    scheduler = of_spec(spec(tmp_path, [(0, 1), (0, 3), (1, 0), (2, 0)]), client)
    view = scheduler.poll_tasks()
    assert words(view) == {"70_1": "RUNNING", "70_3": "PENDING", "80_0": "RUNNING"}
    assert view["70_3"].reason == "Priority"
    assert client.asked == [["70", "80"]]
    assert scheduler.is_running("80_0") and not scheduler.is_running("70_3")
    assert scheduler.is_running("70_2") is False
    scheduler.cancel_pending()
    assert client.cancelled == ["70_1", "70_3", "80_0"]


def test_a_coallocated_job_is_seen_by_its_nodes(tmp_path):
    """One job of squeue's is the first slots of the run."""
    submitted(tmp_path, a0="70", a1="80")
    (tmp_path / "array-0.nodes").write_text('{"attempt": 1, "hosts": ["n1", "n2"]}')
    listed = [TaskState("70", "RUNNING", node="n2", restarts=1), TaskState("80_0", "PENDING")]
    run = spec(tmp_path, [(0, 0), (0, 1), (1, 0)], coallocate_min=True)
    client = FakeClient(listed)
    scheduler = of_spec(run, client)
    assert current_names(run) == ["70.0", "70.1", "80_0"]
    assert words(scheduler.poll_tasks()) == {
        "70.0": "NODE_FAIL",
        "70.1": "RUNNING",
        "80_0": "PENDING",
    }
    assert scheduler.is_running("70.0") is False and scheduler.is_running("70.1") is True
    scheduler.postpone_pending(30)
    assert client.postponed == [(["80_0"], 30)]


def test_a_coallocated_job_that_was_replaced_is_seen_by_the_nodes_that_it_has_now(tmp_path):
    """By its agents, and by whoever looks from outside."""
    submitted(tmp_path, a0="70")
    run = spec(tmp_path, [(0, 0), (0, 1)], coallocate_min=True)
    files = Submission(tmp_path).array(0)
    files.replaced.mkdir()
    (place,) = set(run_tasks.places(run))
    (files.replaced / f"{place.label}.1").write_text("90\n")
    files.nodes.write_text('{"attempt": 0, "hosts": ["n3", "n4"]}')
    now = TaskState("90", "RUNNING", node="n4")
    expected = {"90.0": ("NODE_FAIL", "n3"), "90.1": ("RUNNING", "n4")}
    for seen in (
        of_spec(run, FakeClient([now])).poll_tasks(),
        QueueSnapshot({"90": now}).tasks_of(run),
    ):
        assert {name: (state.state, state.node) for name, state in seen.items()} == expected


def test_nothing_is_postponed_where_nothing_waits(tmp_path):
    """Slurm is not asked to do anything for no task."""
    submitted(tmp_path, a0="70")
    client = FakeClient([TaskState("70_0", "RUNNING")])
    of_spec(spec(tmp_path, [(0, 0)]), client).postpone_pending(30)
    assert client.postponed == []


def test_a_slurm_that_does_not_answer_is_no_answer(tmp_path, caplog):
    """Nobody knows what runs, and the log says so once an outage."""
    submitted(tmp_path, a0="70")
    client = FakeClient(None)
    scheduler = of_spec(spec(tmp_path, [(0, 0)]), client)
    assert scheduler.poll_tasks() is None and scheduler.is_running("70_0") is None
    assert caplog.text.count("the scheduler does not answer") == 1
    client.states = []
    assert scheduler.poll_tasks() == {} and scheduler.is_running("70_0") is False
    client.states = None
    assert scheduler.poll_tasks() is None
    assert caplog.text.count("the scheduler does not answer") == 2


NO_LAUNCHER = {"launcher": GONE, "launcher_started": 1}


def local(folder, slots, table) -> Scheduler:
    """The tasks of a local run whose launcher has written this table."""
    write_table(Submission(folder), **table)
    return of_spec(spec(folder, slots, launcher="local"))


def test_a_local_task_runs_while_its_process_does(tmp_path):
    """Its launcher sees to one whose process is gone; those of other runs are left out."""
    submitted(tmp_path, a0="9")
    table = {
        "9_0": {"state": "RUNNING", **ME, "node": "local-0", "restarts": 2},
        "9_1": {"state": "RUNNING", "pid": GONE, "started": 1},
        "9_2": {"state": "PENDING"},
        "9_3": {"state": "RUNNING", **ME},
        "9_4": {"state": "ENDED", **ME, "exit_code": 0},
        "9_6": {"state": "RUNNING", "pid": GONE, "started": 1, **NO_LAUNCHER},
        "9_7": {"state": "PENDING", **NO_LAUNCHER},
        "9_8": {"state": "ENDED", **ME, "exit_code": -9},
    }
    scheduler = local(tmp_path, [(0, n) for n in (0, 1, 2, 4, 5, 6, 7, 8)], table)
    view = scheduler.poll_tasks()
    assert words(view) == {
        "9_0": "RUNNING", "9_1": "COMPLETING", "9_2": "PENDING", "9_4": "COMPLETED",
        "9_6": "CANCELLED", "9_7": "CANCELLED", "9_8": "FAILED",
    }  # fmt: skip
    assert (view["9_0"].node, view["9_0"].restarts) == ("local-0", 2)
    assert view["9_6"].reason == "its launcher has ended"
    assert scheduler.is_running("9_0") is True and scheduler.is_running("9_1") is False
    scheduler.cancel_pending()


def test_a_local_run_is_found_in_whichever_array_it_was_laid_out(tmp_path):
    """Runs of a sweep whose settings differ, or of a later batch, are not in the first array."""
    submitted(tmp_path, a0="9", a1="10")
    lives = {"state": "RUNNING", **ME}
    scheduler = local(tmp_path, [(1, 0)], {"9_0": lives, "10_0": lives})
    assert words(scheduler.poll_tasks()) == {"10_0": "RUNNING"}


def test_without_the_launchers_table_nobody_knows(tmp_path):
    """It is written before the first task starts; a disk error is no word on the tasks."""
    submitted(tmp_path, a0="9")
    scheduler = of_spec(spec(tmp_path, [(0, 0)], launcher="local"))
    assert scheduler.poll_tasks() is None and scheduler.is_running("9_0") is None
    (tmp_path / "local-tasks.json").write_text("{")
    assert scheduler.poll_tasks() is None


def test_tasks_that_are_to_come_back_are_helped_as_each_needs(tmp_path):
    """The hold is ended, what Slurm has ended is requeued or replaced, others are left alone."""
    run = run_of(tmp_path, "70", [(0, i) for i in range(7)])
    states = [
        TaskState("70_0", "PENDING", "BeginTime", restarts=1, starts_in_s=110.0),
        TaskState("70_1", "PENDING", "Resources", restarts=1, starts_in_s=900.0),
        TaskState("70_2", "NODE_FAIL"),
        TaskState("70_3", "NODE_FAIL"),
        TaskState("70_4", "CANCELLED"),
        TaskState("70_5", "RUNNING", preempted=True),
        TaskState("70_6", "PENDING", "BeginTime", restarts=1, starts_in_s=110.0),
    ]
    client = FakeClient(states, refuses=["70_3"])
    scheduler = Scheduler(run, run.load(), client)
    scheduler.restart_tasks([f"70_{i}" for i in range(6)] + ["70_99"])
    assert client.requeued == ["70_2"]
    assert client.submitted == [3]
    assert client.postponed == [(["70_0", "70_2"], 2)]
    assert current_names(run.load())[3] == "99_3"


def test_a_task_whose_end_nobody_has_seen_does_not_start_where_it_may_run(tmp_path):
    """Unless Slurm has seen its end; and before it is told when it may start."""
    run = run_of(tmp_path, "70", [(0, i) for i in range(4)])
    states = [
        TaskState("70_0", "PENDING", "BeginTime", restarts=1, starts_in_s=110.0),
        TaskState("70_1", "NODE_FAIL"),
        TaskState("70_2", "PREEMPTED"),
        TaskState("70_3", "NODE_FAIL"),
    ]
    client = FakeClient(states)
    client.avoided["70_3"] = ("n3",)
    scheduler = Scheduler(run, run.load(), client)
    scheduler.restart_tasks([f"70_{i}" for i in range(4)], {f"70_{i}": f"n{i}" for i in range(4)})
    assert client.excluded_nodes == [(["70_0"], ["n0"]), (["70_1"], ["n1"])]
    assert client.postponed == [([f"70_{i}" for i in range(4)], 2)]
    assert sorted(file.name for file in run.avoided.iterdir()) == ["70_0@n0", "70_1@n1"]


def test_a_task_that_can_not_be_kept_away_is_not_brought_back(tmp_path):
    """It would start where it may run still; the others come back."""
    run = run_of(tmp_path, "70", [(0, 0), (0, 1)])
    states = [
        TaskState(f"70_{i}", "PENDING", "BeginTime", restarts=1, starts_in_s=110.0)
        for i in range(2)
    ]
    client = FakeClient(states, mute=["70_0"])
    with pytest.raises(SlurmCommandError, match="no answer"):
        Scheduler(run, run.load(), client).restart_tasks(["70_0", "70_1"], {"70_0": "n0"})
    assert client.postponed == [(["70_1"], 2)]


def test_a_task_for_which_slurm_does_not_answer_costs_the_others_nothing(tmp_path):
    """They are requeued, and may start soon; the failure is told."""
    run = run_of(tmp_path, "70", [(0, i) for i in range(3)])
    client = FakeClient([TaskState(f"70_{i}", "NODE_FAIL") for i in range(3)], fails=["70_1"])
    with pytest.raises(SlurmCommandError, match="no answer"):
        Scheduler(run, run.load(), client).restart_tasks(["70_0", "70_1", "70_2"])
    assert client.requeued == ["70_0", "70_2"]
    assert client.postponed == [(["70_0", "70_2"], 2)]


def test_nothing_comes_back_to_a_run_that_has_its_result(tmp_path):
    """What Slurm has ended stays ended."""
    run = run_of(tmp_path, "70", [(0, 0)])
    run.result.write_text("{}")
    client = FakeClient([TaskState("70_0", "NODE_FAIL")])
    Scheduler(run, run.load(), client).restart_tasks(["70_0"])
    assert (client.requeued, client.submitted, client.postponed) == ([], [], [])


def test_a_coallocated_job_is_not_requeued_because_it_has_lost_a_node(tmp_path):
    """It goes on with the others, for Slurm as well; all of it comes back if all of it was lost."""
    run = run_of(tmp_path, "70", [(0, 0), (0, 1)], coallocate_min=True)
    files = Submission(tmp_path / ".hpc_elastic").array(0)
    files.nodes.write_text('{"attempt": 0, "hosts": ["n1", "n2"]}')
    client = FakeClient([TaskState("70", "RUNNING", node="n2", restarts=0)])
    scheduler = Scheduler(run, run.load(), client)
    assert words(scheduler.poll_tasks()) == {"70.0": "NODE_FAIL", "70.1": "RUNNING"}
    scheduler.restart_tasks(["70.0"])
    assert client.requeued == []
    client.states = [TaskState("70", "NODE_FAIL", restarts=0)]
    scheduler.restart_tasks(["70.0", "70.1"])
    assert (client.requeued, client.postponed) == (["70"], [(["70"], 2)])


def test_nodes_are_avoided_by_those_that_wait_and_by_those_that_come_back(tmp_path):
    """The first at once; the others find them in the run directory."""
    run = run_of(tmp_path, "70", [(0, 0), (0, 1)])
    held = TaskState("70_0", "PENDING", "BeginTime", restarts=1, starts_in_s=110.0)
    client = FakeClient([held, TaskState("70_1", "COMPLETED")])
    scheduler = Scheduler(run, run.load(), client)
    scheduler.exclude_nodes(["n3"], "CUDA error", 1e12)
    scheduler.restart_tasks(["70_0"])
    assert client.excluded_nodes == [(["70_0"], ["n3"])] * 2


def test_an_exclusion_that_has_ended_is_forgotten_by_the_run_and_by_its_tasks(tmp_path):
    """But for a task that may still run there; a repetition asks Slurm nothing.

    Whoever has excluded it, the leader or an agent on the node: the file has the time.
    """
    run = run_of(tmp_path, "70", [(0, 0), (0, 1)])
    client = FakeClient([TaskState("70_0", "PENDING"), TaskState("70_1", "PENDING")])
    scheduler = Scheduler(run, run.load(), client)
    scheduler.exclude_nodes(["n4"], "CUDA error", 1e12)
    scheduler.exclude_nodes(["n3"], "preflight: a GPU is lost", time.time() - 1.0)
    run.avoided.mkdir()
    (run.avoided / "70_1@n3").touch()
    for _ in range(2):
        scheduler.end_exclusions()
    assert client.readmitted == [(["70_0"], "n3")]
    assert set(quarantine.excluded(run)) == {"n4"}


# ---- the tasks of many runs


def test_of_somebody_else_each_job_is_asked_for_by_itself(tmp_path):
    """Of several, squeue would list the caller's own only, and a living run would seem lost."""
    runs = [
        run_of(tmp_path / str(i), "17", [(0, 0)], provenance={"user": "ada"}).load()
        for i in range(2)
    ]
    Submission(tmp_path / "1" / ".hpc_elastic").array(0).submitted_as("18")
    own = run_of(tmp_path / "own", "17", [(0, 0)]).load()
    client = FakeClient([])
    take_snapshot([*runs, own], client)
    assert client.asked == [["17"], ["17"], ["18"]]
    unknown = take_snapshot([own], FakeClient(None)).why_unknown(own)
    assert unknown.endswith("Unable to contact slurm controller")


def local_run(folder, **entry) -> RunDir:
    """A local run of one task, whose launcher has this entry in its table."""
    run = run_of(folder, "17", [(0, 0)], launcher="local")
    write_table(Submission(folder / ".hpc_elastic"), **{"17_0": entry})
    return run


@pytest.mark.parametrize(
    ("entry", "state"),
    [
        ({"state": "RUNNING", "pid": GONE}, "COMPLETING"),
        ({"state": "RUNNING", "pid": os.getpid(), "started": 1}, "COMPLETING"),
        ({"state": "RUNNING", **ME}, "RUNNING"),
        ({"state": "RUNNING", "pid": GONE, "started": 1, "launcher": GONE}, "CANCELLED"),
        ({"state": "RUNNING", "pid": GONE, "host": "elsewhere"}, "RUNNING"),
        ({"state": "PENDING", "launcher": GONE, "launcher_started": 1}, "CANCELLED"),
        ({"state": "PENDING"}, "PENDING"),
        ({"state": "PENDING", "launcher": GONE, "host": "elsewhere"}, "PENDING"),
        ({"state": "ENDED", "exit_code": 0}, "COMPLETED"),
        ({"state": "ENDED", "exit_code": None}, "CANCELLED"),
        ({"state": "ENDED", "exit_code": -9}, "FAILED"),
    ],
)
def test_what_a_local_launcher_left_behind_is_seen_through(tmp_path, entry, state):
    """It may have been killed; another process may have its pid by now."""
    run = local_run(tmp_path, **entry)
    found = take_snapshot([run.load()]).tasks_of(run.load())["17_0"]
    assert found.state == state and ("killed by" in found.reason) == (state == "FAILED")


@pytest.mark.parametrize("text", ["{", "[]", '{"17_0": 3}', '{"17_0": {"state": "RUNNING"}}'])
def test_a_table_that_is_damaged_is_told_as_such(tmp_path, text):
    """Nothing is known of the tasks then."""
    run = local_run(tmp_path, state="ENDED")
    submission = Submission(tmp_path / ".hpc_elastic")
    submission.local_tasks.write_text(text)
    if text == "[]":
        assert LocalQueue(submission).tasks(["17"]) == {}
        return
    with pytest.raises(LocalQueueError, match=r"local-tasks\.json cannot be read"):
        LocalQueue(submission).tasks(["17"])
    assert take_snapshot([run.load()]).tasks_of(run.load()) is None
    assert "local-tasks.json" in read_view(run.path).why_unknown
