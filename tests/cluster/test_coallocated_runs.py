"""launcher.coallocate_min on a real Slurm: one job, which outlives the loss of its nodes."""

import json
from typing import Any

import pytest
from sweeps import Sweep, busy, eventually, hosts, leader_host

COALLOCATED = "launcher.coallocate_min=true"
QUICK = ("epochs=2", "pause_s=0")
LIGHT = ("epochs=3", "pause_s=0.25")


def queue(slurm) -> list[str]:
    """The names of all tasks that Slurm has not done with."""
    return slurm.run(["squeue", "-h", "-r", "-o", "%i"]).stdout.split()


def coallocated_job(s: Sweep, number: int = 0) -> str:
    """The job id of a run's min nodes."""
    spec = json.loads((s.run(number) / "run.json").read_text())
    return (s.folder / f".hpc_elastic/array-{spec['tasks'][0][0]}.jobid").read_text().strip()


def goes_on_without(s: Sweep, slurm, node_id: int) -> None:
    """End a node of the job once all three train, and see how the run ends."""
    eventually(lambda: s.group_sizes()[-1:] == [3], "three nodes train")
    name = f"{coallocated_job(s)}.{node_id}"
    slurm.kill_node(next(e["host"] for e in starts(s) if e["task"] == name))
    output = s.output()
    assert 2 in s.group_sizes()[s.group_sizes().index(3) :], output
    assert (s.result()["status"], s.result()["restarts"]) == ("succeeded", 0), output
    eventually(lambda: not queue(slurm), "nothing of the run stays in the queue")


def starts(s: Sweep, number: int = 0) -> list[dict[str, Any]]:
    """The starts of a run's tasks."""
    return s.events("task", number)


@pytest.mark.long
def test_the_min_part_starts_at_once_and_the_rest_when_it_is_free(slurm, sweep):
    """With one of four nodes busy, nodes=3:4 begins with three; the fourth joins later."""
    job = busy(slurm, 1)
    s = sweep("nodes=3:4", COALLOCATED, "epochs=5", "pause_s=0.25")
    eventually(lambda: s.group_sizes() == [3], "three nodes train")
    slurm.run(["scancel", job])
    eventually(lambda: s.group_sizes()[-1] == 4, "four nodes train")
    output = s.output()
    assert s.group_sizes()[0] == 3 and s.group_sizes()[-1] == 4, output
    assert s.result()["restarts"] == 0 and s.value() > 0.95
    job = coallocated_job(s)
    names = {e["task"] for e in starts(s)}
    assert {f"{job}.{n}" for n in range(3)} < names and len(names) == 4
    assert all((s.folder / f".hpc_elastic/logs/{name}.log").exists() for name in names)
    eventually(lambda: not queue(slurm), "nothing of the run stays in the queue")


@pytest.mark.long
def test_below_min_nodes_nothing_is_held(slurm, sweep):
    """While two of four nodes are busy, neither the job nor the node beyond it starts."""
    job = busy(slurm, 2)
    s = sweep("nodes=3:4", COALLOCATED, *QUICK)
    eventually(lambda: len(queue(slurm)) == 3, "the job, its array and the other job are queued")
    reason = ["squeue", "-h", "-t", "PENDING", "-O", "JobID:0|,Reason:0|"]
    eventually(lambda: "|Dependency|" in slurm.run(reason).stdout, "the array waits for the job")
    assert not starts(s)
    slurm.run(["scancel", job])
    s.output()
    assert s.group_sizes()[0] >= 3 and s.value() > 0


@pytest.mark.long
def test_two_runs_that_do_not_fit_together_finish_one_after_the_other(slurm, sweep):
    """Two times nodes=3:4 on four nodes: the second holds no node as long as the first trains."""
    s = sweep("nodes=3:4", "lr=0.1,0.05", COALLOCATED, *QUICK)
    output = s.output()
    assert all(s.result(n)["status"] == "succeeded" for n in range(2)), output
    assert all(min(s.group_sizes(n)) >= 3 for n in range(2))
    first, second = sorted(range(2), key=lambda n: s.events("round", n)[0]["time"])
    ended = max(e["time"] for e in s.events("round", first))
    assert min(e["time"] for e in starts(s, second)) > ended
    assert coallocated_job(s, 0) != coallocated_job(s, 1)


@pytest.mark.long
def test_a_node_of_the_coallocated_job_that_dies_is_dropped(slurm, sweep):
    """Its job and the other agents in it live on."""
    s = sweep("nodes=2:3", COALLOCATED, *LIGHT)
    goes_on_without(s, slurm, 1)
    assert {e["attempt"] for e in starts(s)} == {0}


@pytest.mark.long
def test_the_first_node_of_the_coallocated_job_that_dies_is_dropped(slurm, sweep):
    """The batch script dies with it; the other agents end the job when the run has ended."""
    s = sweep("nodes=2:3", COALLOCATED, *LIGHT)
    goes_on_without(s, slurm, 0)
    assert {e["attempt"] for e in starts(s)} == {0}


@pytest.mark.long
def test_a_coallocated_job_that_is_preempted_is_taken_as_a_whole_and_comes_back(slurm, sweep):
    """Slurm's SIGTERM reaches the agents on all its nodes; one requeue is for all of them."""
    s = sweep("nodes=2:2", COALLOCATED, *LIGHT)
    eventually(lambda: s.group_sizes()[-1:] == [2], "two nodes train")
    slurm.preempt([next(h for h in hosts(s) if h != leader_host(s))], for_s=3)
    eventually(lambda: len(s.events("task_exited")) == 2, "both agents leave")
    output = s.output()
    assert (s.result()["status"], s.result()["restarts"]) == ("succeeded", 0), output
    assert sorted(e["attempt"] for e in starts(s)) == [0, 0, 1, 1]
