"""Nodes that a user takes from a run on Slurm: ``hpc-elastic node preempt`` and ``kill``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from counting import Counting, counting
from sweeps import PATIENCE_S, eventually, hosts

COMMAND = str(Path(sys.executable).with_name("hpc-elastic"))


@pytest.fixture
def take(slurm):
    """Calls the command for a run and one of its nodes; returns what it tells."""

    def call(run: Counting, *args: str) -> dict:
        done = subprocess.run(
            slurm.on_login([COMMAND, "node", args[0], str(run.sweep.run()), *args[1:], "--json"]),
            env={**os.environ, **slurm.env}, text=True, capture_output=True,
            timeout=PATIENCE_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    return call


def trains(run: Counting, *sizes: int) -> None:
    """Wait until the rounds have had these sizes, and the last one has made steps."""

    def condition() -> bool:
        last = run.rounds()[-1:]
        there = run.sweep.group_sizes() == [*sizes] and bool(last)
        return there and last[0].number == len(sizes) and len(last[0].steps) > 3

    eventually(condition, f"groups of {sizes}, not {run.sweep.group_sizes()}")


@pytest.mark.long
def test_a_node_is_preempted_and_another_killed_and_both_come_back(sweep, take, tmp_path):
    """With notice no step is lost; without, those since the checkpoint, and no restart."""
    run = counting(sweep, tmp_path / "run", "nodes=2", "launcher.below_min_timeout_s=600", every=20)
    trains(run, 2)
    taken = hosts(run.sweep)[1]
    told = take(run, "preempt", taken, "--grace-s", "20")
    assert (told["node"], told["left"], told["comes_back"]) == (taken, True, True), told
    trains(run, 2, 2)
    assert run.replayed() == 0 and told["step"] == run.rounds()[1].resumed
    killed = hosts(run.sweep)[0]
    assert take(run, "kill", killed)["gone"]
    trains(run, 2, 2, 2)
    resumed = run.rounds()[2].resumed
    assert resumed == told["step"] or resumed % 20 == 0, "nothing was saved when it was killed"
    assert run.sweep.events("round")[-1]["restarts"] == 0
    by_users = [(e["kind"], e["host"]) for k in ("preempt", "kill") for e in run.sweep.events(k)]
    assert by_users == [("preempt", taken), ("kill", killed)]
    run.hurry()
    run.sweep.output()
    assert run.is_complete() and run.audit().returncode == 0


@pytest.mark.long
def test_the_only_node_of_a_run_that_is_killed_comes_back(sweep, take, tmp_path):
    """No leader is left to see to it: the command does."""
    run = counting(sweep, tmp_path / "run", "nodes=1", every=20)
    trains(run, 1)
    assert take(run, "kill", hosts(run.sweep)[0])["gone"]
    trains(run, 1, 1)
    run.hurry()
    run.sweep.output()
    assert run.is_complete()
