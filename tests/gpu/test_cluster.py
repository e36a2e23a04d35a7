"""Runs on a cluster of nodes with GPUs: nodes leave, die and come; workers are killed or hang."""

import os
import sys
from pathlib import Path

import pytest

from gpu_ranks import require_own_devices
from slurm_sandbox import SandboxConfig, SlurmSandbox

sys.path.append(str(Path(__file__).parents[1] / "cluster"))

from replicas import Replicas
from sweeps import Sweep, eventually, train_without_end

NODES = 4


@pytest.fixture
def cluster(request):
    """Yield a Slurm of nodes with GPUs, as many as the test's parameter says."""
    if os.geteuid():
        pytest.skip("not root")
    sandbox = SlurmSandbox("gpu_nodes")
    sandbox.down()
    config = SandboxConfig(name="gpu_nodes", nodes=NODES, gpus_per_node=request.param)
    try:
        yield SlurmSandbox.up(config)
    finally:
        sandbox.down()


@pytest.fixture
def machine(cluster, gpus):
    """Return the GPUs of each node."""
    return gpus(count=cluster.config.gpus_per_node)


@pytest.fixture
def sweep(cluster, machine, tmp_path):
    """Start a script of ours on the cluster, and end it with the test."""
    started = []

    def start(*overrides, script):
        env = machine.environment() | cluster.env
        started.append(Sweep(tmp_path, env, script, *overrides, prefix=cluster.on_login([])))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


def workers(machine, host: str | None = None) -> list[tuple[str, int]]:
    """Return host and process id of each worker that has used NCCL, the last one last."""
    made = [(e["host"], e["pid"]) for e in machine.events("nccl_init")]
    return [each for each in dict.fromkeys(made) if host in (None, each[0])]


@pytest.mark.parametrize(
    "cluster", [2, pytest.param(4, marks=pytest.mark.long)], indirect=True, ids="{} GPUs".format
)
def test_a_run_on_gpus_survives_what_nodes_do(cluster, machine, sweep, tmp_path):
    """A node that is preempted and comes back, and one that dies: nothing is lost."""
    overrides = (f"nodes=1:{NODES}", "epochs=20", "pause_s=0.3", "save_every_s=3")
    run = sweep(*overrides, script=train_without_end(tmp_path))

    def trains_on(num_nodes: int, after: int = 0) -> int:
        """Wait for the first step of a later round with this number of nodes; return the round."""

        def rounds() -> list[int]:
            made = {e["round"] for e in run.events("first_step")}
            found = [e["number"] for e in run.events("round") if e["nodes"] == num_nodes]
            return [n for n in found if n > after and n in made]

        eventually(rounds, f"a group of {num_nodes} nodes")
        return rounds()[-1]

    number = trains_on(NODES)
    assert len(workers(machine)) >= NODES * machine.count
    cluster.preempt(["node2"], for_s=5.0)
    number = trains_on(NODES - 1, after=number)
    number = trains_on(NODES, after=number)
    cluster.kill_node("node3")
    trains_on(NODES - 1, after=number)
    output = run.output()
    assert run.result()["status"] == "succeeded", output
    require_own_devices(machine)
    audit = run.audit()
    assert audit.returncode == 0, audit.stdout + audit.stderr


@pytest.mark.long
@pytest.mark.parametrize("cluster", [4], indirect=True, ids="{} GPUs".format)
def test_replicas_of_a_sharded_model_survive_what_nodes_do(cluster, machine, sweep, tmp_path):
    """FSDP2 inside a node, ft between nodes.

    A killed worker, one that hangs, a node that is preempted and comes back, and one that dies end
    no other replica's training.
    """
    run = Replicas(
        tmp_path, sweep, "gpt/train.py", f"nodes=1:{NODES}", "layers=1", "width=32", "heads=2",
        "epochs=4", "pause_s=0.5",
    )  # fmt: skip
    run.train(NODES)
    assert len(workers(machine)) >= NODES * machine.count
    for signal, node in (("-KILL", "node1"), ("-STOP", "node4")):
        _, pid = workers(machine, node)[-1]
        cluster.exec_on(node, ["kill", signal, str(pid)])
        run.train(NODES - 1)
        run.train(NODES)
    cluster.preempt(["node2"], for_s=5.0)
    run.train(NODES - 1)
    run.train(NODES)
    cluster.kill_node("node3")
    run.train(NODES - 1)
    output = run.sweep.output()
    assert run.sweep.result()["status"] == "succeeded", output
    assert len(set(run.fingerprints())) == 1
    require_own_devices(machine)
    audit = run.audit()
    assert audit.returncode == 0, audit.stdout + audit.stderr
