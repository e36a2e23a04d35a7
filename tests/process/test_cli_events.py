"""The command `hpc-elastic events`."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hpc_elastic.cli.main import main
from hpc_elastic.cli.report import TimelinePrinter
from hpc_elastic.run.directory import Entry, RunDir
from hpc_elastic.shared_files import write_atomic
from made_events import begun, event, group, left, node, notice, stop
from specs import spec_of, started_run

EVENTS_ARE_INCOMPLETE = True
"""Some are damaged."""

ROOT = Path(__file__).parents[2]
EVENTS = [*begun(0, 1), group(2.0, 1, 0, 1)]
END = event(62.0, "end", status="succeeded", rounds=1, restarts=0)


@pytest.fixture
def run(tmp_path) -> RunDir:
    """A run of two nodes that trains."""
    made = RunDir(tmp_path / "run")
    entry = Entry("function", "f", module="m")
    started_run(made, spec_of("r", 1, 2, 1, 0, entry, str(tmp_path), [(0, 0), (0, 1)]))
    write(made, *EVENTS)
    return made


def write(run: RunDir, *events: dict) -> None:
    """Append events, as the tasks do."""
    for e in events:
        with run.events(e["task"]).open("a") as f:
            f.write(json.dumps(e) + "\n")


def end(run: RunDir) -> None:
    """End the run."""
    write(run, END)
    write_atomic(run.result, json.dumps({"status": "succeeded"}))


def test_it_tells_the_story(run, capsys):
    """A line for each thing."""
    assert main(["events", str(run.path)]) == 0
    date, started, formed = capsys.readouterr().out.splitlines()
    assert date.endswith(":")
    assert started.endswith("the run started: its first node is node0 (task 7_0)")
    assert formed.endswith("group of 2 nodes, 2 workers, formed: node0 and node1; node0 leads")


def test_json_has_the_sentences_too(run, capsys):
    """The entries of the timeline as objects."""
    assert main(["events", str(run.path), "--json"]) == 0
    started, formed = json.loads(capsys.readouterr().out)
    assert started["kind"] == "started" and "node0" in started["sentence"]
    assert (formed["kind"], formed["nodes_after"], formed["round"]) == ("formed", 2, 1)
    assert set(formed["cost"]) >= {"saved_step", "lost_steps", "pause_s"}


def test_raw_prints_the_events_of_all_tasks(run, capsys):
    """In order of time, one a line."""
    assert main(["events", str(run.path), "--raw"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == sorted(EVENTS, key=lambda e: e["time"])


def test_a_run_that_has_not_started_says_so(run, capsys):
    """On standard error."""
    for file in (run.path / "events").glob("*"):
        file.unlink()
    assert main(["events", str(run.path)]) == 0
    assert capsys.readouterr() == ("", "no task of this run has started yet\n")


def test_json_and_raw_exclude_each_other(run, capsys):
    """Arguments that make no sense are refused."""
    assert main(["events", str(run.path), "--raw", "--json"]) == 2
    assert "not both" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    """Says what it is not."""
    assert main(["events", str(tmp_path)]) == 1
    assert "is not a run directory" in capsys.readouterr().err


@pytest.mark.parametrize("what", [[], ["--json"], ["--raw"]])
def test_it_follows_a_run_until_that_has_ended(run, what):
    """What comes is printed as it comes, the end included."""
    argv = [sys.executable, "-m", "hpc_elastic", "events", str(run.path), "--follow", *what]
    with subprocess.Popen(
        argv, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "TZ": "UTC"}
    ) as process:
        guard = threading.Timer(60, process.kill)
        guard.start()
        assert process.stdout is not None
        before = [process.stdout.readline() for _ in range(3 if not what else 2)]
        end(run)
        after = process.stdout.read().splitlines()
        guard.cancel()
    assert process.returncode == 0 and all(before)
    assert "succeeded" in after[-1]
    if not what:
        assert before[0] == "1970-01-01:\n"
        assert after == ["00:01:02 the run succeeded; it took 61 s, 1 group and 0 restarts "
                         "after failures"]  # fmt: skip
    else:
        assert all(json.loads(line) for line in [*before, *after])


def test_what_is_followed_is_told_in_order_and_when_it_is_settled(capsys):
    """Later events may belong to what has just begun; what goes on for long is told twice."""
    away = [notice(10.0, 0), notice(10.1, 1), stop(11.0, 1, "regroup", 20), left(11.0, 0),
            left(11.0, 1)]  # fmt: skip
    back = [node(95.0, 0, 1), node(96.0, 1, 1), group(99.0, 2, 10, 11)]
    printer = TimelinePrinter(as_json=False)
    printer.print(EVENTS, 3.0)
    assert capsys.readouterr().out.count("\n") == 0 and printer.has_unprinted
    printer.print([*EVENTS, *away], 13.0)
    assert capsys.readouterr().out.count("\n") == 3 and printer.has_unprinted, (
        "the date, and two lines"
    )
    printer.print([*EVENTS, *away], 20.0)
    (stood,) = capsys.readouterr().out.splitlines()
    assert "were preempted" in stood and not printer.has_unprinted
    printer.print([*EVENTS, *away, *back], 104.5)
    (again,) = capsys.readouterr().out.splitlines()
    assert "came back" in again and not printer.has_unprinted


DAMAGE = (
    b"\x00\xff garbage\n[]\n3\nnull\n" + b"[" * 10_000 + b"\n"
    b'{"v": 1, "time": NaN, "kind": "leader", "task": "7_0", "term": 1}\n'
    b'{"v": 1, "time": 1e300, "kind": "leader", "task": "7_0", "term": 1}\n'
    b'{"v": 1, "time": "x", "kind": "leader", "task": "7_0", "term": 1}\n'
    b'{"v": 1, "time": 1.7, "kind": "task", "task": "7_0"}\n'
    b'{"v": 1, "time": 1.8, "kind": "round", "task": "7_0"}\n'
    b'{"v": 1, "time": 1.8, "kind": "round", "task": "7_0", "members": 4, "number": "x"}\n'
    b'{"v": 1, "time": 1.9, "kind": "hang", "task": "7_0", "ranks": 3}\n'
)


@pytest.mark.parametrize("torn", [b"", b'{"v": 1, "time": 3.0, "kind": "sto'])
def test_damaged_events_cost_themselves_only(run, capsys, torn):
    """Whatever lies between the lines, and whether the last one was cut off."""
    assert main(["events", str(run.path)]) == 0
    before = capsys.readouterr().out
    file = run.events("7_0")
    file.write_bytes(DAMAGE + file.read_bytes() + DAMAGE + torn)
    assert main(["events", str(run.path)]) == 0
    assert capsys.readouterr().out == before
    assert main(["events", str(run.path), "--raw"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > len(before.splitlines()) and all(json.loads(line) for line in lines)
    end(run)
    for option in ([], ["--follow"], ["--json"], ["--follow", "--json"], ["--follow", "--raw"]):
        assert main(["events", str(run.path), *option]) == 0
    assert main(["status", str(run.path), "--json"]) == 0
