"""Messages of runs on Slurm (``launcher.notify``), and the mail of ``launcher.result_job``."""

import json
import signal

import pytest
from counting import counting
from sweeps import SLOWLY, busy, eventually, leader_host


def told(folder):
    """What the command of a run got."""
    file = folder / "told"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def to_file(folder):
    """The setting of a command that appends what it gets to a file."""
    return f"launcher.notify.command='cat >> {folder}/told; echo >> {folder}/told'"


@pytest.mark.long
def test_a_run_of_three_tasks_whose_leader_died_sends_its_end_once(slurm, sweep, tmp_path):
    """It was told as well, once, that the run waited long for its nodes."""
    events = "launcher.notify.events=[ended,failed,lost,waiting]"
    wait_s = "launcher.notify.wait_s=0.5"
    run = counting(sweep, tmp_path / "run", "nodes=2:3", to_file(tmp_path), events, wait_s)
    eventually(lambda: run.sweep.group_sizes()[-1:] == [3], "three train")
    eventually(lambda: run.sweep.events("first_step"), "they make steps")
    slurm.kill_node(leader_host(run.sweep))
    eventually(lambda: len({e["term"] for e in run.sweep.events("leader")}) > 1, "another leads")
    run.hurry()
    output = run.sweep.output()
    assert run.sweep.result()["status"] == "succeeded", output
    messages = told(tmp_path)
    assert [m["event"] for m in messages if m["event"] != "waiting"] == ["ended"], messages
    waits = [m["round"] for m in messages if m["event"] == "waiting"]
    assert len(waits) == len(set(waits)) > 0, messages


@pytest.mark.long
def test_who_waits_for_a_run_tells_that_it_is_lost(slurm, sweep, tmp_path):
    """None of its tasks is left to do so."""
    run = counting(sweep, tmp_path / "run", "nodes=1:2", to_file(tmp_path))
    eventually(lambda: run.sweep.events("first_step"), "it trains")
    jobs = {e["task"].partition("_")[0] for e in run.sweep.events("task")}
    slurm.run(["scancel", "--signal=KILL", "--full", *jobs])
    slurm.run(["scancel", *jobs])
    run.sweep.process.communicate(timeout=120)
    (message,) = told(tmp_path)
    assert message["event"] == "lost" and "ended without a result" in message["text"]
    assert run.sweep.process.returncode not in (0, -signal.SIGKILL)


@pytest.mark.long
def test_nodes_that_are_returned_or_excluded_are_told(slurm, sweep, tmp_path):
    """A node that starts no task, once; and each time that the run returns all nodes."""
    other = busy(slurm, 2)  # node1 and node2, which Slurm gives first
    slurm.make_read_only("node3")
    events = "launcher.notify.events=[requeued,excluded]"
    short = "launcher.below_min_timeout_s=20"
    run = sweep("nodes=2", to_file(tmp_path), events, short, *SLOWLY)
    eventually(lambda: {"requeued", "excluded"} <= {m["event"] for m in told(tmp_path)}, "both")
    slurm.run(["scancel", other])
    eventually(lambda: run.group_sizes(), "the group forms")
    run.output()
    messages = told(tmp_path)
    assert [m["host"] for m in messages if m["event"] == "excluded"] == ["node3"], messages
    returns = [e for e in run.events("nodes_requeued") if e.get("all")]
    assert len([m for m in messages if m["event"] == "requeued"]) == len(returns)
