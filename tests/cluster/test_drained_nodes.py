"""A node that is drained while a run trains on it, and a run whose directory is removed."""

import subprocess

import pytest
from counting import counting
from sweeps import eventually, hosts


def two_train(sweep, folder):
    """Start a run of one to two nodes; return it, and a host of it, once two make steps."""
    run = counting(sweep, folder, "nodes=1:2")
    eventually(lambda: run.sweep.group_sizes()[-1:] == [2], "two train")
    eventually(lambda: run.sweep.events("first_step"), "they make steps")
    return run, hosts(run.sweep)[-1]


def is_replaced(run, host) -> bool:
    """Whether two train on other nodes."""
    return run.sweep.group_sizes()[-1] == 2 and host not in hosts(run.sweep)


@pytest.mark.long
def test_a_drained_node_is_left_at_a_checkpoint_and_replaced(slurm, sweep, tmp_path):
    """Its task starts on another node; no step is lost."""
    run, drained = two_train(sweep, tmp_path / "run")
    slurm.run(["scontrol", "update", f"nodename={drained}", "state=drain", "reason=repair"])
    eventually(lambda: run.sweep.events("node_drained"), "the leader reads that")
    (event,) = run.sweep.events("node_drained")
    assert (event["host"], event["state"]) == (drained, "draining")
    eventually(lambda: is_replaced(run, drained), "two train on other nodes")
    stops = [e for e in run.sweep.events("round_stopped") if e["cause"] == "regroup"]
    assert stops and all("step" in e for e in stops), "after a checkpoint"
    run.hurry()
    output = run.sweep.output()
    assert run.sweep.result()["status"] == "succeeded", output


@pytest.mark.long
def test_a_node_is_left_before_a_maintenance_that_ignores_its_job(slurm, sweep, tmp_path):
    """The reservation was made while the task ran; no step is lost, and another node comes."""
    run, reserved = two_train(sweep, tmp_path / "run")
    fields = ["starttime=now+5minutes", "duration=10", "users=root", "flags=maint,ignore_jobs"]
    create = ["scontrol", "create", "reservation", "reservation=repair", *fields]
    slurm.run([*create, f"nodes={reserved}"])
    try:
        eventually(lambda: run.sweep.events("node_drained"), "the leader reads that")
        (event,) = run.sweep.events("node_drained")
        assert event["host"] == reserved and event["state"].startswith("reserved from ")
        eventually(lambda: is_replaced(run, reserved), "two train on other nodes")
        run.hurry()
        output = run.sweep.output()
    finally:
        slurm.run(["scontrol", "delete", "reservation=repair"])
    assert run.sweep.result()["status"] == "succeeded", output
    assert run.replayed() == 0 and run.is_complete()


@pytest.mark.long
def test_a_run_ends_whose_directory_was_removed(slurm, sweep, tmp_path):
    """Its tasks leave the queue, those that wait too, and their logs say why."""
    run = counting(sweep, tmp_path / "run", "nodes=1:6")
    eventually(lambda: run.sweep.group_sizes()[-1:] == [4], "all nodes train")
    rm = ["rm", "-rf", str(run.sweep.run())]
    eventually(lambda: not subprocess.run(rm).returncode, "no task writes into it meanwhile")
    eventually(lambda: not slurm.run(["squeue", "-h"]).stdout.strip(), "the queue is empty")
    run.sweep.process.communicate(timeout=60)
    logs = [file.read_text() for file in run.sweep.folder.glob(".hpc_elastic/logs/*.log")]
    why = "the directory of the run was removed"
    assert sum(why in text for text in logs) == 4, "\n----\n".join(logs)
