"""The benchmark of looking after runs: the run that it makes up, and what it makes of moments."""

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from evidence.result import Peer
from operate import commands
from operate.big_run import History, Plan, task, write
from operate.hang import Moments, moments

from hpc_elastic.cli.main import main
from hpc_elastic.run.events import KINDS

pytestmark = pytest.mark.long

PLAN = Plan(num_nodes=4, days=0.1, num_faults=8)
START = 1_900_000_000.0


@pytest.fixture
def history() -> History:
    """A small run."""
    return History(PLAN, START)


def test_made_up_events_are_of_the_schema(history):
    """Every kind is known, and has the fields that it must have."""
    for event in history.events:
        kind = KINDS[event["kind"]]
        needed = {field.name for field in kind.fields if not field.optional}
        assert needed <= set(event), event


def test_made_up_run_has_its_faults(history):
    """Half are preemptions, a quarter deaths, a quarter failures; lost nodes come back."""
    kinds = Counter(event["kind"] for event in history.events)
    assert (kinds["preemption_notice"], kinds["node_lost"], kinds["restart"]) == (4, 2, 2)
    sizes = [len(r.members) for r in history.rounds]
    assert sizes[0] == sizes[-1] == 4 and sizes.count(3) == 6
    assert kinds["round"] == len(history.rounds) == 1 + 8 + 6
    assert history.rounds[-1].time < history.end == START + 8640


def test_commands_understand_the_made_up_run(tmp_path, monkeypatch, capsys):
    """Its events, its output and its end are shown; the user's list has it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", "")  # no Slurm is asked
    run = write(tmp_path / "sweep", PLAN, START + 8640)
    said = {}
    for name, *options in (["events", "--json"], ["status", "--json"], ["logs", "--tail", "3"]):
        assert main([name, str(run.path), *options]) == 0
        said[name] = capsys.readouterr().out
    kinds = Counter(entry["kind"] for entry in json.loads(said["events"]))
    assert (kinds["formed"], kinds["shrank"], kinds["grew"], kinds["restarted"]) == (1, 6, 6, 2)
    status = json.loads(said["status"])
    assert (status["phase"], status["restarts"], status["goodput"] > 0.9) == ("succeeded", 2, True)
    assert len(said["logs"].splitlines()) == 3
    assert main(["list"]) == 0
    assert "succeeded" in capsys.readouterr().out


def test_hang_is_told_by_the_runs_directory(tmp_path):
    """The last stack counts, and the leader's event."""
    attempt = tmp_path / "tasks" / "7_0" / "attempt-0"
    attempt.mkdir(parents=True)
    (tmp_path / "events").mkdir()
    hang = {
        "v": 1, "time": 104.5, "kind": "hang", "task": "7_0", "stalled_s": 2.0,
        "ranks": [{"rank": 1, "host": "node1"}], "others": "", "shared": False,
    }  # fmt: skip
    (tmp_path / "events" / "7_0.jsonl").write_text(json.dumps(hang) + "\n")
    for rank, time in enumerate((103.0, 104.0)):
        file = attempt / f"round-1.rank-{rank}.stack.txt"
        file.write_text("")
        os.utime(file, (time, time))
    assert moments(tmp_path, 100.0, 106.0) == Moments(4.0, 4.5, 6.0)


def test_commands_are_held_against_the_import_of_torch():
    """Those that are given again and again; by their medians."""
    taken = {f"hpc-elastic {what}": [0.5, 1.0, 9.0] for what in commands.AT_ONCE}
    taken["hpc-elastic status"] = [3.0]
    found = commands.targets({**taken, commands.TORCH: [2.0, 2.0]})
    assert [t.met for t in found] == [False, True, True, True]


def test_peer_that_does_not_work_here_is_named(tmp_path):
    """With its own words, instead of a figure."""
    program = tmp_path / "torchx"
    program.write_text("#!/bin/sh\necho no accounting >&2; echo more >&2; exit 1\n")
    program.chmod(0o755)
    peer, argv = commands.tried(Peer("torchx list", "0.7.0"), [str(program)])
    assert (peer.version, argv) == (None, [])
    assert peer.text == "torchx list: not measured, 0.7.0 fails: no accounting"


def test_tasks_are_named_as_slurm_names_them():
    """An array's elements."""
    assert task(3) == "4711_3"
