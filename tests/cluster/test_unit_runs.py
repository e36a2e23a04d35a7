"""Nodes that only work together, on a real Slurm: replicas of two nodes, and a group of pairs."""

import json

import pytest
from replicas import Replicas
from sweeps import eventually, leader_host, train_without_end

TAKEN_S = 6
PAIRS = ("nodes=2:4:2", "nproc_per_node=1")


def status(sweep) -> dict:
    """The status of the run; empty before the first."""
    path = sweep.run() / "status.json"
    return json.loads(path.read_text()) if path.exists() else {}


def units(sweep) -> list[set[str]]:
    """The hosts of the last round, pair by pair."""
    hosts = [member["host"] for member in sweep.events("round")[-1]["members"]]
    return [set(hosts[i : i + 2]) for i in range(0, len(hosts), 2)]


@pytest.mark.long
def test_replicas_of_two_nodes_outlive_each_others_nodes(slurm, sweep, tmp_path):
    """A sharded model: a node dies, then its partner; a pair is preempted; the leader's node dies.

    The partner of a dead node completes the next replica. Replicas catch up beside the training.
    All end with the same parameters, and every sample is trained exactly once.
    """
    slow = ("epochs=2", "batch_size=16", "pause_s=0.5", "save_every_s=10", "width=128")
    run = Replicas(tmp_path, sweep, "gpt/train.py", *PAIRS, *slow, catch_up_bytes=1)
    run.train(2)
    leader = leader_host(run.sweep)
    pair = next(unit for unit in units(run.sweep) if leader not in unit)
    dead, partner = sorted(pair)
    slurm.kill_node(dead)
    run.train(1)
    slurm.kill_node(partner)
    run.train(1)
    slurm.start_node(dead)
    slurm.start_node(partner)
    run.train(2)
    pair = next(unit for unit in units(run.sweep) if leader_host(run.sweep) not in unit)
    slurm.preempt(sorted(pair), for_s=TAKEN_S)
    run.train(1)
    run.train(2)
    leader = leader_host(run.sweep)
    (partner,) = next(unit for unit in units(run.sweep) if leader in unit) - {leader}
    slurm.kill_node(leader)
    run.train(1)
    slurm.start_node(leader)
    run.train(2)
    assert any(partner in unit for unit in units(run.sweep)), "it completes the next replica"
    output = run.sweep.output()
    result = run.sweep.result()
    assert (result["status"], result["restarts"]) == ("succeeded", 0), output
    fingerprints = run.fingerprints()
    assert len(fingerprints) == 2 and len(set(fingerprints)) == 1
    audit = run.audit()
    assert audit.returncode == 0, audit.stdout + audit.stderr


@pytest.mark.long
def test_a_group_of_pairs_shrinks_and_grows_by_pairs(slurm, sweep, tmp_path):
    """The partner of a dead node is a spare, and its pair is whole again once the node is back."""
    script = train_without_end(tmp_path)
    run = sweep("launcher=slurm", *PAIRS, "epochs=20", "pause_s=0.3", script=script)

    def has_trained(nodes: int) -> bool:
        shown = status(run)
        return shown.get("nodes") == nodes and shown["step"] is not None

    eventually(lambda: has_trained(4), "four nodes train")
    members = [m["host"] for m in run.events("round")[-1]["members"]]
    dead = next(host for host in members if host != leader_host(run))
    slurm.kill_node(dead)
    eventually(lambda: has_trained(2), "two nodes train")
    assert status(run)["joined"] == 1, "the third is a spare"
    slurm.start_node(dead)
    eventually(lambda: has_trained(4), "four nodes train again")
    output = run.output()
    assert run.result()["status"] == "succeeded", output
    assert {e["nodes"] for e in run.events("round")} == {2, 4}
    audit = run.audit()
    assert audit.returncode == 0, audit.stdout + audit.stderr
