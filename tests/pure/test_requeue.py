"""How a task goes that was told to, and how it gives its node back."""

import errno
import signal
import threading
from pathlib import Path

import pytest

from arrays import run_of
from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.run.directory import RunDir
from hpc_elastic.slurm import requeue
from hpc_elastic.slurm.combined_requests import CombinedRequests
from hpc_elastic.slurm.exit_action import ExitAction
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.quarantine import excluded, forget_excluded, remember_excluded
from hpc_elastic.slurm.requeue import (
    PARENT_REQUEUES,
    RETURN_DELAY_S,
    predict_exit_action,
    requeue_after,
    requeue_or_exit,
)

DOWN = SlurmCommandError(["scontrol"], 1, "Unable to contact slurm controller")


DISABLED = SlurmCommandError(["scontrol"], 1, "7_0: Requested operation is presently disabled")


class Client:
    """Stands for Slurm: lists one task, and records the calls in `told`.

    What fails does so always; if it `recovers`, as often as it is named.
    """

    def __init__(self, state, *fails, error=DOWN, recovers=False):
        self.told = []
        self._state = state
        self._fails = list(fails)
        self._error = error
        self._recovers = recovers

    def tasks(self, job_ids):
        """Return the one task."""
        self._record("tasks", *job_ids)
        return {self._state.task: self._state}

    def __getattr__(self, what):
        """Return a method that records its call."""

        def record(tasks, *about, exclude=(), known=(), time_limit_s=None, but=()):
            tasks = [Path(tasks).name] if what == "resubmit" else tasks
            names = [tasks] if isinstance(tasks, str) else tasks
            extra = sorted(about[0]) if what == "exclude" else about
            limit = [] if time_limit_s is None else [time_limit_s]
            self._record(
                what, *names, *extra, *exclude, *limit, *(["but", *sorted(but)] if but else [])
            )
            return "99"

        return record

    def _record(self, what, *about):
        if threading.current_thread() is threading.main_thread():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN or what == "tasks"
        if what in self._fails:
            if self._recovers:
                self._fails.remove(what)
            raise self._error
        self.told.append((what, *about))


@pytest.fixture(autouse=True)
def handler(monkeypatch):
    """Put a SIGTERM handler in place, and return it; no test waits to be killed."""
    monkeypatch.setattr(requeue.time, "sleep", lambda _: None)  # neither between two tries

    def handle(*_):
        """Be a handler."""

    before = signal.signal(signal.SIGTERM, handle)
    yield handle
    signal.signal(signal.SIGTERM, before)


def test_a_task_that_is_taken_says_when_it_may_start_again():
    """After the requeue, and before it ends: Slurm would hold it for two minutes otherwise."""
    client = Client(TaskState("7_0", "RUNNING", restarts=2))
    assert requeue_or_exit("7_0", client, attempt=2) is ExitAction.REQUEUE
    assert client.told == [
        ("tasks", "7"), ("requeue", "7_0"), ("postpone", "7_0", RETURN_DELAY_S)
    ]  # fmt: skip
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_node_of_a_larger_job_departs_as_the_job():
    """Its task name has the node's number; Slurm knows the job only."""
    client = Client(TaskState("8", "RUNNING"))
    assert requeue_or_exit("8.1", client) is ExitAction.REQUEUE


def test_a_task_that_was_requeued_by_another_starts_soon_too():
    """Once is enough for the requeue, but the last to end says when."""
    client = Client(TaskState("8", "COMPLETING", restarts=1))
    assert requeue_or_exit("8.1", client, attempt=0) is ExitAction.REQUEUED
    assert client.told == [("tasks", "8"), ("postpone", "8.1", RETURN_DELAY_S)]


def test_a_task_that_was_cancelled_is_left_alone():
    """scontrol requeue would bring it back to life."""
    client = Client(TaskState("7_0", "COMPLETING", restarts=0))
    assert requeue_or_exit("7_0", client, attempt=0) is ExitAction.EXIT
    assert requeue_after("7_0", client, 60, attempt=0) is ExitAction.EXIT
    assert {what for what, *_ in client.told} == {"tasks"}


@pytest.mark.parametrize("fails", ["tasks", "requeue"])
def test_what_fails_is_tried_again(fails):
    """The controller may be slow just when all tasks of a run ask it."""
    client = Client(TaskState("7_0", "RUNNING"), *[fails] * 3, recovers=True)
    assert requeue_or_exit("7_0", client) is ExitAction.REQUEUE
    client = Client(TaskState("7_0", "RUNNING"), *[fails] * 3, recovers=True)
    assert requeue_after("7_0", client, 60) is ExitAction.REQUEUE


def test_a_run_directory_that_fails_is_looked_at_again(tmp_path, monkeypatch):
    """It may be away for a moment, just then."""
    run = run_of(tmp_path, "7", [(0, 0)])
    answers = iter([OSError(errno.ESTALE, "stale"), OSError(errno.EIO, "io")])

    def is_over(_):
        if error := next(answers, None):
            raise error
        return False

    monkeypatch.setattr(RunDir, "is_over", property(is_over))
    assert (
        requeue_or_exit("7_0", Client(TaskState("7_0", "RUNNING")), run=run) is ExitAction.REQUEUE
    )


@pytest.mark.parametrize("fails", ["tasks", "requeue"])
def test_a_task_that_can_not_requeue_itself_stays(fails):
    """Slurm requeues it, once it has killed it."""
    assert requeue_or_exit("7_0", Client(TaskState("7_0", "RUNNING"), fails)) is ExitAction.STAY


def test_a_task_that_can_not_say_when_comes_back_all_the_same():
    """Two minutes later."""
    client = Client(TaskState("7_0", "RUNNING"), "postpone")
    assert requeue_or_exit("7_0", client) is ExitAction.REQUEUE
    assert requeue_after("7_0", client, 60) is ExitAction.REQUEUE


def test_a_node_is_given_back_for_as_long_as_asked():
    """But never for less than it takes to end."""
    client = Client(TaskState("7_0", "RUNNING"))
    assert requeue_after("7_0", client, 600) is ExitAction.REQUEUE
    assert requeue_after("7_0", client, 1) is ExitAction.REQUEUE
    assert client.told[2::3] == [("postpone", "7_0", 600), ("postpone", "7_0", RETURN_DELAY_S)]


@pytest.mark.parametrize("fails", ["tasks", "requeue"])
def test_a_node_that_can_not_be_given_back_is_kept(fails, handler):
    """The process goes on, and can be terminated as before."""
    with pytest.raises(SlurmCommandError):
        requeue_after("7_0", Client(TaskState("7_0", "RUNNING"), fails), 60)
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_notice_can_be_understood_before_anything_is_done():
    """A cancelled task need not save; where Slurm is silent, nobody knows."""
    taken = Client(TaskState("7_0", "RUNNING", preempted=True))
    cancelled = Client(TaskState("7_0", "COMPLETING", restarts=0))
    assert predict_exit_action("7_0", taken, attempt=0) is ExitAction.REQUEUE
    assert predict_exit_action("7_0", cancelled, attempt=0) is ExitAction.EXIT
    assert predict_exit_action("7_0", Client(TaskState("7_0", "RUNNING"), "tasks")) is None
    assert taken.told == [("tasks", "7")]


def test_an_answer_from_before_this_attempt_is_no_answer():
    """A squeue that is a cache lists the task as waiting: it would end, and not come back."""
    old = Client(TaskState("7_0", "PENDING", restarts=1))
    assert predict_exit_action("7_0", old, attempt=1) is None
    assert predict_exit_action("7_0", old, attempt=0) is ExitAction.REQUEUED


def test_a_task_comes_back_on_none_of_the_nodes_that_its_run_avoids(tmp_path):
    """Whatever it leaves for; all of them together."""
    client = Client(TaskState("7_0", "RUNNING", node="n3"))
    run = run_of(tmp_path, "7", [(0, 0)])
    remember_excluded(run, ["n5", "n6"], "silent", 1e12)
    assert requeue_or_exit("7_0", client, run=run) is ExitAction.REQUEUE
    assert client.told[-1] == ("exclude", "7_0", "n5", "n6")


def test_a_task_comes_back_on_a_node_whose_exclusion_has_ended(tmp_path):
    """Also if it ran when the exclusion ended, and still avoids the node; but for a quarantine."""
    client = Client(TaskState("7_0", "RUNNING", node="n3"))
    run = run_of(tmp_path, "7", [(0, 0)])
    for host, until in (("n4", 0.0), ("n5", 1.0), ("n6", 2.0), ("n7", 1e12)):
        remember_excluded(run, [host], "silent", until)
    forget_excluded(run, 1.0)
    assert set(excluded(run)) == {"n6", "n7"}
    run.avoided.mkdir()
    (run.avoided / "7_0@n5").touch()
    assert requeue_or_exit("7_0", client, run=run) is ExitAction.REQUEUE
    assert client.told[-1] == ("exclude", "7_0", "n7", "but", "n4", "n6")
    remember_excluded(run, ["n4"], "silent again", 3.0)
    assert set(excluded(run)) == {"n4", "n6", "n7"}


def test_a_task_that_slurm_will_not_requeue_is_replaced(tmp_path):
    """Another one is submitted for its slot; without a run to record it in, it just ends."""
    run = run_of(tmp_path, "7", [(0, 0)])
    client = Client(TaskState("7_0", "RUNNING"), "requeue", error=DISABLED)
    assert requeue_or_exit("7_0", client, run=run) is ExitAction.REPLACE
    assert client.told == [("tasks", "7"), ("resubmit", "array-0.sbatch", 0), ("release", "99_0")]
    assert requeue_or_exit("7_0", client) is ExitAction.EXIT


def test_a_task_that_is_not_alone_is_replaced_too(tmp_path, monkeypatch):
    """Whose requests are combined with those of others."""
    monkeypatch.setattr("hpc_elastic.slurm.combined_requests._GATHER_S", 0.0)
    run = run_of(tmp_path, "7", [(0, 0)])
    client = Client(TaskState("7_0", "RUNNING", restarts=0), "requeue", error=DISABLED)
    combined = CombinedRequests(tmp_path / "departing", client, "7_0", None)
    assert requeue_or_exit("7_0", combined, attempt=0, run=run) is ExitAction.REPLACE
    assert client.told[-2:] == [("resubmit", "array-0.sbatch", 0), ("release", "99_0")]


def test_nothing_comes_back_to_a_run_that_has_ended(tmp_path):
    """Neither by requeue nor by replacement."""
    run = run_of(tmp_path, "7", [(0, 0)])
    run.result.write_text("{}")
    client = Client(TaskState("7_0", "RUNNING"))
    assert requeue_or_exit("7_0", client, run=run) is ExitAction.EXIT
    assert requeue_after("7_0", client, 60, run=run) is ExitAction.EXIT
    assert {what for what, *_ in client.told} == {"tasks"}


def test_a_task_can_be_given_back_from_any_thread(handler):
    """Signal handlers belong to the main thread, and are left alone."""
    client = Client(TaskState("7_0", "RUNNING"))
    thread = threading.Thread(target=requeue_after, args=("7_0", client, 60))
    thread.start()
    thread.join()
    assert client.told[-1] == ("postpone", "7_0", 60)
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_task_whose_parent_requeues_it_leaves_that_to_it(monkeypatch):
    """As in a job of submitit's, which would fail at a second requeue."""
    monkeypatch.setenv(PARENT_REQUEUES, "1")
    client = Client(TaskState("7_0", "RUNNING"))
    assert requeue_or_exit("7_0", client) is ExitAction.REQUEUE
    assert client.told == [("tasks", "7")]


@pytest.mark.parametrize(("attempt", "how"), [(1, ExitAction.REQUEUE), (2, ExitAction.EXIT)])
def test_a_task_comes_back_as_often_as_its_run_allows(tmp_path, attempt, how):
    """launcher.max_requeues, for each node's task."""
    run = run_of(tmp_path, "7", [(0, 0)], max_requeues=2)
    client = Client(TaskState("7_0", "RUNNING", restarts=attempt))
    assert requeue_or_exit("7_0", client, attempt=attempt, run=run) is how


def test_a_run_directory_that_can_not_be_read_keeps_no_task_from_coming_back(tmp_path):
    """The shared file system may be away just when the node is taken."""
    run = run_of(tmp_path, "7", [(0, 0)], max_requeues=0)
    run.spec.unlink()
    client = Client(TaskState("7_0", "RUNNING", restarts=0))
    assert requeue_or_exit("7_0", client, attempt=0, run=run) is ExitAction.REQUEUE


def test_a_task_that_filled_a_hole_returns_with_its_full_time_limit(tmp_path):
    """It would keep the short one for good; without launcher.time_min nothing is set."""
    for fields, limits in (({"time": "60", "time_min": "2"}, [3600.0]), ({}, [])):
        run = run_of(tmp_path / str(len(limits)), "7", [(0, 0)], **fields)
        client = Client(TaskState("7_0", "RUNNING", restarts=0))
        requeue_or_exit("7_0", client, attempt=0, run=run)
        assert client.told[2] == ("postpone", "7_0", RETURN_DELAY_S, *limits)
