"""Runs of the README's script on a machine with GPUs."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from hpc_elastic.agent.preflight import check_gpus

ROOT = Path(__file__).parents[2]


def test_the_first_command_trains_by_nccl_with_a_gpu_for_each_worker(gpus, tmp_path):
    """Two nodes share the machine's GPUs; no worker touches another's."""
    machine = gpus(count=4)
    for name in ("train.py", "train.yaml"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "train.py", "launcher=local", "nodes=1:2", "epochs=2"],
        cwd=tmp_path, env=machine.environment(), text=True, capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = tmp_path.rglob("result.json")
    assert json.loads(result.read_text())["status"] == "succeeded"
    communicators = machine.events("nccl_init")
    assert not machine.events("duplicate_gpu")
    assert {event["size"] for event in communicators} == {4}
    assert Counter(event["device"] for event in communicators) == dict.fromkeys(range(4), 1)
    contexts = machine.contexts()
    assert all(
        contexts[event["host"], event["pid"]] == {event["device"]} for event in communicators
    )


@pytest.mark.parametrize(
    ("smi", "problem"),
    [("well", None), ("inforom", None), ("not-measured", None), ("lost", "GPU is lost")],
)
def test_what_a_node_with_such_an_nvidia_smi_is_fit_for(gpus, monkeypatch, smi, problem):
    """A warning, or memory that is not measured, is no reason to leave a node."""
    for name, value in gpus(count=2, smi=smi).environment().items():
        if name == "PATH" or name.startswith("SIMULATED_GPU_"):
            monkeypatch.setenv(name, value)
    found = check_gpus(["0", "1"], shared=False)
    assert (found is None) if problem is None else (problem in found.reason)
