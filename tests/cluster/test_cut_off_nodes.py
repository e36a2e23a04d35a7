"""A node that is cut off until Slurm gives it up, and is back while its task's last attempt ends.

Slurm would start the task there in that moment, drain the node ("Duplicate jobid") and hold the
task ("launch failed requeued held").
"""

import pytest
from counting import counting
from sweeps import eventually, hosts, leader_host


@pytest.fixture
def run(slurm, sweep, tmp_path):
    """A run on three nodes; there are no others."""
    slurm.run(["scontrol", "update", "nodename=node4", "state=drain", "reason=not there"])
    run = counting(sweep, tmp_path / "run", "nodes=1:3")
    eventually(lambda: run.sweep.group_sizes()[-1:] == [3], "all train")
    return run


def excluded(slurm, task: str) -> str:
    """The nodes that a task avoids, as scontrol shows them."""
    shown = slurm.run(["scontrol", "-o", "show", "job", task]).stdout.split()
    return next(w.partition("=")[2] for w in shown if w.startswith("ExcNodeList="))


def task_on(run, node: str) -> str:
    """The task that has a node in the last round."""
    members = run.sweep.events("round")[-1]["members"]
    return next(m["task"] for m in members if m["host"] == node)


@pytest.mark.long
@pytest.mark.parametrize("leads", [False, True], ids=["a follower's", "the leader's"])
def test_a_task_does_not_start_where_it_may_run_still(slurm, run, leads):
    """It does when its last attempt has left in good order, or the node has been back a while."""
    cut = next(n for n in hosts(run.sweep) if (n == leader_host(run.sweep)) == leads)
    task = task_on(run, cut)
    slurm.partition(cut)
    eventually(lambda: excluded(slurm, task) == cut, "its task avoids it")
    slurm.heal(cut)
    eventually(lambda: run.sweep.group_sizes()[-1] == 3, "all train again")
    assert slurm.node_states()[cut] in ("alloc", "mix", "allocated", "mixed")
    assert excluded(slurm, task) == "(null)"
    run.hurry()
    output = run.sweep.output()
    assert run.sweep.result()["status"] == "succeeded", output
