"""Runs that compete for the nodes of a cluster that is too small for all: on a real Slurm.

The aim is that no node is held for more than 20 s without a group, and that none is idle for more
than 20 s while it could serve a run that waits. On a machine that is busy with other tests the
commands of Slurm alone take a part of that; so the limit here is more than twice the aim. Without
turns these runs held nodes for 330 s, and left all of them idle for two minutes.
"""

from pathlib import Path

import pytest
from queue_history import QueueHistory
from sweeps import ROOT, Sweep, eventually

LIMIT_S = 45.0
UNHURRIED = ("epochs=2", "pause_s=0.5")


def succeeded(s: Sweep, num_runs: int) -> None:
    """Wait for the end of a sweep; all its runs have trained."""
    output = s.output()
    results = [s.result(number)["status"] for number in range(num_runs)]
    assert results == ["succeeded"] * num_runs, output


@pytest.mark.long
def test_runs_of_two_nodes_or_three_share_four_nodes(slurm, sweep):
    """With default settings: the first two runs begin, and the others follow them at once."""
    with QueueHistory(slurm) as history:
        s = sweep("nodes=2:3", "epochs=2", "seed=0,1,2,3", script=ROOT / "train.py")
        succeeded(s, 4)
    held, idle = history.held_in_vain(s), history.idle_in_vain(s)
    assert held.seconds <= LIMIT_S, held
    assert idle.seconds <= LIMIT_S, idle


def test_a_run_that_finds_too_few_nodes_gives_way_and_comes_back_in_time(slurm, sweep):
    """nodes=3 on four nodes: the fourth is given back, and the second run follows the first."""
    with QueueHistory(slurm) as history:
        s = sweep("nodes=3", "seed=0,1", *UNHURRIED)
        eventually(lambda: s.events("nodes_requeued", 1), "the second run gives its node back")
        succeeded(s, 2)
    held, idle = history.held_in_vain(s), history.idle_in_vain(s)
    assert held.seconds <= LIMIT_S, held
    assert idle.seconds <= LIMIT_S, idle
    (given, *_) = (e for e in s.events("nodes_requeued", 1) if "why" in e)
    assert "other runs of the user" in given["why"]


@pytest.mark.long
def test_a_run_whose_minimum_is_lost_goes_on_when_nodes_are_there(slurm, sweep):
    """A node dies: the node that is left is given back, until another run ends."""
    with QueueHistory(slurm) as history:
        s = sweep("nodes=2:3", "seed=0,1", *UNHURRIED)
        eventually(lambda: all(s.events("first_step", n) for n in range(2)), "both runs train")
        lost = s.events("round", 1)[-1]["members"][-1]["host"]
        slurm.kill_node(lost)
        eventually(lambda: s.events("nodes_requeued", 1), "the second run gives its node back")
        succeeded(s, 2)
        slurm.start_node(lost)
    held, idle = history.held_in_vain(s), history.idle_in_vain(s)
    assert held.seconds <= LIMIT_S, held
    assert idle.seconds <= LIMIT_S, idle


@pytest.mark.long
def test_a_run_gives_way_to_another_one_that_it_shares_no_folder_with(slurm, sweep, tmp_path):
    """nodes=3 twice on four nodes: the second one finds the first by its batch script."""
    with QueueHistory(slurm) as history:
        runs = []
        for name in ("one", "two"):
            s = sweep("nodes=3", "seed=0", f"hydra.sweep.dir={tmp_path / name}", *UNHURRIED)
            s.folder = Path(tmp_path / name)
            runs.append(s)
            eventually(lambda s=s: s.events("task"), "a task of it runs")
        first, second = runs
        eventually(lambda: second.events("nodes_requeued"), "the second run gives its node back")
        shown = ["squeue", "-h", "-r", "-t", "PENDING", "-o", "%r"]
        eventually(lambda: slurm.run(shown).stdout.split() == ["BeginTime"] * 3, "it stays away")
        for s in runs:
            succeeded(s, 1)
    held, idle = history.held_in_vain(*runs), history.idle_in_vain(*runs)
    assert held.seconds <= LIMIT_S, held
    assert idle.seconds <= LIMIT_S, idle
    (given, *_) = (e for e in second.events("nodes_requeued") if "why" in e)
    assert "other runs of the user" in given["why"]
    assert any("idle" in e["why"] for e in first.events("sweep_decision"))


@pytest.mark.long
def test_two_sweeps_of_one_user_both_finish(slurm, sweep, tmp_path):
    """They are in folders of their own: none waits for ever."""
    sweeps = []
    for name in ("one", "two"):
        where = f"hydra.sweep.dir={tmp_path / name}"
        s = sweep("nodes=2:3", "epochs=2", "seed=0,1,2", where, script=ROOT / "train.py")
        s.folder = Path(tmp_path / name)
        sweeps.append(s)
    for s in sweeps:
        succeeded(s, 3)
