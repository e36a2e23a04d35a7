"""A run on a cluster of nodes with GPUs: they leave, die and come, and workers are killed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_elastic.run.events import read_events
from slurm_sandbox import SandboxConfig, SlurmSandbox

ROOT = Path(__file__).parents[2]
NODES, GPUS, PATIENCE_S = 4, 2, 240.0


@pytest.fixture(scope="module")
def cluster():
    """Yield a Slurm of nodes with GPUs."""
    if os.geteuid():
        pytest.skip("not root")
    sandbox = SlurmSandbox("gpu_nodes")
    sandbox.down()
    try:
        yield SlurmSandbox.up(SandboxConfig(name="gpu_nodes", nodes=NODES, gpus_per_node=GPUS))
    finally:
        sandbox.down()


class Run:
    """The README's script on the cluster."""

    def __init__(self, cluster, machine, folder: Path, *overrides: str) -> None:
        for name in ("train.py", "train.yaml"):
            (folder / name).symlink_to(ROOT / name)
        argv = [sys.executable, "train.py", "-m", "launcher=slurm", f"nodes=1:{NODES}", *overrides]
        self.path = folder / "sweep" / "0"
        self.process = subprocess.Popen(
            cluster.on_login([*argv, f"hydra.sweep.dir={self.path.parent}"]), cwd=folder,
            env={**machine.environment(), **cluster.env}, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def events(self, kind: str) -> list[dict]:
        """Return the events of a kind."""
        folder = self.path / "events"
        return [e for e in read_events(folder) if e["kind"] == kind] if folder.exists() else []

    def trains_on(self, num_nodes: int, after: int = 0) -> int:
        """Wait for the first step of a later round with this number of nodes; return the round."""
        until = time.monotonic() + PATIENCE_S
        while True:
            made = {e["round"] for e in self.events("first_step")}
            rounds = [e["number"] for e in self.events("round") if e["nodes"] == num_nodes]
            if found := [n for n in rounds if n > after and n in made]:
                return found[-1]
            if self.process.poll() is not None or time.monotonic() > until:
                pytest.fail(f"no group of {num_nodes} nodes: {self.process.communicate()[0]}")
            time.sleep(0.5)


def test_a_run_on_gpus_survives_what_nodes_do(cluster, gpus, tmp_path):
    """A killed worker, a node that is preempted and comes back, one that dies: nothing is lost."""
    machine = gpus(count=GPUS)
    run = Run(cluster, machine, tmp_path, "epochs=20", "pause_s=0.3", "save_every_s=3")
    number = run.trains_on(NODES)
    workers = {(event["host"], event["pid"]) for event in machine.events("nccl_init")}
    assert len(workers) >= NODES * GPUS
    cluster.preempt(["node2"], for_s=5.0)
    number = run.trains_on(NODES - 1, after=number)
    number = run.trains_on(NODES, after=number)
    cluster.kill_node("node3")
    run.trains_on(NODES - 1, after=number)
    output, _ = run.process.communicate(timeout=2 * PATIENCE_S)
    assert run.process.returncode == 0, output
    assert json.loads((run.path / "result.json").read_text())["status"] == "succeeded"
    assert not machine.events("duplicate_gpu")
    contexts = machine.contexts()
    made = machine.events("nccl_init")
    assert all(contexts[e["host"], e["pid"]] == {e["device"]} for e in made)
    audit = [sys.executable, "-m", "hpc_elastic", "audit", str(run.path)]
    assert subprocess.run(audit, cwd=tmp_path, capture_output=True, text=True).returncode == 0
