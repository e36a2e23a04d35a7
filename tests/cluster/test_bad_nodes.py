"""Nodes that can not start a task: the run avoids them, and the task starts on another node."""

import json

import pytest
from sweeps import eventually, hosts, leader_host

from hpc_elastic.report.sentences import sentence


@pytest.mark.long
def test_a_task_that_its_node_can_not_start_starts_elsewhere(slurm, sweep):
    """A node can not write the task's log (JobLaunchFailure); on another Slurm's spool is broken.

    All nodes that the run has are needed, so that it would end if one task were given up.
    """
    slurm.make_read_only("node1")  # the one that Slurm gives first
    s = sweep("nodes=2", "epochs=8", "pause_s=0.25")
    eventually(lambda: s.group_sizes() == [2], "the group forms without node1")
    follower = next(host for host in hosts(s) if host != leader_host(s))
    member = next(m for m in s.events("round")[-1]["members"] if m["host"] == follower)
    slurm.make_read_only(follower, spool=True)
    slurm.run(["scontrol", "requeue", member["task"]])
    eventually(lambda: s.group_sizes() == [2, 2], "the group forms without the follower's node")
    output = s.output()
    assert s.result()["status"] == "succeeded" and s.result()["restarts"] == 0, output
    assert hosts(s) == [host for host in hosts(s) if host not in ("node1", follower)]
    starts = [(e["host"], e["state"], e["reason"], e["again"]) for e in s.events("start_failed")]
    held = "launch failed requeued held"
    assert starts == [
        ("node1", "FAILED", "JobLaunchFailure", True),
        (follower, "PENDING", held, True),
    ]
    assert set(json.loads((s.run() / "excluded_nodes.json").read_text())) == {"node1", follower}
    told = [sentence(entry) for entry in s.timeline()]
    failed = next(text for text in told if "JobLaunchFailure" in text)
    assert "on node1 before it joined" in failed and "tried on another node" in failed
    assert any(text.startswith("node1 is not used for up to an hour") for text in told), told
