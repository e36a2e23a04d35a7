"""Nodes that reach the leader and not each other, and packets that are lost, on a real Slurm."""

import pytest
from replicas import Replicas
from sweeps import eventually, hosts, leader_host

SCRIPT = """
import time
import hydra, torch, torch.distributed as dist
from pathlib import Path
from hpc_elastic import report

@hydra.main(version_base=None)
def main(cfg):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step = 0
    while not Path(cfg.folder, "hurry").exists() or step < 3:
        dist.all_reduce(torch.ones(1))
        step += 1
        report(step=step)
        time.sleep(0.2)
    return step

if __name__ == "__main__":
    main()
"""
PAIR = ("node2", "node3")


@pytest.fixture(autouse=True)
def three_nodes(slurm):
    """There are no others, and their network is whole again afterwards."""
    slurm.run(["scontrol", "update", "nodename=node4", "state=drain", "reason=not there"])
    yield
    for node in slurm.nodes:
        slurm.impair(node)


@pytest.fixture
def start(sweep, tmp_path):
    """Starts a run on up to three nodes."""
    script = tmp_path / "half.py"
    script.write_text(SCRIPT)

    def start(*overrides):
        folder = f"+folder={tmp_path}"
        return sweep("+launcher=slurm", "nodes=1:3", folder, *overrides, script=script)

    return start


def cut(slurm, one_way: bool, pair=PAIR) -> None:
    """Let two nodes not reach each other; or let only one of them send to the other."""
    first, second = pair
    slurm.impair(first, cut=[second])
    if not one_way:
        slurm.impair(second, cut=[first])


def trains(run, num_nodes: int) -> bool:
    """Whether the last round has this number of nodes, and makes steps."""
    rounds = run.events("round")
    number = rounds[-1]["number"] if rounds else 0
    began = [e for e in run.events("first_step") if e["round"] == number]
    return bool(rounds) and rounds[-1]["nodes"] == num_nodes == len(began)


@pytest.mark.long
@pytest.mark.parametrize("one_way", [False, True], ids=["both ways", "one way"])
def test_a_cut_between_two_nodes_costs_one_of_them(slurm, start, one_way):
    """It is named, no restart is spent, and the others train at once."""
    cut(slurm, one_way)
    run = start()
    eventually(lambda: trains(run, 2), "two nodes train")
    assert "node1" in hosts(run)
    if leader_host(run) not in PAIR:  # the other one does not reach the leader, and is not probed
        (left_out,) = run.events("left_out")
        assert left_out["hosts"][0] in PAIR and left_out["pairs"] == 1
    output = run.output()
    assert run.result()["status"] == "succeeded", output
    assert run.result()["restarts"] == 0


@pytest.mark.long
def test_a_cut_while_they_train_costs_no_restart(slurm, start):
    """The group hangs, or gloo gives up first; the others go on without one of the pair."""
    run = start("launcher.agent.hang_timeout_s=4")
    eventually(lambda: trains(run, 3), "three nodes train")
    pair = [host for host in hosts(run) if host != leader_host(run)]
    cut(slurm, False, pair)
    eventually(lambda: trains(run, 2), "two nodes train")
    (stopped,) = run.events("round_stopped")
    assert stopped["cause"] in ("cut_off", "failed") and not run.events("hang")
    assert run.events("left_out")[0]["hosts"][0] in pair
    output = run.output()
    assert run.result()["status"] == "succeeded" and run.result()["restarts"] == 0, output


@pytest.mark.long
def test_lost_packets_are_no_cut(slurm, start):
    """With 20 % of all packets lost, all three nodes train."""
    for node in ("node1", "node2", "node3"):
        slurm.impair(node, loss=0.2)
    run = start("launcher.rendezvous.heartbeat_timeout_s=20")
    eventually(lambda: trains(run, 3), "three nodes train")
    assert not run.events("left_out")
    for node in ("node1", "node2", "node3"):
        slurm.impair(node)
    output = run.output()
    assert run.result()["status"] == "succeeded", output


@pytest.mark.long
@pytest.mark.parametrize("one_way", [False, True], ids=["both ways", "one way"])
def test_replicas_that_do_not_reach_each_other_go_on_without_one(slurm, sweep, tmp_path, one_way):
    """With ft=true: a cut while they train is found when steps fail."""
    options = ("epochs=10", "pause_s=0.5", "save_every_s=1000")
    run = Replicas(tmp_path, sweep, "train_ft.py", "nodes=1:3", *options)
    run.train(3)
    pair = [h for h in hosts(run.sweep) if h != leader_host(run.sweep)]
    cut(slurm, one_way, pair)
    eventually(lambda: run.sweep.events("left_out"), "one is left out")
    run.train(2)
    assert run.sweep.events("left_out")[0]["hosts"][0] in pair
    output = run.sweep.output()
    assert run.sweep.result()["status"] == "succeeded", output


@pytest.mark.long
def test_lost_packets_are_no_cut_between_replicas(slurm, sweep, tmp_path):
    """With 20 % of all packets lost, all replicas train."""
    options = ("epochs=10", "pause_s=0.5", "launcher.rendezvous.heartbeat_timeout_s=20")
    for node in ("node1", "node2", "node3"):
        slurm.impair(node, loss=0.2)
    run = Replicas(tmp_path, sweep, "train_ft.py", "nodes=1:3", *options)
    run.train(3)
    assert not run.sweep.events("left_out")
    for node in ("node1", "node2", "node3"):
        slurm.impair(node)
    output = run.sweep.output()
    assert run.sweep.result()["status"] == "succeeded", output
