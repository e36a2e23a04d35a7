"""Waiting: when a run has ended, what is told of it, and what is shown meanwhile."""

import errno
import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from hpc_elastic.errors import RunDirectoryError, SlurmCommandError
from hpc_elastic.launcher import session
from hpc_elastic.launcher.session import overrides_label
from hpc_elastic.launcher.wait import (
    ASK_S,
    GRACE_S,
    UNREADABLE_S,
    LiveDisplay,
    Outcome,
    PlainDisplay,
    RunRow,
    TrackedRun,
    Waiter,
    console_for,
    fitting,
    judge,
    line_of,
    line_spacing_s,
    lost,
    places,
    read_outcome,
    results_table,
    row_of,
    tail,
    worth_a_line,
)
from hpc_elastic.shared_files import read_json
from hpc_elastic.slurm.job_state import TaskState

RUNNING = TaskState("7_0", "RUNNING", node="n1")
PENDING = TaskState("7_1", "PENDING", "Resources")
FAILED = TaskState("7_0", "FAILED", "NonZeroExitCode")
CANCELLED = TaskState("7_1", "CANCELLED")


@pytest.mark.parametrize(
    ("states", "gone_since", "verdict"),
    [
        ([RUNNING, PENDING], None, "going"),
        ([FAILED, PENDING], None, "going"),
        ([FAILED, CANCELLED], None, "gone"),
        ([], None, "gone"),
        ([], 100 - GRACE_S, "gone"),
        ([], 99 - GRACE_S, "lost"),
        ([TaskState("7_0", "COMPLETING")], 0.0, "going"),
        ([TaskState("7_0", "PENDING", "BeginTime")], 0.0, "going"),
    ],
)
def test_a_run_is_lost_when_all_its_tasks_are_gone_for_a_while(states, gone_since, verdict):
    """A requeued task will come back; a result may be on its way through the file system."""
    assert judge(states, gone_since=gone_since, now=100.0) == verdict


@pytest.fixture
def run(tmp_path):
    """Return a run of two tasks with its directories."""
    (tmp_path / "0").mkdir()
    (tmp_path / ".hpc_elastic" / "logs").mkdir(parents=True)
    return TrackedRun(tmp_path / "0", "lr=0.1", ("7_0", "7_1"), tmp_path / ".hpc_elastic")


def write(run: TrackedRun, **result) -> None:
    """Write the run's result.json."""
    run.paths.result.write_text(json.dumps(result))


def write_status(run: TrackedRun, **status) -> None:
    """Write the run's status.json."""
    run.paths.status.write_text(json.dumps({"phase": "training", **status}))


FAILURE = {
    "host": "node3",
    "task": "7_3",
    "rank": 3,
    "local_rank": 1,
    "exit_code": 1,
    "exception": "ValueError",
    "message": "no loss",
    "traceback": "Traceback (most recent call last):\nValueError: no loss",
}
VICTIM = {"host": "node1", "task": "7_1", "rank": 1, "local_rank": 0, "signal": 15}


def test_a_failed_run_shows_the_first_failure_in_full(run):
    """Host, ranks, exit code and traceback of who failed; who died of it is one line."""
    write(run, status="failed", restarts=2, failure=FAILURE, victims=[VICTIM])
    outcome = read_outcome(run)
    assert outcome and outcome.error and outcome.restarts == 2
    assert str(outcome.error).splitlines() == [
        f"the run failed: {run.dir}",
        "first failure: host node3, rank 3, local rank 1, task 7_3: exit code 1",
        "Traceback (most recent call last):",
        "ValueError: no loss",
        "  host node1, rank 1, local rank 0, task 7_1: ended by SIGTERM (died afterwards)",
        f"logs: {run.dir / 'tasks'}",
        f"      {run.submission / 'logs'}",
    ]
    assert (outcome.error.failure, outcome.error.victims) == (FAILURE, [VICTIM])


def test_a_failure_of_a_later_attempt_is_not_one_that_died_afterwards(run):
    """The same rank may have failed in each attempt; one that exited is named with the remedy."""
    how = "exited with code 0 at step 5 before its function returned"
    exited = {
        "host": "node2", "task": "7_1", "rank": 1, "local_rank": 0, "exit_code": 0, "round": 1,
        "message": how, "remedy": "return from the function",
    }  # fmt: skip
    victims = [{**VICTIM, "round": 1}, {**exited, "round": 3}]
    write(run, status="failed", restarts=2, failure=exited, victims=victims)
    outcome = read_outcome(run)
    assert outcome and str(outcome.error).splitlines()[1:5] == [
        f"first failure: host node2, rank 1, local rank 0, task 7_1: {how}",
        "return from the function",
        "  host node1, rank 1, local rank 0, task 7_1: ended by SIGTERM (died afterwards)",
        f"  host node2, rank 1, local rank 0, task 7_1: {how} (failed in a later attempt, round 3)",
    ]


def test_a_failure_without_a_traceback_still_says_what_it_was(run):
    """A worker that was killed has no exception; one that could not be started has a message."""
    failure = {"host": "n", "exception": "RendezvousTimeoutError", "message": "nobody came"}
    write(run, status="failed", failure=failure, victims=None)
    outcome = read_outcome(run)
    assert outcome and "RendezvousTimeoutError: nobody came" in str(outcome.error)


def test_return_values_are_read_by_global_rank(run):
    """The results of the last round, however many ranks it had."""
    folder = run.dir / "results" / "round-2"
    folder.mkdir(parents=True)
    for rank in (0, 1, 10):
        (folder / f"rank-{rank}.json").write_text(json.dumps({"rank": rank}))
    write(run, status="succeeded", restarts=0, results="results/round-2")
    outcome = read_outcome(run)
    assert outcome and outcome.values == {rank: {"rank": rank} for rank in (0, 1, 10)}
    assert (outcome.value, outcome.error) == ({"rank": 0}, None)


@pytest.mark.parametrize(
    "damaged", ["{", '{"status": "succeeded", "results": "results"}', '{"restarts": [1]}']
)
def test_a_run_whose_result_is_damaged_has_failed(run, damaged):
    """The others of its sweep are waited for all the same; the user learns where to look."""
    (run.dir / "results").mkdir(parents=True)
    (run.dir / "results" / "rank-0.json").write_text("{")
    run.paths.result.write_text(damaged)
    outcome = read_outcome(run)
    assert outcome and outcome.status == "failed"
    assert "result.json" in str(outcome.error) and "hpc-elastic events" in str(outcome.error)


def test_no_result_is_no_outcome(run):
    """A run without result.json has not ended, as far as its directory says."""
    assert read_outcome(run) is None


def test_a_lost_run_shows_states_and_logs(run):
    """An interpreter that does not start writes to Slurm's log only: its end is shown."""
    lines = [f"line {n}" for n in range(50)]
    (run.submission / "logs" / "7_0.log").write_text("\n".join(lines))
    text = str(lost(run, {"7_0": "FAILED (NonZeroExitCode)"}).error)
    assert "task 7_0: FAILED (NonZeroExitCode)" in text and "task 7_1: never seen" in text
    assert "line 30" in text and "line 29" not in text
    assert str(run.submission / "logs" / "7_0.log") in text


def test_a_lost_run_without_logs_says_so(run):
    """The folder is named, so that the user can look again."""
    assert f"written anything to {run.submission / 'logs'}" in str(lost(run, {}).error)


def test_the_tail_of_a_huge_log_is_cheap(run):
    """Only the end of the file is read, and bytes that are no text do not matter."""
    log = run.dir / "log"
    log.write_bytes(b"x" * 100_000 + b"\nla\xffst\n")
    assert tail(log, at_most_bytes=20).splitlines()[-1] == "la\ufffdst"
    assert tail(run.dir / "missing") == ""


class Script:
    """A scheduler that answers from a list, and the clock that its caller sees."""

    def __init__(self, answers):
        self.answers = list(answers)
        self.now = 0.0
        self.asked = 0
        self.job_ids = ["7"]

    def tasks(self):
        """Give the next answer; the last one is given for ever."""
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return {state.task: state for state in answer}

    def sleep(self, seconds):
        """Let time pass."""
        self.now += seconds


class Shown:
    """A display that keeps what it was given."""

    def __init__(self):
        self.rows, self.said = [], []

    def show(self, rows):
        """Keep the rows."""
        self.rows.append(list(rows))

    def say(self, text):
        """Keep the message."""
        self.said.append(text)


def waiter(script: Script, runs, shown: Shown) -> Waiter:
    """Return a waiter on the script's clock."""
    clock = {"clock": lambda: script.now, "sleep": script.sleep}
    return Waiter(script, runs, shown, poll_interval_s=1.0, **clock)


def test_waits_until_every_run_has_a_result(run, tmp_path):
    """One question for all runs each poll; the outcomes come in the order of the runs."""
    other = replace(run, dir=tmp_path / "1", tasks=("7_2",))
    other.dir.mkdir()
    script, shown = Script([[PENDING], [RUNNING, PENDING]]), Shown()
    watch = waiter(script, [run, other], shown)
    watch.look()
    script.sleep(ASK_S)
    write(run, status="succeeded", restarts=0, results=None)
    write(other, status="failed", failure=FAILURE)
    assert [outcome.status for outcome in watch.wait()] == ["succeeded", "failed"]
    assert script.asked == 2
    assert [row.state for row in shown.rows[-1]] == ["succeeded", "failed"]


def test_the_scheduler_is_asked_seldom_while_the_run_trains(run):
    """Often while tasks wait; once when a group has changed; again when the leader is silent."""
    script, shown = Script([[RUNNING, PENDING]]), Shown()
    watch = waiter(script, [run], shown)

    def asked_in(seconds: int, **status: object) -> int:
        before = script.asked
        for _ in range(seconds):
            if status:
                run.paths.status.write_text(json.dumps({"updated": script.now, **status}))
            watch.look()
            script.sleep(1.0)
        return script.asked - before

    assert asked_in(60) == 15
    assert asked_in(60, phase="waiting", nodes=0, joined=1) <= 7
    assert asked_in(4, phase="waiting", nodes=0, joined=2) == 1
    assert asked_in(600, phase="training", nodes=1) <= 12
    assert asked_in(4, phase="training", nodes=2) == 1
    assert asked_in(60, phase="training", nodes=2) <= 1
    assert asked_in(30) >= 6


def test_a_scheduler_that_answers_slowly_is_asked_less(run):
    """It may be busy with others' questions, too."""
    script = Script([[PENDING]])
    answer = script.tasks

    def slowly():
        script.sleep(3.0)
        return answer()

    script.tasks = slowly
    watch = waiter(script, [run], Shown())
    while script.now < 600:
        watch.look()
        script.sleep(1.0)
    assert script.asked == 10


def test_a_run_whose_tasks_vanish_is_given_up_after_the_grace_period(run):
    """Nobody is left who could write a result."""
    script, shown = Script([[RUNNING, PENDING], [FAILED, CANCELLED], []]), Shown()
    (outcome,) = waiter(script, [run], shown).wait()
    assert outcome.status == "lost" and "7_1: CANCELLED" in str(outcome.error)
    assert GRACE_S < script.now < GRACE_S + ASK_S + 2


def test_a_gang_is_one_line_of_the_queue_and_several_tasks(run):
    """All its nodes have the job's state; its batch script's log is shown beside theirs."""
    (run.submission / "logs" / "8.log").write_text("module: command not found")
    gang = replace(run, tasks=("8.0", "8.1", "7_0"))
    running = TaskState("8", "RUNNING", node="n[1-2]")
    script, shown = Script([[running, RUNNING], [TaskState("8", "FAILED")], []]), Shown()
    watch = waiter(script, [gang], shown)
    watch.look()
    assert (shown.rows[-1][0].state, shown.rows[-1][0].queue) == ("forming", "")
    (outcome,) = watch.wait()
    assert outcome.status == "lost"
    assert all(text in str(outcome.error) for text in ("8.1: FAILED", "7_0: RUNNING", "module:"))


def test_a_result_that_is_late_counts(run):
    """A network file system may show it after the last task has gone."""
    script, shown = Script([[]]), Shown()
    watch = waiter(script, [run], shown)
    watch.look()
    script.now += GRACE_S
    watch.look()
    write(run, status="succeeded", restarts=0)
    assert watch.wait()[0].status == "succeeded"


def test_silence_of_slurm_is_told_once_and_ends_no_run(run):
    """Its controller may restart for minutes; only its answers count."""
    silent = SlurmCommandError(["squeue"], 1, "connection refused")
    script, shown = Script([silent, silent, silent, [RUNNING]]), Shown()
    watch = waiter(script, [run], shown)
    for _ in range(4):
        script.now += 60
        watch.look()
    write(run, status="succeeded", restarts=0)
    watch.wait()
    assert ["connection refused" in said for said in shown.said] == [True, False]
    assert shown.said[1] == "Slurm answers again"


def test_tasks_that_can_not_be_looked_up_end_no_wait(run):
    """A table of a local launch, or the records of replacements, on a file system that is away."""
    failures = [RunDirectoryError("table: stale"), OSError("stale")]
    script, shown = Script([*failures, [RUNNING]]), Shown()
    watch = waiter(script, [run], shown)
    for _ in range(3):
        watch.look()
        script.sleep(ASK_S)
    assert shown.said == [
        "the tasks can not be looked up, the runs are not affected: table: stale",
        "the tasks can be looked up again",
    ]


@pytest.mark.parametrize("name", ["status.json", "result.json"])
def test_one_failed_read_of_status_or_result_ends_no_wait(run, monkeypatch, name):
    """On NFS a file that is replaced between its opening and its reading is stale."""
    write(run, status="succeeded", restarts=0)
    stale = [OSError(errno.ESTALE, "Stale file handle")]

    def reads(path):
        if stale and path.name == name:
            raise stale.pop()
        return read_json(path)

    monkeypatch.setattr("hpc_elastic.launcher.wait.read_json", reads)
    script, shown = Script([[RUNNING]]), Shown()
    (outcome,) = waiter(script, [run], shown).wait()
    assert outcome.status == "succeeded" and not stale and not shown.said


def test_runs_that_stay_unreadable_are_waited_for_and_told_once(run, monkeypatch, tmp_path):
    """For all together, and not for a moment; a result that may be there is not given up."""
    other = replace(run, dir=tmp_path / "1", tasks=("7_2",))
    other.dir.mkdir()
    script, shown = Script([[]]), Shown()
    watch = waiter(script, [run, other], shown)

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("hpc_elastic.launcher.wait.read_json", refuse)
        for _ in range(4):
            watch.look()
            script.now += UNREADABLE_S - 1
    (said,) = shown.said
    assert said.startswith("2 of 2 runs can not be read") and "Permission denied" in said
    for each in (run, other):
        write(each, status="succeeded", restarts=0)
    assert [outcome.status for outcome in watch.wait()] == ["succeeded"] * 2
    assert shown.said[1:] == ["the runs can be read again"]


@pytest.mark.parametrize("name", ["phase", "nodes", "step", "total_steps", "loss", "restarts"])
@pytest.mark.parametrize("value", ["many", [1], {}, None])
def test_a_status_that_is_damaged_ends_no_wait(run, name, value):
    """A launcher that ended with it would end all local runs."""
    good = {"nodes": 1, "step": 3, "total_steps": 9, "steps_per_s": 1.0, "restarts": 0}
    write_status(run, **{**good, name: value})
    shown = Shown()
    watch = waiter(Script([[RUNNING]]), [run], shown)
    watch.look()
    PlainDisplay(Console(file=io.StringIO())).show(shown.rows[-1])
    LiveDisplay(Console(file=io.StringIO())).show(shown.rows[-1])
    write(run, status="succeeded", restarts=0)
    assert watch.wait()[0].status == "succeeded"


def test_the_error_behind_a_restart_is_printed_once_when_it_happens(run):
    """With its host and rank; those before a run was resumed are no news, nor is a late file."""
    events = run.dir / "events"
    events.mkdir()

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
    watch.look()
    write_status(run, restarts=1, max_restarts=3)
    watch.look()
    assert shown.said == [], "the file system does not show the event yet"
    first = "rank 1 (local rank 0) on node2, exit code 1: ValueError: boom"
    write_events(fails(1, first))
    watch.look()
    write_status(run, restarts=3, max_restarts=3)
    write_events(fails(2, "x" * 5000), fails(3, "third"))
    watch.look()
    watch.look()
    assert [len(said) < 700 for said in shown.said] == [True] * 3
    assert shown.said[0] == f"[0] lr=0.1: restart 1 of 3: {first}"
    assert shown.said[2] == "[0] lr=0.1: restart 3 of 3: third"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_what_the_output_can_not_encode_is_escaped_and_ends_no_wait(encoding):
    """A file's name in an error may be no text; a locale other than C.UTF-8 refuses its bytes."""
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=encoding, errors="strict", write_through=True)
    PlainDisplay(console_for(stream)).say("no file a\udcff.tar \u2501")
    line = "\u2501" if encoding == "utf-8" else "\\u2501"
    assert written.getvalue().decode(encoding) == f"no file a\\udcff.tar {line}\n"


def test_a_task_that_fails_while_others_wait_is_told_at_once(run):
    """A broken environment is seen in seconds, not when the last task has had its turn."""
    (run.submission / "logs" / "7_0.log").write_text("No module named hpc_elastic")
    script, shown = Script([[FAILED, PENDING]]), Shown()
    watch = waiter(script, [run], shown)
    watch.look()
    watch.look()
    (said,) = shown.said
    assert "task 7_0 of lr=0.1 failed" in said and "No module named hpc_elastic" in said


@pytest.mark.parametrize(
    "reason", ["job requeued in held state", "job_requeued_in_held_state", "JobHeldUser"]
)
def test_a_task_that_a_user_holds_is_told_with_the_remedy(run, reason):
    """By `scontrol hold`, or by `scontrol requeuehold`."""
    shown = Shown()
    held = TaskState("7_1", "PENDING", reason)
    waiter(Script([[RUNNING, held]]), [run], shown).look()
    (said,) = shown.said
    assert "scontrol release" in said


def test_a_task_that_would_wait_for_ever_is_told_once_with_the_remedy(run):
    """Slurm takes it and keeps it; other reasons to wait pass by themselves."""
    stuck = TaskState("7_1", "PENDING", "PartitionTimeLimit")
    script, shown = Script([[PENDING], [RUNNING, stuck], [RUNNING, stuck]]), Shown()
    watch = waiter(script, [run], shown)
    for _ in range(3):
        watch.look()
        script.sleep(ASK_S)
    (said,) = shown.said
    assert "7_1 of lr=0.1 will not start" in said and "launcher.time" in said


STATUS = {
    "phase": "training",
    "nodes": 2,
    "step": 120,
    "loss": 0.123456,
    "restarts": 1,
    "max_restarts": 3,
}


def test_a_row_puts_status_and_queue_into_words(run):
    """Tasks that do not run, and why; the group as its leader sees it; how much is done."""
    status = {**STATUS, "total_steps": 480, "steps_per_s": 2.0}
    row = row_of(run, status, [RUNNING, PENDING], None, None)
    assert row.cells == {
        "run": "0", "overrides": "lr=0.1", "state": "training", "nodes": "2 of 2",
        "queue": "1 PENDING (Resources)", "progress": "━━╌╌╌╌╌╌╌╌ 25%", "step": "120",
        "loss": "0.1235", "time left": "3 min", "restarts": "1 of 3",
    }  # fmt: skip


def test_a_row_keeps_what_is_not_known_anew(run):
    """While Slurm is silent, or null stands in status.json, the table does not flicker."""
    before = row_of(run, STATUS, [RUNNING], None, None)
    assert row_of(run, None, None, None, before) == before
    assert row_of(run, {**STATUS, "loss": None}, None, None, before).loss == ""


def test_a_row_says_whether_a_run_waits_for_nodes_or_forms_its_group(run):
    """Its tasks are queued; they run and meet; and a status that no leader keeps up is old."""
    assert row_of(run, None, [PENDING], None, None).state == "queued"
    assert row_of(run, None, [RUNNING, PENDING], None, None).state == "forming"
    waiting = {"phase": "waiting", "nodes": 0}
    assert row_of(run, waiting, [RUNNING], None, None).state == "forming"
    assert row_of(run, waiting, [PENDING], None, None).state == "queued"
    training = row_of(run, STATUS, [RUNNING], None, None)
    assert row_of(run, None, [RUNNING], None, training).state == "training"


def test_a_run_that_has_ended_has_no_tasks_and_no_time_left(run):
    """Its tasks may still be listed as running for a moment: that is no news of the run."""
    status = {**STATUS, "total_steps": 120, "steps_per_s": 2.0}
    before = row_of(run, status, [RUNNING, PENDING], None, None)
    ended = Outcome(run, "succeeded", {}, 1, None)
    row = row_of(run, status, [RUNNING], ended, before)
    told = "[0] lr=0.1: succeeded, step 120 of 120 (100%), loss 0.1235, 1 of 3 restarts"
    assert line_of(row) == told


def test_plain_lines_come_on_change_only():
    """A log file gets a line when something happens, and a sign of life now and then."""
    row = RunRow("0", "lr=0.1", state="training", nodes="2 of 4", step=1, total_steps=1200)
    later = replace(row, step=2, loss="0.1", left_s=61.0)
    assert worth_a_line(row, None, since_s=0, every_s=10)
    assert not worth_a_line(row, row, since_s=99, every_s=10)
    assert not worth_a_line(later, row, since_s=1, every_s=10)
    assert worth_a_line(later, row, since_s=10, every_s=10)
    assert worth_a_line(replace(row, nodes="3 of 4"), row, since_s=0, every_s=10)
    assert line_of(later) == (
        "[0] lr=0.1: training on 2 of 4 nodes, step 2 of 1,200 (0%), loss 0.1, 61 s left"
    )


def test_lines_of_steps_come_more_seldom_as_a_run_goes_on():
    """A day in a log file is some 200 lines for each run, and no minute of its start is silent."""
    assert [line_spacing_s(age) for age in (0, 100, 1000, 86_400)] == [10, 10, 100, 600]
    at, num_lines = 0.0, 0
    while at < 86_400:
        at, num_lines = at + line_spacing_s(at), num_lines + 1
    assert 150 < num_lines < 250


def text_of(display_class, rows, **console) -> str:
    """Return what a display writes for one row shown twice."""
    out = io.StringIO()
    with display_class(Console(file=out, width=120, **console)) as display:
        display.say("[hello] [bold]world")
        display.show(rows)
        display.show(rows)
    return out.getvalue()


def test_plain_display_prints_rows_once_and_markup_as_it_is():
    """Square brackets in overrides are no markup."""
    text = text_of(PlainDisplay, [RunRow("0", "a=[1,2]")])
    assert text.splitlines() == ["[hello] [bold]world", "[0] a=[1,2]: queued"]


def test_live_display_shows_a_table_with_a_bar():
    """On a terminal the rows stand in one table, of the columns that have anything to tell."""
    row = RunRow("0", "a=[1,2]", state="training", step=5, total_steps=10, left_s=30.0)
    text = text_of(LiveDisplay, [row], force_terminal=True)
    expected = ("a=[1,2]", "training", "━━━━━╌╌╌╌╌ 50%", "30 s", "[hello]")
    assert all(told in text for told in expected)
    assert "restarts" not in text and "queue" not in text


def test_runs_that_go_on_are_shown_first_where_not_all_fit():
    """A sweep of 200 does not fit on a screen; what has ended is less interesting."""
    rows = [RunRow(str(n), "", ended=n < 3) for n in range(6)]
    assert [row.run for row in fitting(rows, 4)] == ["3", "4", "5", "0"]
    assert fitting(rows, 6) == rows


def test_results_table_shows_every_run(run):
    """Run, overrides, status, return value and restarts."""
    out = io.StringIO()
    table = results_table([Outcome(run, "succeeded", {0: 0.975}, 2, None)])
    Console(file=out, width=300).print(table)
    assert all(t in out.getvalue() for t in ("lr=0.1", "succeeded", "0.975", " 2 "))


def test_the_final_table_shows_the_beginning_of_a_long_result(run):
    """A list of a million numbers would fill the terminal for minutes."""
    out = io.StringIO()
    table = results_table([Outcome(run, "succeeded", {0: [0.5] * 1_000_000}, 0, None)])
    Console(file=out, width=300).print(table)
    assert "[0.5, 0.5" in out.getvalue() and "..." in out.getvalue()
    assert len(out.getvalue()) < 2000


def test_an_interrupt_while_results_are_printed_says_that_the_runs_have_ended(run, monkeypatch):
    """They were submitted, and nothing of them goes on."""
    write(run, status="succeeded", restarts=0)

    class Ended(Script):
        def close(self) -> None:
            """All have ended."""

    def interrupted(outcomes):
        raise KeyboardInterrupt

    monkeypatch.setattr("hpc_elastic.launcher.wait.results_table", interrupted)
    submitted = session.Submitted(Ended([[]]), [run], 0.1)
    with pytest.raises(KeyboardInterrupt, match="interrupted: the runs had ended; run in "):
        session.wait(submitted, io.StringIO())


def test_where_the_runs_lie_is_told_in_one_line(run, tmp_path):
    """As short as it can be: from where the user stands, and the table names the rest."""
    dirs = [run.dir, tmp_path / "1"]
    assert places(dirs, tmp_path, tmp_path.parent) == f"runs in {tmp_path.name}/"
    assert places(dirs[:1], tmp_path, tmp_path) == "run in 0/"
    assert places(dirs, tmp_path, tmp_path / "elsewhere") == f"runs in {tmp_path}/"


def test_runs_are_named_by_their_place_in_the_sweep(run, tmp_path):
    """hydra.sweep.subdir may have several levels; what `launch` makes is its own sweep."""
    assert replace(run, dir=tmp_path / "lr=0.1" / "seed=1").name == "lr=0.1/seed=1"
    assert replace(run, dir=tmp_path).name == tmp_path.name


def test_overrides_are_shown_as_they_were_typed():
    """Hydra's sweeper escapes what its grammar could misread; settings of ours are no label."""
    overrides = [r"nodes=1\:2", r"+text=a\,b", "launcher=slurm", "+launcher.time=5", "lr=0.1"]
    assert overrides_label(overrides) == "nodes=1:2 +text=a,b lr=0.1"
