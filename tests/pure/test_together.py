"""Tasks that go back to the queue at once: few commands, whatever becomes of one of them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import pytest

from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.slurm.combined_requests import CombinedRequests
from hpc_elastic.slurm.exit_action import ExitAction
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.requeue import RETURN_DELAY_S, requeue_or_exit

NUM = 12


class Slurm:
    """A queue of one array whose tasks run, in their third attempt; it notes what it is told."""

    def __init__(self, *fails: str) -> None:
        self.told: list[tuple[str, tuple[str, ...]]] = []
        self.restarts = dict.fromkeys((f"7_{n}" for n in range(NUM)), 2)
        self.starts: dict[str, float] = {}
        self.limits: dict[str, float] = {}
        self._fails = fails
        self._lock = Lock()

    def _note(self, what: str, *tasks: str) -> None:
        with self._lock:
            self.told.append((what, tasks))
        if what in self._fails:
            raise SlurmCommandError([what], 1, "no")

    def tasks(self, job_ids):
        """Give all."""
        self._note("tasks", *job_ids)
        runs = {"state": "RUNNING", "time_left_s": 3600.0}
        return {t: TaskState(t, restarts=n, **runs) for t, n in self.restarts.items()}

    def requeue(self, task):
        """Requeue one."""
        self._note("requeue", task)
        self.restarts[task] += 1

    def requeue_all(self, tasks):
        """Requeue several."""
        self._note("requeue all", *tasks)
        for task in tasks:
            self.restarts[task] += 1

    def postpone(self, tasks, delay_s, *, time_limit_s=None):
        """Note when they start."""
        self._note("postpone", *tasks)
        self.starts |= dict.fromkeys(tasks, delay_s)
        if time_limit_s is not None:
            self.limits |= dict.fromkeys(tasks, time_limit_s)

    def count(self, *what: str) -> int:
        """How often it was told one of these."""
        return sum(said in what for said, _ in self.told)


def leave_all(folder: Path, slurm: Slurm, num: int = NUM, attempt: int = 2) -> None:
    """Let all tasks of the array depart at once."""

    def leave(number: int) -> ExitAction:
        name = f"7_{number}"
        return requeue_or_exit(
            name, CombinedRequests(folder, slurm, name, attempt), attempt=attempt
        )

    with ThreadPoolExecutor(num) as pool:
        assert set(pool.map(leave, range(num))) == {ExitAction.REQUEUE}


def test_all_that_leave_at_once_ask_and_are_requeued_together(tmp_path):
    """Each is requeued once, and starts when it is to; Slurm is told a few times."""
    slurm = Slurm()
    leave_all(tmp_path / "departing", slurm)
    assert set(slurm.restarts.values()) == {3}
    assert slurm.starts == dict.fromkeys(slurm.restarts, RETURN_DELAY_S)
    assert len(slurm.told) <= NUM


def test_what_was_agreed_on_is_removed(tmp_path):
    """However often a run is preempted, a dozen small files are left."""
    slurm = Slurm()
    for attempt in range(2, 5):
        leave_all(tmp_path / "departing", slurm, 4, attempt)
    assert len(list((tmp_path / "departing").iterdir())) <= 12


@pytest.mark.parametrize("fails", ["requeue all"])
def test_what_fails_for_all_each_does_for_itself(tmp_path, monkeypatch, fails):
    """As a task alone would."""
    monkeypatch.setattr("hpc_elastic.slurm.combined_requests._TIMEOUT_S", 1.0)
    slurm = Slurm(fails)
    leave_all(tmp_path / "departing", slurm)
    assert set(slurm.restarts.values()) == {3} and slurm.count("requeue") == NUM
    assert slurm.starts == dict.fromkeys(slurm.restarts, RETURN_DELAY_S)


def test_each_task_gets_the_time_limit_of_its_own_pool(tmp_path):
    """Those of one array have one limit; a task of another pool has its own."""
    slurm, limits = Slurm(), {"7": 3600.0, "8": 60.0, "9": None}
    names = [f"{job}_{n}" for job in limits for n in range(3)]
    slurm.restarts = dict.fromkeys(names, 2)

    def leave(name: str) -> None:
        queue = CombinedRequests(tmp_path / "departing", slurm, name, 2)
        queue.tasks(limits)
        queue.requeue(name)
        queue.postpone([name], 5.0, time_limit_s=limits[name[0]])

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(leave, names))
    assert slurm.limits == {name: limits[name[0]] for name in names if name[0] != "9"}
    assert slurm.starts == dict.fromkeys(names, 5.0) and slurm.count("requeue all") < len(names)


def test_a_wish_of_an_earlier_attempt_ends_no_later_one(tmp_path):
    """Its agent was killed over it, and Slurm has requeued the task since."""
    folder = tmp_path / "departing"
    folder.mkdir()
    (folder / "wish.7_5@1").touch()
    slurm = Slurm()
    leave_all(folder, slurm, num=1)
    assert slurm.restarts["7_0"] == 3 and slurm.restarts["7_5"] == 2


def test_the_first_task_asks_for_the_time_limits_of_all(tmp_path):
    """The others go by its answer, which ages; each that is requeued, and each later look, asks."""
    slurm = Slurm()
    tasks = [CombinedRequests(tmp_path / "departing", slurm, f"7_{n}", 2) for n in range(NUM)]
    left = [task.time_left_s() for task in tasks]
    assert slurm.count("tasks") == 1
    assert left[0] == 3600.0 and all(3500.0 < left_s < 3600.0 for left_s in left[1:])
    assert tasks[1].time_left_s() == 3600.0 and slurm.count("tasks") == 2
    slurm.restarts["7_1"] = 3
    assert CombinedRequests(tmp_path / "departing", slurm, "7_1", 3).time_left_s() == 3600.0
    assert slurm.count("tasks") == 3
    given_up = CombinedRequests(tmp_path / "other", slurm, "7_1", 2)
    assert given_up.time_left_s() is None, "the limit is that of the attempt in its place"


def test_an_answer_is_not_older_than_the_question(tmp_path):
    """What was asked before is nobody's answer."""
    slurm = Slurm()
    for _ in range(2):
        CombinedRequests(tmp_path / "departing", slurm, "7_0", 2).tasks(["7"])
    assert slurm.count("tasks") == 2


def test_a_folder_that_fails_keeps_no_task_from_the_queue(tmp_path):
    """It asks for itself."""
    (tmp_path / "departing").write_text("no folder")
    slurm = Slurm()
    leave_all(tmp_path / "departing", slurm, num=2)
    assert [slurm.restarts[f"7_{n}"] for n in range(2)] == [3, 3]
