"""`hpc-elastic status` beside a run on a real Slurm."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sweeps import Sweep, busy, eventually, hosts


def command(slurm, *argv: str | Path, **env: str) -> str:
    """What a command prints."""
    done = subprocess.run(
        slurm.on_login([sys.executable, "-m", "hpc_elastic", *map(str, argv)]),
        env={**os.environ, **slurm.env, **env}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def status(slurm, sweep: Sweep, **env: str) -> dict:
    """What `status --json` says of a run."""
    return json.loads(command(slurm, "status", sweep.run(), "--json", **env))


@pytest.mark.long
@pytest.mark.nfs
def test_a_run_beside_a_queue(slurm, sweep):
    """It trains on one node while a task waits; is preempted, comes back; and ends."""
    other = busy(slurm, len(slurm.nodes) - 1)
    run = sweep("nodes=1:2", "epochs=12", "pause_s=0.25", "launcher.time=60")
    eventually(lambda: len(run.events("first_step")) == 1, "one node trains")
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
    eventually(lambda: run.events("task_exited"), "it has left")
    eventually(lambda: len(run.events("first_step")) > 1, "it trains again")
    told = status(slurm, run)
    assert told["departures"] == {"preempted": 1} and told["restarts"] == 0
    assert told["checkpoint"]["step"] >= run.events("first_step")[-1]["restored"] > 0
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
    looked_at_afterwards(slurm, run, told)


def looked_at_afterwards(slurm, sweep: Sweep, ended: dict) -> None:
    """The other commands agree with what `status` says of a run that has ended."""
    run, files = sweep.run(), sweep.folder.parent
    listed = json.loads(command(slurm, "list", "--json"))
    assert str(run) in [entry["run"] for entry in listed]
    assert "was preempted (SIGTERM" in command(slurm, "events", run)
    assert all(
        audit["holds"] for audit in json.loads(command(slurm, "audit", run, "--json")).values()
    )
    checkpoints = json.loads(command(slurm, "checkpoints", "verify", run, "--json"))
    assert [c["problems"] for c in checkpoints] == [[]] * len(checkpoints)
    assert checkpoints[0]["step"] == ended["checkpoint"]["step"]
    command(slurm, "checkpoints", "export", run, "-o", files / "model.pt")
    assert torch.load(files / "model.pt", weights_only=True)
    report = json.loads(command(slurm, "report", run, "--format", "json"))
    assert report["spent"]["goodput"] == pytest.approx(ended["goodput"], abs=0.02)
    assert "preempted" in {change["cause"] for change in report["changes"]}
    page = files / "report.html"
    command(slurm, "report", run, "-o", page)
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")
    command(slurm, "checkpoints", "prune", run, "--keep-last", "1")
    assert len(json.loads(command(slurm, "checkpoints", "verify", run, "--json"))) == 1
