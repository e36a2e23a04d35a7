"""A group that hangs on a real Slurm: the rank that holds it up is named, across nodes."""

import pytest
from sweeps import eventually, hosts

STUCK = """
import os, time
import hydra, torch, torch.distributed as dist
from hpc_elastic import report

def wait_for_ever():
    time.sleep(3600)

@hydra.main(version_base=None)
def main(cfg):
    dist.init_process_group("gloo")
    for step in range(1, 13):
        if step == 8 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            wait_for_ever()
        dist.all_reduce(torch.ones(1))
        report(step=step)
        time.sleep(0.3)
    return step

if __name__ == "__main__":
    main()
"""


@pytest.mark.long
def test_a_rank_that_waits_for_ever_on_another_node_is_named(sweep, tmp_path):
    """The run directory has the stacks of both nodes, and the run goes on to its end."""
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    s = sweep("+launcher=slurm", "nodes=2", "launcher.agent.hang_timeout_s=4", script=script)
    eventually(lambda: s.events("hang"), "the hang is seen")
    (hang,) = s.events("hang")
    (blamed,) = hang["ranks"]
    members = s.events("round")[0]["members"]
    assert (blamed["rank"], blamed["host"]) == (1, members[1]["host"])
    assert "in wait_for_ever" in blamed["at"] and "all_reduce" in hang["others"]
    output = s.output()
    assert s.result()["status"] == "succeeded", output
    assert s.result()["restarts"] == 1 and s.value() == 12
    stacks = {p.name: p.read_text() for p in s.run().glob("tasks/*/attempt-*/round-1.*.stack.txt")}
    assert set(stacks) == {"round-1.rank-0.stack.txt", "round-1.rank-1.stack.txt"}
    assert "wait_for_ever" in stacks["round-1.rank-1.stack.txt"]
    assert hosts(s)[1] in stacks["round-1.rank-1.stack.txt"]
