"""How whoever follows a run notices that it has ended: without a result, too."""

import json
import os
import socket
import time

import pytest
from arrays import GONE, ME, write_table

from hpc_elastic.cli import status
from hpc_elastic.cli.main import main
from hpc_elastic.cli.run_view import EndDetector, doing, given_up, look
from hpc_elastic.errors import LocalQueueError, SlurmCommandError
from hpc_elastic.launcher import wait
from hpc_elastic.launcher.wait import Cancellation
from hpc_elastic.run import registry
from hpc_elastic.run.directory import Entry, RunDir, RunSpec, Submission
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.local_queue import LocalQueue
from hpc_elastic.slurm.scheduler import QueueSnapshot, take_snapshot

RUNS, ENDS = TaskState("17_0", "RUNNING"), TaskState("17_0", "COMPLETING")
WAITS = TaskState("17_0", "PENDING", "Resources")
HAS_ENDED = TaskState("17_0", "CANCELLED")


def made(folder, **fields) -> RunDir:
    """A run of one task that was submitted as job 17."""
    submission = Submission(folder / ".hpc_elastic")
    submission.path.mkdir(parents=True)
    submission.array(0).submitted_as("17")
    run = RunDir(folder / "0")
    entry = Entry("hydra", "main")
    run.create(RunSpec("train-1", 1, 1, 1, 3, entry, str(submission.path), [(0, 0)], **fields))
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
    ending = EndDetector(run, slurm, slurm.clock)
    return come(ending, slurm, seconds)


def come(ending: EndDetector, slurm: Scheduler, seconds: float):
    """Look on for so many seconds."""
    until = slurm.now + seconds
    while slurm.now < until:
        if (end := ending.come()) is not None:
            return end
        slurm.now += 0.2
    return None


@pytest.mark.parametrize("states", [[], [HAS_ENDED]])
@pytest.mark.parametrize(
    ("is_cancelled", "status", "words"),
    [(True, "cancelled", "it was cancelled by"), (False, "lost", "has left no result")],
)
def test_a_run_without_a_task_has_ended(tmp_path, states, is_cancelled, status, words):
    """After a while, for its result may be on its way; Slurm is not asked at each look."""
    run, slurm = made(tmp_path), Scheduler(*states)
    if is_cancelled:
        wait.mark(run, print)
    ending = EndDetector(run, slurm, slurm.clock)
    assert come(ending, slurm, 5.0) is None
    end = come(ending, slurm, 60.0)
    assert end is not None and (end.status, end.exit_code) == (status, 1)
    assert words in end.sentence and "hpc-elastic resume" in end.sentence
    assert slurm.asked <= 4
    assert doing(run, slurm) == end.sentence


@pytest.mark.parametrize("state", [RUNS, WAITS, ENDS])
def test_a_run_with_a_task_goes_on_even_if_it_is_cancelled(tmp_path, state):
    """It saves a checkpoint, and says so in its logs."""
    run = made(tmp_path)
    wait.mark(run, print)
    assert followed(run, Scheduler(state), 120.0) is None


def test_a_task_that_comes_back_is_waited_for_anew(tmp_path):
    """While it is requeued, or replaced, Slurm may list none for a moment."""
    run, slurm = made(tmp_path), Scheduler()
    ending = EndDetector(run, slurm, slurm.clock)
    assert come(ending, slurm, 4.0) is None
    slurm.states = (WAITS,)
    assert come(ending, slurm, 60.0) is None
    slurm.states = ()
    assert come(ending, slurm, 60.0).status == "lost"


def test_a_result_is_believed_at_once(tmp_path):
    """Whatever Slurm says; the exit code is the run's."""
    run, slurm = made(tmp_path), Scheduler(RUNS)
    run.result.write_text(json.dumps({"status": "succeeded"}))
    assert followed(run, slurm, 0.1).exit_code == 0
    run.result.write_text(json.dumps({"status": "failed"}))
    assert followed(run, slurm, 0.1).exit_code == 1
    run.result.write_text("{")
    end = followed(run, slurm, 0.1)
    assert end.status == "unknown" and "result.json can not be read" in end.sentence
    assert slurm.asked == 0


def test_of_a_silent_slurm_a_cancelled_run_is_waited_for_as_long_as_it_may_take(tmp_path):
    """Others go on for all that is known."""
    run, slurm = made(tmp_path), Scheduler(silent="no answer within 30 s")
    assert followed(run, slurm, 600.0) is None
    assert "Slurm does not answer: no answer within 30 s" in doing(run, slurm)
    wait.mark(run, print)
    assert followed(run, slurm, 600.0) is None
    mark = {"user": "ada", "host": "login1", "time": time.time() - 3600}
    run.cancelled.write_text(json.dumps(mark))
    assert followed(run, slurm, 0.1).status == "cancelled"


def test_that_slurm_is_silent_is_said_once(tmp_path):
    """And that it answers again."""
    run, slurm, said = made(tmp_path), Scheduler(silent="no answer"), []
    ending = EndDetector(run, slurm, slurm.clock, said.append)
    assert come(ending, slurm, 60.0) is None
    assert len(said) == 1 and "Slurm does not answer: no answer" in said[0]
    slurm.states, slurm.silent = (RUNS,), None
    assert come(ending, slurm, 60.0) is None
    assert said[1:] == ["its tasks can be seen again"]


def test_how_long_the_tasks_of_a_cancelled_run_may_take(tmp_path):
    """Slurm's KillWait, and a margin."""
    spec = made(tmp_path, kill_wait_s=40.0).load()
    mark = Cancellation("ada", "login1", 1000.0)
    assert not given_up(spec, mark, 1040.0) and given_up(spec, mark, 1071.0)
    assert not given_up(spec, None, 1e9)


def test_a_run_that_was_not_submitted_yet_is_waited_for(tmp_path):
    """Its script may be given to sbatch by hand, which is seen when its first task starts."""
    run, slurm = made(tmp_path), Scheduler()
    Submission(tmp_path / ".hpc_elastic").array(0).job_id_file.unlink()
    assert followed(run, slurm, 600.0) is None
    assert "not submitted yet" in doing(run, slurm)


def test_status_tells_a_cancelled_run_from_a_lost_one(tmp_path):
    """And one that is being cancelled from both."""
    run = made(tmp_path)
    wait.mark(run, print)
    facts = look(run.path, Scheduler(HAS_ENDED))
    assert facts.phase == facts.ended.status == "cancelled"
    assert f"on {socket.gethostname()}" in facts.ended.why
    assert look(run.path, Scheduler(RUNS)).ended is None
    run.cancelled.unlink()
    assert look(run.path, Scheduler(HAS_ENDED)).phase == "lost"


def test_a_watch_ends_once_the_tasks_were_gone_for_a_while(tmp_path):
    """With a result at once."""
    run = made(tmp_path)
    lost = look(run.path, Scheduler(HAS_ENDED))
    over = status._Over()
    assert not over.is_reached(_at(lost, 1000.0)) and not over.is_reached(_at(lost, 1010.0))
    assert not over.is_reached(look(run.path, Scheduler(RUNS)))
    assert not over.is_reached(_at(lost, 1011.0)) and over.is_reached(_at(lost, 1024.0))
    assert status._exit_code(lost) == 1
    run.result.write_text(json.dumps({"status": "succeeded", "ended": 1.0}))
    done = look(run.path)
    assert status._Over().is_reached(done) and status._exit_code(done) == 0


def _at(facts, now):
    """The same as it would be found at another time, of a run that ended just before 1000."""
    from dataclasses import replace

    return replace(facts, now=now, ended=replace(facts.ended, time=999.0))


# ---- runs of this machine --------------------------------------------------------------------


def local(folder, **entry) -> RunDir:
    """A local run whose launcher's table has this entry."""
    run = made(folder, launcher="local")
    write_table(Submission(folder / ".hpc_elastic"), **{"17_0": entry})
    return run


@pytest.mark.parametrize(
    ("entry", "state"),
    [
        ({"state": "RUNNING", "pid": GONE}, "COMPLETING"),
        ({"state": "RUNNING", "pid": os.getpid(), "started": 1.0}, "COMPLETING"),
        ({"state": "RUNNING", **ME}, "RUNNING"),
        ({"state": "RUNNING", "pid": GONE, "started": 1.0, "launcher": GONE}, "CANCELLED"),
        ({"state": "RUNNING", "pid": GONE, "host": "elsewhere"}, "RUNNING"),
        ({"state": "PENDING", "launcher": GONE, "launcher_started": 1.0}, "CANCELLED"),
        ({"state": "PENDING"}, "PENDING"),
        ({"state": "PENDING", "launcher": GONE, "host": "elsewhere"}, "PENDING"),
        ({"state": "ENDED", "exit_code": 0}, "COMPLETED"),
        ({"state": "ENDED", "exit_code": None}, "CANCELLED"),
        ({"state": "ENDED", "exit_code": -9}, "FAILED"),
    ],
)
def test_what_a_local_launcher_left_behind_is_seen_through(tmp_path, entry, state):
    """It may have been killed; another process may have its pid by now."""
    run = local(tmp_path, **entry)
    found = take_snapshot([run.load()]).tasks_of(run.load())["17_0"]
    assert found.state == state and ("killed by" in found.reason) == (state == "FAILED")


def test_wait_ends_though_the_launcher_was_killed(tmp_path, capsys):
    """With the exit code of a run that has no result, and its last words."""
    run = local(tmp_path, state="RUNNING", pid=GONE, launcher=GONE)
    arrays = {"runs": [{"dir": str(run.path), "tasks": ["17_0"]}], "tasks": []}
    Submission(tmp_path / ".hpc_elastic").array(0).tasks.write_text(json.dumps(arrays))
    assert main(["wait", str(run.path), "--poll-interval-s", "0.2"]) == 1
    assert "the run ended without a result" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", "[]", '{"17_0": 3}', '{"17_0": {"state": "RUNNING"}}'])
def test_a_table_that_is_damaged_is_told_as_such(tmp_path, text):
    """Nothing is known of the tasks then."""
    run = local(tmp_path, state="ENDED")
    submission = Submission(tmp_path / ".hpc_elastic")
    submission.local_tasks.write_text(text)
    if text == "[]":
        assert LocalQueue(submission).tasks(["17"]) == {}
        return
    with pytest.raises(LocalQueueError, match=r"local-tasks\.json cannot be read"):
        LocalQueue(submission).tasks(["17"])
    assert take_snapshot([run.load()]).tasks_of(run.load()) is None
    assert any("local-tasks.json" in note for note in look(run.path).notes)


class Client:
    """Remembers what it is asked."""

    def __init__(self, error: str | None = None) -> None:
        self.error, self.asked = error, []

    def tasks(self, jobs, *, once=False):
        """Return nothing."""
        self.asked.append(list(jobs))
        if self.error:
            raise SlurmCommandError(["squeue"], 1, self.error)
        return {}


def test_of_somebody_else_each_job_is_asked_for_by_itself(tmp_path):
    """Of several, squeue would list the caller's own only, and a living run would seem lost."""
    runs = [made(tmp_path / str(i), provenance={"user": "ada"}).load() for i in range(2)]
    Submission(tmp_path / "1" / ".hpc_elastic").array(0).submitted_as("18")
    own = made(tmp_path / "own").load()
    client = Client()
    take_snapshot([*runs, own], client)
    assert client.asked == [["17"], ["17"], ["18"]]
    assert take_snapshot([own], Client("out of order")).why_unknown(own).endswith("out of order")


# ---- what was meant --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["render", "train.py"], "render is now called submit --dry-run\n"),
        (["stauts"], "no such command: stauts (did you mean 'status'?)"),
        (["frobnicate"], "no such command: frobnicate\n"),
        (["status", "--wacth", "x"], "--watch"),
    ],
)
def test_a_misspelt_command_or_option_is_answered_with_the_near_one(argv, words, capsys):
    """As a wrong argument."""
    assert main(argv) == 2
    assert words in capsys.readouterr().err


def test_an_unknown_run_is_answered_with_the_near_one(tmp_path, monkeypatch, capsys):
    """And with how to list them."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    registry.add({"train-20300131-120000-abcd": made(tmp_path).path})
    assert main(["status", "train-20300131-120000-abce"]) == 1
    told = capsys.readouterr().err
    assert "(did you mean 'train-20300131-120000-abcd'?)" in told and "hpc-elastic list" in told
    assert main(["status", "lst"]) == 1
    assert "(did you mean 'last'?)" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["logs", str(tmp_path / "file")]) == 1
    assert "is no directory; give a run directory" in capsys.readouterr().err
