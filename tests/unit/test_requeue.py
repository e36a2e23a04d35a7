"""How a task goes that was told to, and how it gives its node back."""

import signal

import pytest

from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.slurm import requeue
from hpc_elastic.slurm.requeue import RETURN_DELAY_S, Departure, depart, departure, give_back
from hpc_elastic.slurm.states import TaskState

DOWN = SlurmCommandError(["scontrol"], 1, "Unable to contact slurm controller")


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("RUNNING", Departure.REQUEUE),
        ("COMPLETING", Departure.EXIT),
        ("CANCELLED", Departure.EXIT),
        ("TIMEOUT", Departure.EXIT),
        ("REQUEUED", Departure.EXIT),
        (None, Departure.EXIT),
    ],
)
def test_only_a_task_that_slurm_still_calls_running_requeues_itself(state, expected):
    """Preemption's grace leaves the task RUNNING; a cancelled or expired one must not come back."""
    assert departure(state and TaskState("7_0", state)) is expected


@pytest.mark.parametrize(
    ("restarts", "attempt", "expected"),
    [
        (1, 0, Departure.REQUEUED),
        (3, 2, Departure.REQUEUED),
        (0, 0, Departure.EXIT),
        (2, 2, Departure.EXIT),
        (None, 0, Departure.EXIT),
        (1, None, Departure.EXIT),
    ],
)
def test_a_task_that_leaves_was_requeued_if_its_next_attempt_is_counted(
    restarts, attempt, expected
):
    """Slurm counts it at once; one that was cancelled leaves with the old count."""
    state = TaskState("7_0", "COMPLETING", restarts=restarts)
    assert departure(state, attempt) is expected


class Client:
    """Stands for Slurm: says one state of the task, and keeps what it was told."""

    def __init__(self, state, *fails):
        self.told = []
        self._state = state
        self._fails = fails

    def tasks(self, job_ids):
        """Return the one task."""
        return {self._state.task: self._state} if self._tell("tasks", *job_ids) else {}

    def requeue(self, task):
        """Keep it."""
        self._tell("requeue", task)

    def postpone(self, tasks, delay_s):
        """Keep it."""
        self._tell("postpone", *tasks, delay_s)

    def _tell(self, what, *about):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        if what in self._fails:
            raise DOWN
        self.told.append((what, *about))
        return True


@pytest.fixture(autouse=True)
def handler(monkeypatch):
    """Put a SIGTERM handler in place, and return it; no test waits to be killed."""
    monkeypatch.setattr(requeue.time, "sleep", lambda _: None)

    def handle(*_):
        """Be a handler."""

    before = signal.signal(signal.SIGTERM, handle)
    yield handle
    signal.signal(signal.SIGTERM, before)


def test_a_task_that_is_taken_says_when_it_may_start_again():
    """After the requeue, and before it ends: Slurm would hold it for two minutes otherwise."""
    client = Client(TaskState("7_0", "RUNNING", restarts=2))
    assert depart("7_0", client, attempt=2) is Departure.REQUEUE
    assert client.told == [
        ("tasks", "7"), ("requeue", "7_0"), ("postpone", "7_0", RETURN_DELAY_S)
    ]  # fmt: skip
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_node_of_a_larger_job_departs_as_the_job():
    """Its task name has the node's number; Slurm knows the job only."""
    client = Client(TaskState("8", "RUNNING"))
    assert depart("8.1", client) is Departure.REQUEUE


def test_a_task_that_was_requeued_by_another_starts_soon_too():
    """Once is enough for the requeue, but the last to end says when."""
    client = Client(TaskState("8", "COMPLETING", restarts=1))
    assert depart("8.1", client, attempt=0) is Departure.REQUEUED
    assert client.told == [("tasks", "8"), ("postpone", "8.1", RETURN_DELAY_S)]


def test_a_task_that_was_cancelled_is_left_alone():
    """scontrol requeue would bring it back to life."""
    client = Client(TaskState("7_0", "COMPLETING", restarts=0))
    assert depart("7_0", client, attempt=0) is Departure.EXIT
    assert give_back("7_0", client, 60, attempt=0) is Departure.EXIT
    assert {what for what, *_ in client.told} == {"tasks"}


@pytest.mark.parametrize("fails", ["tasks", "requeue"])
def test_a_task_that_can_not_requeue_itself_stays(fails):
    """Slurm requeues it, once it has killed it."""
    assert depart("7_0", Client(TaskState("7_0", "RUNNING"), fails)) is Departure.STAY


def test_a_task_that_can_not_say_when_comes_back_all_the_same():
    """Two minutes later."""
    client = Client(TaskState("7_0", "RUNNING"), "postpone")
    assert depart("7_0", client) is Departure.REQUEUE
    assert give_back("7_0", client, 60) is Departure.REQUEUE


def test_a_node_is_given_back_for_as_long_as_asked():
    """But never for less than it takes to end."""
    client = Client(TaskState("7_0", "RUNNING"))
    assert give_back("7_0", client, 600) is Departure.REQUEUE
    assert give_back("7_0", client, 1) is Departure.REQUEUE
    assert client.told[2::3] == [("postpone", "7_0", 600), ("postpone", "7_0", RETURN_DELAY_S)]


@pytest.mark.parametrize("fails", ["tasks", "requeue"])
def test_a_node_that_can_not_be_given_back_is_kept(fails, handler):
    """The process goes on, and can be terminated as before."""
    with pytest.raises(SlurmCommandError):
        give_back("7_0", Client(TaskState("7_0", "RUNNING"), fails), 60)
    assert signal.getsignal(signal.SIGTERM) is handler
