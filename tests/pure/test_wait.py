"""Waiting: when a run has ended, how rarely the scheduler is queried, and what is reported."""

import errno
import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from hpc_elastic.config.schema import NotifySettings
from hpc_elastic.errors import HpcElasticError, RunDirectoryError, SlurmCommandError
from hpc_elastic.launcher.follow import GONE_S, LIST_S
from hpc_elastic.launcher.run_handle import RunHandle
from hpc_elastic.launcher.wait import UNREADABLE_S, Progress, Waiter, console_for, wait, wait_until
from hpc_elastic.report.run_view import RunEnd, RunReading
from hpc_elastic.run.directory import Entry, Submission
from hpc_elastic.run.notify import Notifier
from hpc_elastic.shared_files import read_json
from hpc_elastic.slurm.job_state import TaskState
from specs import spec_of, started_run

RUNNING = TaskState("7_0", "RUNNING", node="n1")
PENDING = TaskState("7_1", "PENDING", "Resources")
FAILED = TaskState("7_0", "FAILED", "NonZeroExitCode")
CANCELLED = TaskState("7_1", "CANCELLED")


class Script:
    """Jobs whose scheduler answers from a list, and the clock of the caller."""

    def __init__(self, answers):
        self.answers = list(answers)
        self.now = 0.0
        self.num_queries = 0
        self.job_ids = ["7"]

    def list_tasks(self):
        """Give the next answer; the last one is given for ever."""
        self.num_queries += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return {state.task: state for state in answer}

    def sleep(self, seconds):
        """Let time pass."""
        self.now += seconds

    def close(self):
        """All runs have ended."""


class Shown:
    """A display that keeps what it was given."""

    def __init__(self):
        self.rows, self.messages = [], []

    def show_rows(self, rows):
        """Keep the rows."""
        self.rows.append(list(rows))

    def print_message(self, text):
        """Keep the message."""
        self.messages.append(text)


@pytest.fixture
def run(tmp_path):
    """Return a run of two tasks with its directories."""
    submission = Submission(tmp_path / ".hpc_elastic")
    submission.logs.mkdir(parents=True)
    submission.array(0).submitted_as("7")
    run = RunHandle(tmp_path / "0", "lr=0.1", ("7_0", "7_1"), submission.path, None)
    create(run, (0, 0), (0, 1))
    return run


def create(run: RunHandle, *slots: tuple[int, int], least: int = 1, **fields) -> None:
    """Write run.json of a run with tasks in these arrays, at these indexes."""
    num, entry, where = len(slots), Entry("hydra", "main"), str(run.submission)
    started_run(run.paths, spec_of("train", least, num, 1, 3, entry, where, list(slots), **fields))


def waiter(script: Script, runs, shown: Shown) -> Waiter:
    """Return a waiter on the script's clock."""
    runs = [replace(run, jobs=script) for run in runs]
    clock = {"clock": lambda: script.now, "sleep": script.sleep}
    return Waiter(runs, shown, poll_interval_s=1.0, **clock)


def statuses(waiter: Waiter) -> list[str]:
    """Wait until the runs have ended, and return how."""
    *_, views = waiter.polls()
    return [view.ended.status for view in views]


def end_of(waiter: Waiter) -> RunEnd:
    """Wait until the one run has ended, and return how."""
    *_, (view,) = waiter.polls()
    return view.ended


def write(run: RunHandle, **result) -> None:
    """Write the run's result.json."""
    run.paths.result.write_text(json.dumps(result))


def write_status(run: RunHandle, **status) -> None:
    """Write the run's status.json."""
    run.paths.status.write_text(json.dumps({"phase": "training", **status}))


def test_waits_until_every_run_has_a_result(run, tmp_path):
    """One question for all runs each poll; the outcomes come in the order of the runs."""
    other = replace(run, dir=tmp_path / "1", tasks=("7_2",))
    create(other, (0, 2))
    script, shown = Script([[PENDING], [RUNNING, PENDING]]), Shown()
    watch = waiter(script, [run, other], shown)
    watch.poll_runs()
    script.sleep(LIST_S)
    watch.poll_runs()
    write(run, status="succeeded", restarts=0, results=None)
    write(other, status="failed", failure=None)
    assert statuses(watch) == ["succeeded", "failed"]
    assert script.num_queries == 2
    assert [row["state"] for row in shown.rows[-1]] == ["succeeded", "failed"]


def test_the_scheduler_is_queried_rarely_while_the_run_trains(run):
    """Often while tasks wait; once when a group has changed; again when the leader is silent."""
    script, shown = Script([[RUNNING, PENDING]]), Shown()
    watch = waiter(script, [run], shown)

    def asked_in(seconds: int, **status: object) -> int:
        before = script.num_queries
        for _ in range(seconds):
            if status:
                run.paths.status.write_text(json.dumps({"updated": script.now, **status}))
            watch.poll_runs()
            script.sleep(1.0)
        return script.num_queries - before

    assert asked_in(60) == 15
    assert asked_in(60, phase="waiting", nodes=0, joined=1) <= 7
    assert asked_in(4, phase="waiting", nodes=0, joined=2) == 1
    assert asked_in(600, phase="training", nodes=1) <= 12
    assert asked_in(4, phase="training", nodes=2) == 1
    assert asked_in(60, phase="training", nodes=2) <= 1
    assert asked_in(30) >= 6


def test_a_scheduler_that_answers_slowly_is_queried_less(run):
    """It may be busy with others' questions, too."""
    script = Script([[PENDING]])
    answer = script.list_tasks

    def slowly():
        script.sleep(3.0)
        return answer()

    script.list_tasks = slowly
    watch = waiter(script, [run], Shown())
    while script.now < 600:
        watch.poll_runs()
        script.sleep(1.0)
    assert script.num_queries == 10


def test_a_run_whose_tasks_vanish_is_given_up_after_the_grace_period(run):
    """Nobody is left who could write a result."""
    script, shown = Script([[RUNNING, PENDING], [FAILED, CANCELLED], []]), Shown()
    end = end_of(waiter(script, [run], shown))
    assert end.status == "lost" and "7_1: CANCELLED" in str(end.error)
    assert GONE_S < script.now < GONE_S + LIST_S + 2


def test_a_coallocated_job_is_one_line_of_the_queue_and_several_tasks(run):
    """All its nodes have the job's state; its batch script's log is shown beside theirs."""
    (run.submission / "logs" / "8.log").write_text("module: command not found")
    job = replace(run, dir=run.dir.with_name("1"), tasks=("8.0", "8.1", "7_0"))
    Submission(run.submission).array(1).submitted_as("8")
    create(job, (1, 0), (1, 1), (0, 0), least=2, coallocate_min=True)
    running = TaskState("8", "RUNNING", node="n[1-2]")
    script, shown = Script([[running, RUNNING], [TaskState("8", "FAILED")], []]), Shown()
    watch = waiter(script, [job], shown)
    watch.poll_runs()
    assert (shown.rows[-1][0]["state"], shown.rows[-1][0]["queue"]) == ("starting", "")
    end = end_of(watch)
    assert end.status == "lost"
    assert all(text in str(end.error) for text in ("8.1: FAILED", "7_0: RUNNING", "module:"))


def test_a_result_that_is_late_counts(run):
    """A network file system may show it after the last task has gone."""
    script, shown = Script([[]]), Shown()
    watch = waiter(script, [run], shown)
    watch.poll_runs()
    script.now += GONE_S
    watch.poll_runs()
    write(run, status="succeeded", restarts=0)
    assert end_of(watch).status == "succeeded"


@pytest.mark.parametrize(
    ("failures", "reported"),
    [
        ([SlurmCommandError(["squeue"], 1, "refused")] * 2, "Slurm does not answer, "),
        ([RunDirectoryError("table: stale"), OSError("stale")], "the tasks are unreadable, "),
    ],
)
def test_a_scheduler_that_does_not_answer_is_reported_once_and_ends_no_wait(
    run, failures, reported
):
    """Its controller may restart for minutes, or the table of a local launch be unreadable."""
    script, shown = Script([*failures, [RUNNING]]), Shown()
    watch = waiter(script, [run], shown)
    for _ in range(3):
        watch.poll_runs()
        script.sleep(LIST_S)
    first, last = shown.messages
    assert first.startswith(reported) and str(failures[0]) in first
    assert last == "the tasks of the runs can be listed again"


@pytest.mark.parametrize("name", ["status.json", "result.json"])
def test_one_failed_read_of_status_or_result_ends_no_wait(run, monkeypatch, name):
    """On NFS a file that is replaced between its opening and its reading is stale."""
    write(run, status="succeeded", restarts=0)
    stale = [OSError(errno.ESTALE, "Stale file handle")]

    def reads(path):
        if stale and path.name == name:
            raise stale.pop()
        return read_json(path)

    monkeypatch.setattr("hpc_elastic.report.run_view.read_json", reads)
    script, shown = Script([[RUNNING]]), Shown()
    assert end_of(waiter(script, [run], shown)).status == "succeeded"
    assert not stale and not shown.messages


def test_runs_that_stay_unreadable_are_waited_for_and_told_once(run, monkeypatch, tmp_path):
    """For all together, and not for a moment; a result that may be there is not given up."""
    other = replace(run, dir=tmp_path / "1", tasks=("7_2",))
    create(other, (0, 2))
    script, shown = Script([[]]), Shown()
    watch = waiter(script, [run, other], shown)

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("hpc_elastic.report.run_view.read_json", refuse)
        for _ in range(4):
            watch.poll_runs()
            script.now += UNREADABLE_S - 1
    (said,) = shown.messages
    assert said.startswith("2 of 2 runs cannot be read") and "Permission denied" in said
    for each in (run, other):
        write(each, status="succeeded", restarts=0)
    assert statuses(watch) == ["succeeded"] * 2
    assert shown.messages[1:] == ["the runs can be read again"]


def test_nodes_that_wait_beside_a_training_are_shown(run):
    """A spare, or a node that is admitted later."""
    shown = Shown()
    write_status(run, nodes=2, joined=1)
    waiter(Script([[RUNNING, PENDING]]), [run], shown).poll_runs()
    assert shown.rows[-1][0]["queue"].startswith("1 node waiting, 1 task PENDING")


@pytest.mark.parametrize(
    "name", ["phase", "nodes", "joined", "step", "total_steps", "loss", "restarts"]
)
@pytest.mark.parametrize("value", ["many", [1], {}, None])
def test_a_status_that_is_damaged_ends_no_wait(run, name, value):
    """A launcher that ended with it would end all local runs."""
    good = {"nodes": 1, "step": 3, "total_steps": 9, "steps_per_s": 1.0, "restarts": 0}
    write_status(run, **{**good, name: value})
    shown = Shown()
    watch = waiter(Script([[RUNNING]]), [run], shown)
    watch.poll_runs()
    for console in ({}, {"force_terminal": True}):
        Progress(Console(file=io.StringIO(), **console)).show_rows(shown.rows[-1])
    write(run, status="succeeded", restarts=0)
    assert end_of(watch).status == "succeeded"


def test_what_is_wrong_with_a_training_is_printed_once_when_it_happens(run):
    """It goes on: nobody would look."""
    shown = Shown()
    watch = waiter(Script([[RUNNING]]), [run], shown)
    write_status(run, warnings=["the loss is nan at step 3 (rank 0)"])
    watch.poll_runs()
    write_status(run, step=4, warnings=["the loss is nan at step 3 (rank 0)"])
    watch.poll_runs()
    assert shown.messages == ["[0] lr=0.1: the loss is nan at step 3 (rank 0)"]


def test_the_error_behind_a_restart_is_printed_once_when_it_happens(run):
    """With its host and rank; those before a run was resumed are no news, nor is a late file."""
    events = run.dir / "events"

    def write_events(*found: tuple[str, dict]) -> None:
        lines = [{"v": 1, "time": 1.0, "kind": kind, "task": "7_0", **rest} for kind, rest in found]
        with (events / "7_0.jsonl").open("a") as f:
            f.writelines(json.dumps(line) + "\n" for line in lines)

    def fails(number: int, error: str) -> tuple[str, dict]:
        return "restart", {"restarts": number, "host": "node2", "failure": error}

    script, shown = Script([[RUNNING]]), Shown()
    watch = waiter(script, [run], shown)
    write_events(fails(1, "of old"), fails(2, "of old"), ("resume", {"generation": 1}))
    write_status(run, restarts=0, max_restarts=3)
    watch.poll_runs()
    write_status(run, restarts=1, max_restarts=3)
    watch.poll_runs()
    assert shown.messages == [], "the file system does not show the event yet"
    first = "rank 1 (local rank 0) on node2, exit code 1: ValueError: boom"
    write_events(fails(1, first))
    watch.poll_runs()
    write_status(run, restarts=3, max_restarts=3)
    write_events(fails(2, "x" * 5000), fails(3, "third"))
    watch.poll_runs()
    watch.poll_runs()
    assert [len(said) < 700 for said in shown.messages] == [True] * 3
    assert shown.messages[0] == f"[0] lr=0.1: restart 1 of 3: {first}"
    assert shown.messages[2] == "[0] lr=0.1: restart 3 of 3: third"


def test_a_task_that_fails_while_others_wait_is_told_at_once(run):
    """A broken environment is seen in seconds, not when the last task has had its turn."""
    (run.submission / "logs" / "7_0.log").write_text("No module named hpc_elastic")
    script, shown = Script([[FAILED, PENDING]]), Shown()
    watch = waiter(script, [run], shown)
    watch.poll_runs()
    watch.poll_runs()
    (said,) = shown.messages
    assert "task 7_0 of lr=0.1 failed" in said and "No module named hpc_elastic" in said


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("PartitionTimeLimit", "launcher.time"),
        ("job requeued in held state", "scontrol release"),
        ("job_requeued_in_held_state", "scontrol release"),
        ("JobHeldUser", "scontrol release"),
    ],
)
def test_a_task_that_will_not_start_is_reported_once_with_the_remedy(run, reason, remedy):
    """Slurm accepts it and keeps it; other reasons to wait pass by themselves."""
    stuck = TaskState("7_1", "PENDING", reason)
    script, shown = Script([[PENDING], [RUNNING, stuck], [RUNNING, stuck]]), Shown()
    watch = waiter(script, [run], shown)
    for _ in range(3):
        watch.poll_runs()
        script.sleep(LIST_S)
    (message,) = shown.messages
    assert "7_1 of lr=0.1 will not start" in message and remedy in message


@pytest.mark.parametrize(
    ("state", "reached"),
    [("training", 3), ("nodes=2", 4), ("nodes=1", 3), ("step=7", 2), ("step=9", None)],
)
def test_a_state_is_waited_for(run, monkeypatch, state, reached):
    """What the first poll reads may be older than the wait; a run that ends first is an error."""
    polls = [
        {"phase": "training", "nodes": 2, "step": 5}, {"phase": "waiting", "nodes": 0, "step": 7},
        {"phase": "training", "nodes": 1, "step": 5}, {"phase": "training", "nodes": 2, "step": 6},
        None,
    ]  # fmt: skip
    read = []

    def views(waiter, deadline):
        for time, status in enumerate(polls):
            if status is None:
                write(run, status="failed", ended=9.0)
            else:
                write_status(run, updated=time, **status)
            read.append(RunReading.read(run.paths).view({"7_0": RUNNING}))
            yield [read[-1]]

    monkeypatch.setattr(Waiter, "polls", views)
    waited = replace(run, jobs=Script([[RUNNING]]))
    if reached is None:
        with pytest.raises(HpcElasticError, match="has not reached step=9: it has ended: failed"):
            wait_until([waited], state, console_for(io.StringIO()), 1.0, 9.0)
    else:
        (view,) = wait_until([waited], state, console_for(io.StringIO()), 1.0, 9.0)
        assert view is read[-1] and len(read) == reached


def test_a_wait_is_over_after_its_time(run):
    """With an error that says what the run is doing; the run goes on."""
    write_status(run, phase="training", nodes=1, step=5, updated=1)
    waited = [replace(run, jobs=Script([[RUNNING]]))]
    with pytest.raises(HpcElasticError, match=r"not reached nodes=2 after 0\.05 s: it is train"):
        wait_until(waited, "nodes=2", console_for(io.StringIO()), 0.01, 0.05)
    with pytest.raises(HpcElasticError, match=r"not reached ended after 0\.05 s"):
        wait(waited, poll_interval_s=0.01, timeout_s=0.05, out=io.StringIO())


def test_an_interrupt_while_results_are_printed_says_that_the_runs_have_ended(run, monkeypatch):
    """They were submitted, and no process of theirs continues."""
    write(run, status="succeeded", restarts=0)

    def interrupted(runs, ends):
        raise KeyboardInterrupt

    monkeypatch.setattr("hpc_elastic.launcher.wait.results_table", interrupted)
    with pytest.raises(KeyboardInterrupt, match="interrupted: the runs had ended; run in "):
        wait([replace(run, jobs=Script([[]]))], poll_interval_s=0.1, out=io.StringIO())


# ---- messages that no process of a run can send ------------------------------------------------


@pytest.fixture
def sent(monkeypatch):
    """The messages that are sent: event and key."""
    found: list[tuple[str, str]] = []
    send = lambda self, event, key, text, facts: found.append((event, key))  # noqa: E731
    monkeypatch.setattr(Notifier, "_send", send)
    return found


def told(run: RunHandle, tmp_path, **notify) -> RunHandle:
    """A run like it, with messages."""
    other = replace(run, dir=tmp_path / "1", tasks=("7_2",))
    create(other, (0, 2), notify=NotifySettings("true", **notify))
    return other


def test_a_run_that_is_lost_sends_that_once(run, tmp_path, sent):
    """Its tasks cannot; one that has a result has sent it."""
    ends = [[replace(FAILED, task="7_2")]]
    assert statuses(waiter(Script(ends), [told(run, tmp_path)], Shown())) == ["lost"]
    assert sent == [("lost", "end-0")]
    write(run, status="succeeded", restarts=0, results=None)
    statuses(waiter(Script([[]]), [run], Shown()))
    assert sent == [("lost", "end-0")]


def test_a_run_that_waits_for_long_sends_that_once_for_each_wait(run, tmp_path, sent):
    """A group in between begins another wait."""
    run = told(run, tmp_path, events=["waiting"], wait_s=60.0)
    script = Script([[replace(PENDING, task="7_2")]])
    watch = waiter(script, [run], Shown())
    for _ in range(5):
        watch.poll_runs()
        script.sleep(30.0)
    assert sent == [("waiting", "waiting-0")]
    script.answers = [[replace(RUNNING, task="7_2")]]
    write_status(run, round=1, updated=1.0)
    for phase, num_polls in {"training": 3, "waiting": 4}.items():
        write_status(run, round=1, updated=2.0, phase=phase)
        for _ in range(num_polls):
            watch.poll_runs()
            script.sleep(30.0)
    assert sent == [("waiting", "waiting-0"), ("waiting", "waiting-1")]


def test_the_command_of_a_run_that_others_may_write_is_not_run(run, tmp_path, sent):
    """Else it would be theirs, in the name of whoever waits."""
    run = told(run, tmp_path)
    run.dir.chmod(0o777)
    statuses(waiter(Script([[replace(FAILED, task="7_2")]]), [run], Shown()))
    assert sent == []
