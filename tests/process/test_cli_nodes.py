"""``hpc-elastic node preempt`` and ``kill``: which node is meant, and what is refused."""

import json
from dataclasses import replace

import pytest

from arrays import GONE, run_of, write_table
from ended import sleeping
from hpc_elastic.cli import control
from hpc_elastic.cli.main import main
from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.run import events
from hpc_elastic.run.directory import Submission
from hpc_elastic.run.events import EventLog, read_events
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.local_queue import start_ticks
from hpc_elastic.slurm.scheduler import Scheduler

EVENTS_ARE_INCOMPLETE = True
"""They are written by the tests, which need only some of their fields."""


@pytest.fixture
def lives(tmp_path):
    """The entry of a task that runs, with a process that stands for its agent."""
    with sleeping(Submission(tmp_path / ".hpc_elastic").array(0).tasks) as process:
        yield {"state": "RUNNING", "pid": process.pid, "started": start_ticks(process.pid)}


@pytest.fixture
def run(tmp_path, lives):
    """A local run with two nodes, of three, whose processes are one and the same."""
    made = run_of(tmp_path, "7", [(0, 0), (0, 1), (0, 2)], launcher="local")
    tasks = {
        "7_0": {**lives, "node": "local-0"}, "7_1": {**lives, "node": "local-1", "restarts": 2},
        "7_2": {"state": "PENDING", "node": "local-2"},
    }  # fmt: skip
    write_table(Submission(tmp_path / ".hpc_elastic"), **tasks)
    return made


def refusal(run, node, capsys) -> str:
    """Return why neither command takes a node."""
    assert main(["node", "kill", str(run.path), node]) == 1
    killed = capsys.readouterr().err
    assert main(["node", "preempt", str(run.path), node]) == 1
    assert capsys.readouterr().err == killed
    assert not list(run.notices.iterdir()) and not read_events(run.event_logs)
    return killed


def test_an_unknown_node_lists_those_that_there_are(run, capsys):
    """With what may have been meant; a task that waits has none."""
    text = refusal(run, "local-11", capsys)
    assert "did you mean 'local-1'" in text
    assert "its nodes: local-0 (task 7_0), local-1 (task 7_1)" in text
    assert "task 7_2 has no node: it is PENDING" in refusal(run, "7_2", capsys)


def test_a_sweep_that_was_moved_meanwhile_is_not_taken_for_lost(run, tmp_path, capsys):
    """Its processes go on, and nobody sees them from where it is now: nothing says otherwise."""
    moved = tmp_path.with_name(f"{tmp_path.name}-moved")
    run.status.write_text('{"phase": "training", "updated": 1}')
    tmp_path.rename(moved)
    there = str(moved / run.path.name)
    assert main(["status", there, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["phase"] == "training" and "does not exist" in told["notes"][0]
    for command in (["cancel", "--yes"], ["node", "kill"], ["node", "preempt"]):
        node = [] if command[0] == "cancel" else ["local-0"]
        assert main([*command, there, *node]) == 1
        assert "move it back" in capsys.readouterr().err


def test_a_run_without_nodes_has_none_to_take(run, tmp_path, capsys):
    """It waits, was cancelled, or has ended."""
    write_table(Submission(tmp_path / ".hpc_elastic"), **{"7_0": {"state": "PENDING"}})
    assert "has no node now; pending tasks: 1" in refusal(run, "local-0", capsys)
    run.cancelled.write_text(json.dumps({"user": "ada", "host": "login1", "time": 0}))
    assert "was cancelled by ada" in refusal(run, "local-0", capsys)
    run.result.write_text('{"status": "succeeded"}')
    assert "has ended (succeeded)" in refusal(run, "local-0", capsys)


@pytest.mark.parametrize("name", ["local-1", "7_1"])
def test_a_node_that_leaves_is_told_of(run, name, monkeypatch, capsys):
    """By its name or its task's; the notice names the task, and holds the seconds."""

    def leave(node, is_gone, wait_s):
        assert (node.run.notices / "7_1").read_text() == "12\n" and wait_s == 42
        EventLog(run.events("7_0"), "7_0").write("round_stopped", step=9)
        EventLog(run.events("7_1"), "7_1").write("task_exited", reason="asked", how="requeue")
        assert is_gone()
        return 3.0

    monkeypatch.setattr(control.NamedNode, "wait_until", leave)
    assert main(["node", "preempt", str(run.path), name, "--grace-s", "12"]) == 0
    out = capsys.readouterr().out
    assert "preempting local-1 (task 7_1, attempt 2): it has 12 s" in out
    assert "left after 3.0 s; all ranks saved step 9; its task starts again" in out
    (event,) = [e for e in read_events(run.event_logs) if e["kind"] == "preempt"]
    assert (event["host"], event["node_task"], event["grace_s"]) == ("local-1", "7_1", 12)


def test_a_notice_that_nobody_takes_is_withdrawn(run, capsys):
    """No leader is there; the exit code says that the node is."""
    assert main(["node", "preempt", str(run.path), "local-0", "--wait-s", "0", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["left"], told["after_s"], told["comes_back"]) == (False, None, None)
    assert not list(run.notices.iterdir())


def test_a_node_that_does_not_go_is_told_of(run, monkeypatch, capsys):
    """And the processes that are killed are those of its task."""
    killed = []
    monkeypatch.setattr(Scheduler, "kill_task", lambda self, task: killed.append(task))
    assert main(["node", "kill", str(run.path), "local-1", "--wait-s", "0"]) == 1
    assert killed == ["7_1"] and "local-1 is still there after 0 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("other", "brought"), [("RUNNING", []), ("COMPLETING", ["7_1"]), ("FAILED", ["7_1", "7_0"])]
)
def test_tasks_that_leave_no_leader_are_brought_back_by_the_command(
    run, monkeypatch, capsys, other, brought
):
    """Two nodes may be killed at the same time: then nobody of the run is left to do so."""
    found = control.find_node(run.path, "local-1")
    back: list[str] = []
    monkeypatch.setattr(Scheduler, "kill_task", lambda self, task: None)
    monkeypatch.setattr(Scheduler, "restart_tasks", lambda self, tasks: back.extend(tasks))
    after = {"7_0": other, "7_1": "FAILED", "7_2": "PENDING"}
    states = {task: TaskState(task, state, restarts=2) for task, state in after.items()}
    monkeypatch.setattr(control, "_states", lambda spec: states)
    assert control.kill(found, 5.0, as_json=False) == 0
    assert back == brought
    assert "its task starts again as soon as a node is free" in capsys.readouterr().out


def test_a_task_that_may_not_be_requeued_is_said_not_to_come_back(run, monkeypatch, capsys):
    """It has been in the queue twice already."""
    settings = run.load().settings
    settings = replace(settings, launcher=replace(settings.launcher, max_requeues=2))
    found = control.find_node(run.path, "local-1")
    found = replace(found, spec=replace(found.spec, settings=settings))
    monkeypatch.setattr(Scheduler, "kill_task", lambda self, task: None)
    monkeypatch.setattr(control.NamedNode, "wait_until", lambda *_: 0.5)
    assert control.kill(found, 5.0, as_json=False) == 0
    assert "its task is not restarted: launcher.max_requeues=2" in capsys.readouterr().out
    run.result.write_text('{"status": "succeeded"}')
    assert control.kill(found, 5.0, as_json=False) == 0
    assert "its task is not restarted: the run has ended" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "task", "says"),
    [
        ({}, {"state": "PENDING", "restarts": 1}, "starts again as soon as a node is free"),
        ({"max_requeues": 0}, {"state": "ENDED", "exit_code": -9}, "max_requeues=0"),
        ({}, {"state": "RUNNING", "launcher": GONE}, "its launcher has ended"),
    ],
)
def test_a_killed_node_that_does_not_come_back_is_told_of(
    fields, task, says, tmp_path, lives, monkeypatch, capsys
):
    """Nothing starts its task again where that may not go back, or has no launcher any more."""
    run = run_of(tmp_path, "7", [(0, 0), (0, 1)], launcher="local", **fields)
    submission = Submission(tmp_path / ".hpc_elastic")
    write_table(submission, **{"7_0": {**lives, "node": "local-0"}, "7_1": lives})

    def kill(self, name):
        write_table(submission, **{"7_0": {"node": "local-0", **task}, "7_1": lives})

    monkeypatch.setattr(Scheduler, "kill_task", kill)
    assert main(["node", "kill", str(run.path), "local-0"]) == 0
    assert says in capsys.readouterr().out


def test_a_node_of_a_coallocated_job_is_not_killed(run, capsys):
    """Slurm would kill all of them. Nothing is said to be killed, nor written down so."""
    with pytest.raises(RunDirectoryError, match=r"7\.1 is a node of a co-allocated job"):
        Scheduler(run, run.load()).kill_task("7.1")
    found = replace(control.find_node(run.path, "local-1"), task="7.1")
    with pytest.raises(RunDirectoryError, match=r"7\.1 is a node of a co-allocated job"):
        control.kill(found, 5.0, as_json=False)
    assert capsys.readouterr().out == "" and not read_events(run.event_logs)


def test_nodes_are_completed_from_the_group(run):
    """As status.json has them."""
    run.status.write_text(json.dumps({"members": [{"host": "local-0"}, {"host": "node3"}]}))

    class Context:
        params = {"run": str(run.path)}  # noqa: RUF012

    found = control.NodeName().shell_complete(Context(), None, "lo")
    assert [item.value for item in found] == ["local-0"]


@pytest.mark.parametrize(("command", "num_parsed"), [("kill", 0), ("preempt", 3)])
def test_a_command_reads_no_history(run, monkeypatch, capsys, command, num_parsed):
    """A node is found in the queue; of the events only those that follow the command are parsed."""
    log, parsed = EventLog(run.events("7_0"), "7_0"), []
    log.append([log.line("task_exited", reason="asked", how="exit") for _ in range(1000)])
    parse = events._parsed
    monkeypatch.setattr(events, "_parsed", lambda line: parsed.append(line) or parse(line))

    def leave(node, is_gone, wait_s):
        EventLog(run.events("7_0"), "7_0").write("round_stopped", step=9)
        EventLog(run.events("7_1"), "7_1").write("task_exited", reason="asked", how="requeue")
        return 3.0

    monkeypatch.setattr(control.NamedNode, "wait_until", leave)
    monkeypatch.setattr(Scheduler, "kill_task", lambda self, task: None)
    assert main(["node", command, str(run.path), "local-1"]) == 0
    assert len(parsed) == num_parsed and "local-1" in capsys.readouterr().out
