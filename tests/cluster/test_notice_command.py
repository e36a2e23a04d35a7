"""Nodes that go away by the word of ``launcher.agent.notice_command``: on a real Slurm."""

import pytest
from counting import counting
from sweeps import eventually, hosts

from hpc_elastic.run.directory import RunDir
from hpc_elastic.slurm.quarantine import excluded


@pytest.mark.long
def test_a_node_with_a_notice_is_left_without_a_lost_step_and_not_taken_again(
    slurm, sweep, tmp_path
):
    """Its task comes back on another node, though this one is idle."""
    # each node has a file of its own, as a cloud instance has its own metadata
    hook = f"launcher.agent.notice_command='cat {tmp_path}/notice-$SLURMD_NODENAME'"
    run = counting(sweep, tmp_path / "run", "nodes=1:2", hook)
    eventually(lambda: run.sweep.group_sizes()[-1:] == [2], "two train")
    eventually(lambda: len(run.sweep.events("first_step")) > 1, "they make steps")
    goes = hosts(run.sweep)[-1]
    (tmp_path / f"notice-{goes}").write_text("60\n")
    eventually(lambda: run.sweep.group_sizes()[-1] == 2 and goes not in hosts(run.sweep), "moved")
    assert goes in excluded(RunDir(run.sweep.run()))
    notices = [e for e in run.sweep.events("preemption_notice") if "host" not in e]
    assert [e["reason"] for e in notices] == ["asked"] and notices[0]["given_s"] == 60
    run.hurry()
    output = run.sweep.output()
    assert run.sweep.result()["status"] == "succeeded", output
    assert run.replayed() == 0 and run.is_complete()
    assert len([e for e in run.sweep.events("task") if e["host"] == goes]) == 1
    assert run.audit().returncode == 0
