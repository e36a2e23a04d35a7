"""launcher=local as a scheduler: tasks that go back to its queue, and start again."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from group import eventually

from arrays import GONE, write_table
from ended import is_gone
from hpc_elastic.errors import LocalQueueError
from hpc_elastic.launcher import local
from hpc_elastic.run.directory import Entry, RunDir, Submission
from hpc_elastic.slurm.exit_action import ExitAction, Reason
from hpc_elastic.slurm.job_state import Phase
from hpc_elastic.slurm.local_queue import LocalQueue, start_ticks
from hpc_elastic.slurm.requeue import requeue_after, requeue_or_exit
from hpc_elastic.slurm.scheduler import Scheduler
from specs import spec_of, started_run

DEADLINE_S = 60.0
TASK = """
import os, subprocess, sys, time
folder, plot = sys.argv[1:]
attempt = os.environ["SLURM_RESTART_COUNT"]
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
with open(f"{folder}/attempt-{attempt}", "w") as f:
    f.write(f"{os.getpid()} {child.pid} {os.environ['SLURMD_NODENAME']}\\n")
if plot == "fail":
    child.kill()
    sys.exit(1)
if plot == "die":
    os.kill(os.getpid(), 9)
time.sleep(600)
"""


class Queue:
    """A launcher's queue of one run, whose tasks do what is planned, and what others see of it."""

    def __init__(self, folder: Path, plot: str, *, num_tasks: int, places: int, **options) -> None:
        self.folder = folder
        self.run = RunDir(folder / "run")
        submission = Submission(folder / ".hpc_elastic")
        submission.logs.mkdir(parents=True)
        submission.array(0).submitted_as("7")
        entry, slots = Entry("function", "f", "f.py"), [(0, n) for n in range(num_tasks)]
        self.spec = spec_of(
            "r", 1, num_tasks, 1, 0, entry, str(submission.path), slots, launcher="local", **options
        )
        started_run(self.run, self.spec)
        tasks = [
            local.LocalTask(
                7, n, submission.array(0).tasks, self.run, cpus=1, slot=n,
                max_requeues=self.spec.settings.launcher.max_requeues,
            )
            for n in range(num_tasks)
        ]  # fmt: skip
        self.handle = local.LocalJobs(
            tasks, submission.path, max_agents=places, stop_after_s=1,
            command=lambda _: [sys.executable, "-c", TASK, str(folder), plot],
        )  # fmt: skip
        self.queue = LocalQueue(submission)
        self.scheduler = Scheduler(self.run, self.spec)
        self.handle.start()

    def attempt(self, number: int) -> tuple[int, int, str]:
        """Wait for an attempt; return its pid, its child's, and the name of its node."""
        file = self.folder / f"attempt-{number}"
        eventually(lambda: file.exists() and file.read_text().endswith("\n"), DEADLINE_S)
        pid, child, node = file.read_text().split()
        return int(pid), int(child), node

    def state(self, task: str = "7_0"):
        """How others see a task."""
        return self.queue.tasks(["7"])[task]


@pytest.fixture(autouse=True)
def handler():
    """Restore what SIGTERM does: a task that departs ignores it, and so would its children."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """Makes queues whose tasks come back without delay, and ends their processes."""
    monkeypatch.setattr(local, "RETURN_DELAY_S", 0.0)
    made = []

    def make(plot: str = "stay", *, num_tasks: int = 1, places: int = 1, **options) -> Queue:
        made.append(Queue(tmp_path, plot, num_tasks=num_tasks, places=places, **options))
        return made[-1]

    yield make
    for one in made:
        one.handle.cancel()


def test_a_task_that_goes_back_to_the_queue_starts_again(queue):
    """As its next attempt, when its time has come, on the same node; nothing of the last runs."""
    q = queue()
    pid, child, node = q.attempt(0)
    assert node == "local-0" and q.state().node == node
    assert (
        requeue_or_exit("7_0", q.queue, attempt=0, reason=Reason.ASKED, run=q.run)
        is ExitAction.REQUEUE
    )
    state = q.state()
    assert (state.phase, state.restarts) == (Phase.COMPLETING, 1)
    again = requeue_or_exit("7_0", q.queue, attempt=0, reason=Reason.ASKED, run=q.run)
    assert again is ExitAction.REQUEUED and q.state().restarts == 1
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: q.state().phase is Phase.PENDING, DEADLINE_S)
    assert q.state().is_held and 3 < q.state().starts_in_s < 10
    assert is_gone(child), "what an agent has left behind is ended"
    q.queue.postpone(["7_0"], 0.0)
    assert q.attempt(1)[2] == "local-0"
    assert (q.state().phase, q.state().restarts) == (Phase.RUNNING, 1)


def test_a_task_that_does_not_end_is_killed(queue):
    """It was to go back to the queue."""
    q = queue()
    pid, _, _ = q.attempt(0)
    assert requeue_after("7_0", q.queue, 0.0, attempt=0, run=q.run) is ExitAction.REQUEUE
    q.queue.postpone(["7_0"], 0.0)
    q.attempt(1)
    assert is_gone(pid)


def test_a_task_whose_agent_was_killed_starts_again(queue):
    """As one whose node died, though nobody is left to ask for it."""
    q = queue()
    pid, child, _ = q.attempt(0)
    os.kill(pid, signal.SIGKILL)
    q.attempt(1)
    assert is_gone(child) and q.state().restarts == 1


def test_a_task_that_is_killed_at_each_start_has_failed(queue):
    """After three times; a leader that has lost it may bring it back all the same."""
    q = queue("die")
    eventually(lambda: q.state().phase is Phase.ENDED, DEADLINE_S)
    assert (q.state().state, q.state().reason) == ("FAILED", "killed by signal 9")
    assert len(list(q.folder.glob("attempt-*"))) == 3
    q.scheduler.restart_tasks(["7_0"])
    q.attempt(3)


def test_a_task_that_has_failed_is_brought_back_by_the_leader(queue):
    """But for one whose run is over."""
    q = queue("fail")
    eventually(lambda: q.state().state == "FAILED", DEADLINE_S)
    q.scheduler.restart_tasks(["7_0", "8_0"])
    q.attempt(1)
    eventually(lambda: q.state().state == "FAILED", DEADLINE_S)
    q.run.cancelled.touch()
    q.scheduler.restart_tasks(["7_0"])
    assert q.state().state == "FAILED"


def test_a_task_comes_back_as_often_as_it_may(queue):
    """`launcher.max_requeues` holds for the launcher, the agent and the leader."""
    q = queue(max_requeues=1)
    os.kill(q.attempt(0)[0], signal.SIGKILL)
    pid, _, _ = q.attempt(1)
    assert requeue_or_exit("7_0", q.queue, attempt=1, run=q.run) is ExitAction.EXIT
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: q.state().state == "FAILED", DEADLINE_S)
    q.scheduler.restart_tasks(["7_0"])
    assert q.state().state == "FAILED"


def test_the_place_of_a_task_that_is_away_goes_to_the_next(queue):
    """The first waits for its time, then for a place."""
    q = queue(num_tasks=2)
    pid, _, _ = q.attempt(0)
    assert q.state("7_1").reason == "Resources"
    (q.folder / "attempt-0").unlink()
    q.queue.requeue("7_0")
    q.queue.postpone(["7_0"], 600)
    os.kill(pid, signal.SIGKILL)
    other, _, node = q.attempt(0)
    assert node == "local-1" and q.state("7_0").reason == "BeginTime"
    q.scheduler.postpone_pending(0.0)
    assert q.state("7_0").reason == "Resources"
    os.kill(other, signal.SIGKILL)
    eventually(lambda: q.state("7_0").phase is Phase.RUNNING, DEADLINE_S)


def test_a_task_does_not_start_on_a_node_that_its_run_avoids(queue):
    """The node is bad, and the task has no other."""
    q = queue()
    q.scheduler.exclude_nodes(["local-0"], "two strikes", 1e12)
    os.kill(q.attempt(0)[0], signal.SIGKILL)
    eventually(lambda: q.state().reason == "Excluded", DEADLINE_S)
    assert q.state().phase is Phase.PENDING
    q.run.excluded.unlink()
    q.attempt(1)


def test_no_task_of_a_cancelled_run_comes_back(queue):
    """Neither by its agent nor by the launcher."""
    q = queue()
    pid, _, _ = q.attempt(0)
    q.run.cancelled.touch()
    assert requeue_or_exit("7_0", q.queue, attempt=0, run=q.run) is ExitAction.EXIT
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: q.state().state == "CANCELLED", DEADLINE_S)


def test_a_launcher_that_ends_its_runs_is_no_preemption(queue):
    """An agent that is told to end so does not go back to the queue."""
    q = queue()
    q.attempt(0)
    ends = threading.Thread(target=q.handle.cancel)
    q.handle._stop_after_s = 60
    q.handle._reap_tasks = lambda: None  # as long as its process has not ended
    (task,) = q.handle._tasks
    task.is_ending = True
    q.handle.write_table()
    assert requeue_or_exit("7_0", q.queue, attempt=0, run=q.run) is ExitAction.EXIT
    del q.handle._reap_tasks
    ends.start()
    ends.join()
    assert q.state().phase is Phase.ENDED


def test_without_its_launcher_a_task_does_not_come_back(tmp_path, queue, monkeypatch):
    """Nobody would start it; that is no reason to wait."""
    q = queue()
    pid, _, _ = q.attempt(0)
    q.handle._stop_queue()
    made = start_ticks(pid)
    dead = {"launcher": GONE, "launcher_started": 1}
    write_table(
        Submission(tmp_path / ".hpc_elastic"),
        **{"7_0": {"state": "RUNNING", "pid": pid, "started": made, **dead}},
    )
    assert q.state().reason == "its launcher has ended"
    assert requeue_or_exit("7_0", q.queue, attempt=0, run=q.run) is ExitAction.EXIT
    with pytest.raises(LocalQueueError, match="its launcher has ended"):
        q.queue.requeue("7_0")
    assert not list((tmp_path / ".hpc_elastic" / "local-requests").iterdir())


def test_a_launcher_that_stands_still_is_not_waited_for_without_end(queue):
    """What was asked for is withdrawn, and not done later."""
    q = queue()
    q.attempt(0)
    q.handle._stop_queue()
    with pytest.raises(LocalQueueError, match=r"not answered for 0\.2 s"):
        LocalQueue(Submission(q.folder / ".hpc_elastic"), timeout_s=0.2).requeue("7_0")
    q.handle.run_queue_once()
    assert q.state().phase is Phase.RUNNING


def test_what_is_no_request_of_its_own_is_left_alone(queue):
    """Another launcher of the same sweep may carry it out; a damaged one does no harm."""
    q = queue()
    q.attempt(0)
    folder = q.folder / ".hpc_elastic" / "local-requests"
    folder.mkdir()
    (folder / "1.json").write_text(json.dumps({"do": "requeue", "task": "8_0", "restarts": 0}))
    (folder / "2.json").write_text("{")
    (folder / "3.json").write_text('["requeue"]')
    q.queue.postpone(["7_0"], 1.0)
    assert sorted(file.name for file in folder.iterdir()) == ["1.json", "2.json", "3.json"]
