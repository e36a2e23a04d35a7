"""Runs of the README's script on a machine with GPUs."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from gpu_ranks import require_own_devices
from hpc_elastic.agent.preflight import Problem, check_gpu_health, check_gpus

ROOT = Path(__file__).parents[2]


def train(folder, env, *overrides):
    """Run the README's script as its run, up to the end."""
    for name in ("train.py", "train.yaml"):
        (folder / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "train.py", "launcher=local", *overrides, "epochs=2"],
        cwd=folder, env=env, text=True, capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = folder.rglob("result.json")
    assert json.loads(result.read_text())["status"] == "succeeded"


def test_the_first_command_trains_by_nccl_with_a_gpu_for_each_worker(gpus, tmp_path):
    """Two nodes share the machine's GPUs; no worker touches another's."""
    machine = gpus(count=4)
    train(tmp_path, machine.environment(), "nodes=1:2")
    communicators = machine.events("nccl_init")
    assert {event["size"] for event in communicators} == {4}
    assert Counter(event["device"] for event in communicators) == dict.fromkeys(range(4), 1)
    require_own_devices(machine)
    logs = "".join(path.read_text() for path in tmp_path.rglob("agent.log"))
    assert "which had imported" in logs and "are not forked" not in logs


def test_replicas_of_a_sharded_model_train_by_nccl(gpus, tmp_path):
    """FSDP2 over the GPUs of a node, ft's communicators between the nodes, each on its own GPU."""
    machine = gpus(count=4)
    overrides = ["launcher=local", "nodes=2", "layers=1", "context=512", "batch_size=32"]
    done = subprocess.run(
        [sys.executable, ROOT / "examples/gpt/train.py", *overrides],
        cwd=tmp_path, env=machine.environment(), text=True, capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    communicators = machine.events("nccl_init")
    of_worker = Counter((event["host"], event["pid"]) for event in communicators)
    assert len(of_worker) == 4 and min(of_worker.values()) >= 2
    require_own_devices(machine)
    outputs = "".join(path.read_text() for path in tmp_path.rglob("round-1.rank-*.out"))
    assert len(set(re.findall(r"parameters (\w+)", outputs))) == 1


def test_each_worker_has_a_slice_of_mig(gpus, tmp_path):
    """CUDA shows one to each process, so the script's ``cuda:LOCAL_RANK`` is that one."""
    machine = gpus(count=2, mig=True)
    env = machine.environment() | {"CUDA_VISIBLE_DEVICES": "MIG-0,MIG-1"}
    train(tmp_path, env, "nodes=1")
    communicators = machine.events("nccl_init")
    assert sorted(event["device"] for event in communicators) == [0, 1]
    require_own_devices(machine)


BINDS = """
import os
from hpc_elastic import launch

def cpus():
    return sorted(os.sched_getaffinity(0))

if __name__ == "__main__":
    print(dict(launch(cpus, agent={"numa": "node"})))
"""
MOUNTS = """
set -e
for bus in 01 02; do
    mkdir -p pci/0000:$bus:00.0 node/node$((10#$bus - 1))
    echo $((10#$bus - 1)) >pci/0000:$bus:00.0/numa_node
    echo $((10#$bus - 1)) >node/node$((10#$bus - 1))/cpulist
done
mount --bind pci /sys/bus/pci/devices
mount --bind node /sys/devices/system/node
exec "$@"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the files of the system are replaced")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_worker_is_bound_to_the_numa_node_of_its_gpu(gpus, tmp_path):
    """Each GPU has a NUMA node of one CPU. The processes were warm before they were bound."""
    (tmp_path / "binds.py").write_text(BINDS)
    unshared = ["unshare", "--mount", "bash", "-c", MOUNTS, "-", sys.executable, "binds.py"]
    done = subprocess.run(
        unshared, cwd=tmp_path, env=gpus(count=2).environment(), text=True, capture_output=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "{0: [0], 1: [1]}" in done.stdout


HANGS = """
import os, time
import torch
import torch.distributed as dist
from hpc_elastic import launch

def train():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    w = torch.ones(1, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([w], 0.1)
    for step in range(8):
        if step == 5 and dist.get_rank() == 1:
            time.sleep(3600)
        w.grad = torch.ones(1, device="cuda")
        dist.all_reduce(w.grad)
        torch.cuda.synchronize()
        optimizer.step()
        time.sleep(0.2)

if __name__ == "__main__":
    launch(train, agent={"hang_timeout_s": 2}, max_restarts=0, run_dir="run")
"""


def test_the_rank_that_does_not_join_a_collective_is_named(gpus, tmp_path):
    """Of two ranks, one waits for its GPU: no stack shows for what, but torch has recorded it."""
    (tmp_path / "hangs.py").write_text(HANGS)
    done = subprocess.run(
        [sys.executable, "hangs.py"], cwd=tmp_path, env=gpus(count=2).environment(), text=True,
        capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode != 0
    (log,) = (tmp_path / "run/events").iterdir()
    events = map(json.loads, log.read_text().splitlines())
    (hang,) = [event for event in events if event["kind"] == "hang"]
    assert [blamed["rank"] for blamed in hang["ranks"]] == [1] and not hang["shared"]
    assert "where all_reduce 6 of group 0 is not done" in hang["others"]


@pytest.mark.parametrize(
    ("smi", "problem", "signs"),
    [
        ("well", None, None), ("inforom", None, None), ("not-measured", None, None),
        ("lost", "GPU is lost", None),
        ("worn", None, "GPU 1: uncorrected ECC errors (3); GPU 1: slowed down by heat or power "
         "(Active); GPU 1: lanes of its PCIe link are down (8); GPU 1: rows of memory that a reset "
         "replaces (1)"),
    ],
)  # fmt: skip
def test_what_a_node_with_such_an_nvidia_smi_is_fit_for(gpus, monkeypatch, smi, problem, signs):
    """A warning, or memory that is not measured, is no reason to leave a node. Wear is told."""
    for name, value in gpus(count=2, smi=smi).environment().items():
        if name == "PATH" or name.startswith("SIMULATED_GPU_"):
            monkeypatch.setenv(name, value)
    found, told = check_gpus(["1"], shared=False), check_gpu_health(["1"])
    assert (found is None) if problem is None else (problem in found.reason)
    assert told == (signs and Problem("gpus", signs, is_nodes=False))
