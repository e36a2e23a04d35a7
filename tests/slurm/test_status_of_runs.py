"""`hpc-elastic status` beside a run on a real Slurm."""

import json
import os
import subprocess
import sys

import pytest
from sweeps import Sweep, busy, eventually, hosts


def status(slurm, sweep: Sweep, **env: str) -> dict:
    """What `status --json` says of a run."""
    argv = [sys.executable, "-m", "hpc_elastic", "status", str(sweep.run()), "--json"]
    done = subprocess.run(
        argv, env={**os.environ, **slurm.env, **env}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_run_beside_a_queue(slurm, sweep):
    """It trains on one node while a task waits; is preempted, comes back; and ends."""
    other = busy(slurm, len(slurm.nodes) - 1)
    run = sweep("nodes=1:2", "epochs=3", "pause_s=0.25", "launcher.time=60")
    eventually(lambda: len(run.events("trains")) == 1, "one node trains")
    eventually(lambda: status(slurm, run)["steps_per_s"], "its pace is known")
    told = status(slurm, run)
    assert (told["phase"], told["nodes"], told["max_nodes"]) == ("training", 1, 2)
    runs, waits = sorted(told["tasks"], key=lambda task: task["state"] == "PENDING")
    assert (runs["state"], runs["ranks"], runs["attempt"]) == ("RUNNING", [0, 0], 0)
    assert runs["node"] in hosts(run) and runs["time_left_s"] is not None
    assert waits["state"] == "PENDING" and waits["reason"] in ("Resources", "Priority")
    assert waits["node"] is None and waits["attempt"] is None and told["queue_seconds"] > 0
    assert told["step"] > 0 and 0 < told["goodput"] < 1 and told["notes"] == []

    unreachable = status(slurm, run, SLURM_CONF="/nowhere/slurm.conf")
    assert unreachable["phase"] == "training" and "does not answer" in unreachable["notes"][0]
    assert unreachable["tasks"][runs["slot"]]["node"] == runs["node"]

    slurm.preempt(hosts(run), for_s=5)
    eventually(lambda: run.events("left"), "it has left")
    eventually(lambda: len(run.events("trains")) > 1, "it trains again")
    told = status(slurm, run)
    assert told["departures"] == {"preempted": 1} and told["restarts"] == 0
    assert told["checkpoint"]["step"] >= run.events("trains")[-1]["restored"] > 0
    assert "replayed" not in {kind for kind, s in told["node_seconds"].items() if s > 0.5}
    assert 0 in [change["nodes"] for change in told["group"]]

    run.hurry()
    eventually((run.run() / "result.json").exists, "it has ended")
    output = run.output()
    slurm.run(["scancel", other])
    told = status(slurm, run)
    assert told["phase"] == told["ended"]["status"] == "succeeded", output
    assert told["ended"]["why"] is None and told["step"] == told["checkpoint"]["step"]
    assert told["node_seconds"]["useful"] == pytest.approx(
        told["goodput"] * sum(told["node_seconds"].values()), rel=0.02
    )
