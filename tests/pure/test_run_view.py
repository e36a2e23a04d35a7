"""What a run is doing, and when it has ended."""

import json
import shutil
import socket
import time
from dataclasses import replace

import pytest

from hpc_elastic.launcher.follow import (
    GONE_S,
    LIST_SHOWN_S,
    EndDecision,
    RunFollower,
    must_have_ended,
)
from hpc_elastic.report.run_view import phase_of, read_view
from hpc_elastic.run.directory import Cancellation, Entry, RunDir, Submission
from hpc_elastic.run.registry import mark_cancelled
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.scheduler import QueueSnapshot
from specs import spec_of, started_run

RUNS, ENDS = TaskState("17_0", "RUNNING"), TaskState("17_0", "COMPLETING")
WAITS = TaskState("17_0", "PENDING", "Resources")
HAS_ENDED = TaskState("17_0", "CANCELLED")


def made(folder, num_tasks: int = 1, **fields) -> RunDir:
    """A run that was submitted as job 17."""
    submission = Submission(folder / ".hpc_elastic")
    submission.path.mkdir(parents=True)
    submission.array(0).submitted_as("17")
    run = RunDir(folder / "0")
    entry = Entry("hydra", "main")
    slots = [(0, index) for index in range(num_tasks)]
    spec = spec_of("train-1", 1, num_tasks, 1, 3, entry, str(submission.path), slots, **fields)
    started_run(run, spec)
    return run


class Scheduler:
    """Says of the task what a test wants, and counts the questions."""

    def __init__(self, *states: TaskState, silent: str | None = None) -> None:
        self.states, self.silent, self.asked = states, silent, 0
        self.now = 100.0

    def __call__(self, specs) -> QueueSnapshot:
        """Return what there is."""
        self.asked += 1
        return QueueSnapshot({state.task: state for state in self.states}, self.silent)

    def clock(self) -> float:
        """Return the time."""
        return self.now


def followed(run: RunDir, slurm: Scheduler, seconds: float):
    """Look for so many seconds, five times in each; return how the run ended, or None."""
    return poll(follower_of(run, slurm), slurm, seconds)


def follower_of(run: RunDir, slurm: Scheduler, **options) -> RunFollower:
    """Return what follows the run on the clock of the scheduler."""
    return RunFollower([run.path], slurm, clock=slurm.clock, **options)


def poll(follower: RunFollower, slurm: Scheduler, seconds: float):
    """Look on for so many seconds."""
    until = slurm.now + seconds
    while slurm.now < until:
        (view,) = follower.poll()
        if view.ended is not None:
            return view
        slurm.now += 0.2
    return None


@pytest.mark.parametrize("states", [[], [HAS_ENDED]])
@pytest.mark.parametrize(
    ("is_cancelled", "status", "words"),
    [(True, "cancelled", "it was cancelled by"), (False, "lost", "without a result")],
)
def test_a_run_without_a_task_has_ended(tmp_path, states, is_cancelled, status, words):
    """After a while, for its result may be on its way; Slurm is not asked at each look."""
    run, slurm = made(tmp_path), Scheduler(*states)
    if is_cancelled:
        mark_cancelled(run, print)
    follower = follower_of(run, slurm)
    assert poll(follower, slurm, 5.0) is None
    end = poll(follower, slurm, 60.0)
    assert end is not None and (end.ended.status, end.ended.exit_code) == (status, 1)
    assert words in end.describe() and "hpc-elastic resume" in end.describe()
    assert slurm.asked <= 4
    assert read_view(run.path, slurm).describe() == end.describe()


@pytest.mark.parametrize("state", [RUNS, WAITS, ENDS])
def test_a_run_with_a_task_goes_on_even_if_it_is_cancelled(tmp_path, state):
    """It saves a checkpoint, and says so in its logs."""
    run = made(tmp_path)
    mark_cancelled(run, print)
    assert followed(run, Scheduler(state), 120.0) is None


def test_a_task_that_comes_back_is_waited_for_anew(tmp_path):
    """While it is requeued, or replaced, Slurm may list none for a moment."""
    run, slurm = made(tmp_path), Scheduler()
    follower = follower_of(run, slurm)
    assert poll(follower, slurm, 4.0) is None
    slurm.states = (WAITS,)
    assert poll(follower, slurm, 60.0) is None
    slurm.states = ()
    assert poll(follower, slurm, 60.0).ended.status == "lost"


@pytest.mark.parametrize(
    ("states", "since"),
    [
        ([RUNS, WAITS], None),
        ([HAS_ENDED, WAITS], None),
        ([ENDS], None),
        ([TaskState("17_0", "PENDING", "BeginTime")], None),
        ([HAS_ENDED], 10.0),
        ([], 10.0),
    ],
)
def test_how_long_no_task_is_left(tmp_path, states, since):
    """A task that is being ended, or requeued, is left."""
    run, decision = made(tmp_path, num_tasks=2), EndDecision()
    tasks = [replace(state, task=f"17_{i}") for i, state in enumerate(states)]
    decision.judge(read_view(run.path, Scheduler()), 10.0)
    for now, is_over in ((10.0 + GONE_S, False), (10.1 + GONE_S, since is not None)):
        view = read_view(run.path, Scheduler(*tasks))
        decision.judge(view, now)
        assert decision.since == since
        assert (decision.apply(view).ended is not None) == is_over


def test_a_run_that_is_being_requeued_is_shown_as_before(tmp_path):
    """It is in no list for a moment; a run that is lost at the first look is shown as lost."""
    run, slurm = made(tmp_path), Scheduler(RUNS)
    run.status.write_text(json.dumps({"phase": "training", "updated": time.time()}))
    follower = follower_of(run, slurm)
    assert follower.poll()[0].phase == "training"
    slurm.states = (HAS_ENDED,)
    slurm.now += LIST_SHOWN_S
    (view,) = follower.poll()
    assert (view.phase, view.ended) == ("training", None)
    (view,) = follower_of(run, slurm).poll()
    assert (view.phase, view.ended) == ("lost", None)


def test_a_result_is_believed_at_once(tmp_path):
    """Whatever Slurm says; the exit code is the run's."""
    run, slurm = made(tmp_path), Scheduler(RUNS)
    run.result.write_text(json.dumps({"status": "succeeded"}))
    assert followed(run, slurm, 0.1).ended.exit_code == 0
    run.result.write_text(json.dumps({"status": "failed"}))
    assert followed(run, slurm, 0.1).ended.exit_code == 1
    run.result.write_text("{")
    end = followed(run, slurm, 0.1)
    assert end.ended.status == "unknown" and "result.json cannot be read" in end.describe()
    assert slurm.asked == 0


def test_of_a_silent_slurm_a_cancelled_run_is_waited_for_as_long_as_it_may_take(tmp_path):
    """Others go on for all that is known."""
    run, slurm = made(tmp_path), Scheduler(silent="no answer within 30 s")
    assert followed(run, slurm, 600.0) is None
    assert "Slurm does not answer: no answer within 30 s" in read_view(run.path, slurm).describe()
    mark_cancelled(run, print)
    assert followed(run, slurm, 600.0) is None
    mark = {"user": "ada", "host": "login1", "time": time.time() - 3600}
    run.cancelled.write_text(json.dumps(mark))
    assert followed(run, slurm, 0.1).ended.status == "cancelled"


def test_that_slurm_is_silent_is_said_once(tmp_path):
    """And that it answers again."""
    run, slurm, said = made(tmp_path), Scheduler(silent="no answer"), []
    follower = follower_of(run, slurm, warn=said.append)
    assert poll(follower, slurm, 60.0) is None
    assert len(said) == 1 and "Slurm does not answer: no answer" in said[0]
    slurm.states, slurm.silent = (RUNS,), None
    assert poll(follower, slurm, 60.0) is None
    assert said[1:] == ["its tasks can be listed again"]


def test_how_long_the_tasks_of_a_cancelled_run_may_take(tmp_path):
    """Slurm's KillWait, and a margin."""
    spec = made(tmp_path, kill_wait_s=40.0).load()
    mark = Cancellation("ada", "login1", 1000.0)
    assert not must_have_ended(spec, mark, 1040.0) and must_have_ended(spec, mark, 1071.0)
    assert not must_have_ended(spec, None, 1e9)


def test_a_run_that_was_not_submitted_yet_is_waited_for(tmp_path):
    """Its script may be given to sbatch by hand, which is seen when its first task starts."""
    run, slurm = made(tmp_path), Scheduler()
    Submission(tmp_path / ".hpc_elastic").array(0).job_id_file.unlink()
    assert followed(run, slurm, 600.0) is None
    assert "not submitted yet" in read_view(run.path, slurm).describe()


def test_a_cancelled_run_is_told_from_a_lost_one(tmp_path):
    """And one that is being cancelled from both."""
    run = made(tmp_path)
    mark_cancelled(run, print)
    view = read_view(run.path, Scheduler(HAS_ENDED))
    assert view.phase == view.ended.status == "cancelled"
    assert f"on {socket.gethostname()}" in view.ended.why
    assert read_view(run.path, Scheduler(RUNS)).ended is None
    run.cancelled.unlink()
    assert read_view(run.path, Scheduler(HAS_ENDED)).phase == "lost"


def test_a_run_whose_directory_is_removed_has_ended_with_its_tasks(tmp_path):
    """Its agents end it; what was read of it before counts."""
    run, slurm = made(tmp_path), Scheduler(RUNS)
    follower = follower_of(run, slurm)
    assert poll(follower, slurm, 10.0) is None
    shutil.rmtree(run.path)
    assert poll(follower, slurm, 10.0) is None
    slurm.states = ()
    assert poll(follower, slurm, 60.0).ended.status == "lost"


@pytest.mark.parametrize("launcher", ["slurm", "local"])
def test_a_display_of_a_run_asks_slurm_seldom(tmp_path, launcher):
    """Once a minute while it trains; local tasks are in a file, which is read each second."""
    run, slurm = made(tmp_path, launcher=launcher), Scheduler(RUNS)
    follower = follower_of(run, slurm, list_s=LIST_SHOWN_S)

    def asked_in(seconds: int, **status: object) -> int:
        before = slurm.asked
        for _ in range(seconds):
            slurm.now += 1.0
            if status:
                run.status.write_text(json.dumps({"updated": slurm.now, **status}))
            follower.poll()
        return slurm.asked - before

    if launcher == "local":
        assert asked_in(60) == 60
        return
    assert asked_in(60) == 6
    assert asked_in(60, phase="waiting", nodes=0) <= 6
    assert asked_in(300, phase="training", nodes=2) <= 6
    assert asked_in(15, phase="training", nodes=1) == 1
    assert asked_in(60) >= 5


@pytest.mark.parametrize(
    ("states", "status", "described"),
    [
        (["PENDING"] * 2, None, "it waits: 2 tasks PENDING (Resources)"),
        (
            ["RUNNING", "PENDING"],
            None,
            "it is starting: 1 task RUNNING, 1 task PENDING (Resources)",
        ),
        (["RUNNING"], "training", "it is training: 1 task RUNNING"),
        (["FAILED"], None, "it is lost: its tasks have ended without a result: 1 task FAILED; "),
        ([], None, "it is lost: its tasks have ended without a result; "),
    ],
)
def test_a_run_is_described_by_its_tasks_and_its_status(tmp_path, states, status, described):
    """In one sentence, with what can be done about it."""
    run = made(tmp_path, num_tasks=2)
    if status is not None:
        run.status.write_text(json.dumps({"phase": status, "updated": time.time()}))
    tasks = [
        TaskState(f"17_{i}", state, "Resources" if state == "PENDING" else "")
        for i, state in enumerate(states)
    ]
    assert read_view(run.path, Scheduler(*tasks)).describe().startswith(described)


PENDING, RUNNING = {"17_0": WAITS}, {"17_0": RUNS, "17_1": WAITS}
OTHER = {"17_0": WAITS, "17_1": RUNS}


@pytest.mark.parametrize(
    ("states", "status", "result", "age_s", "phase"),
    [
        (PENDING, None, None, 0, "queued"),
        (PENDING, "training", None, 0, "queued"),
        (RUNNING, None, None, 0, "starting"),
        (RUNNING, "waiting", None, 0, "waiting"),
        (RUNNING, "training", None, 300, "training"),
        (OTHER, "training", None, 0, "starting"),
        (RUNNING, "training", "succeeded", 0, "succeeded"),
        ({}, "training", "failed", 300, "failed"),
        ({}, "training", None, 0, "training"),
        ({}, "training", None, 300, "training"),  # a squeue that is a cache may be as old
        ({}, "training", None, 301, "lost"),
        ({"17_0": TaskState("17_0", "FAILED")}, None, None, 0, "lost"),
        (None, "training", None, 300, "training"),
        (None, None, None, 0, "unknown"),
    ],
)
def test_the_phase_of_a_run(states, status, result, age_s, phase):
    """By its result, then the scheduler, then its leader."""
    assert phase_of(states, status or "", ["17_0"], result, age_s=age_s) == phase
