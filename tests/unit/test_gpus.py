"""launcher=local: the machine's GPUs, divided among the nodes of a run."""

import pytest

from hpc_elastic.config.schema import LocalSettings, NodeRange, RunSettings
from hpc_elastic.errors import ConfigError
from hpc_elastic.launcher import local
from hpc_elastic.launcher.plan import RunRequest
from hpc_elastic.run.directory import Entry


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a command of this name, with this answer, before all others."""

    def install(answer: str) -> None:
        command = tmp_path / "nvidia-smi"
        command.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
        command.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        local._num_gpus.cache_clear()

    yield install
    local._num_gpus.cache_clear()


def test_what_is_visible_is_all_there_is(nvidia_smi):
    """The variable decides where it is set, empty too; else the driver is asked."""
    nvidia_smi("GPU 0: H200 (UUID: GPU-1)\n  MIG 1g (UUID: MIG-1)\nGPU 1: H200 (UUID: GPU-2)")
    assert local.machine_gpus({"CUDA_VISIBLE_DEVICES": "3"}) == ["3"]
    assert local.machine_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert local.machine_gpus({}) == ["0", "1"]


def test_a_driver_without_devices_is_no_gpu(nvidia_smi):
    """nvidia-smi is installed on login nodes, too."""
    nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    assert local.machine_gpus({}) == []


@pytest.mark.parametrize(
    ("num_gpus", "num_nodes", "shares"),
    [
        (4, 2, ["0,1", "2,3"]),
        (8, 3, ["0,1", "2,3", "4,5"]),
        (2, 2, ["0", "1"]),
        (2, 1, ["0,1"]),
    ],
)
def test_every_node_gets_gpus_of_its_own(num_gpus, num_nodes, shares):
    """Equal shares in order, whichever nodes run at the time."""
    devices = [str(n) for n in range(num_gpus)]
    made = [
        local.gpu_variables(devices, "auto", slot=slot, num_nodes=num_nodes)
        for slot in range(num_nodes)
    ]
    assert made == [{"CUDA_VISIBLE_DEVICES": share} for share in shares]


def test_without_gpus_nothing_is_set():
    """A laptop's environment stays as it is."""
    assert local.gpu_variables([], "auto", slot=0, num_nodes=2) == {}


def test_workers_for_cpus_get_no_gpu():
    """Scripts that use CUDA where it is available would meet on GPU 0."""
    made = local.gpu_variables(["0"], "cpu", slot=1, num_nodes=2)
    assert made == {"CUDA_VISIBLE_DEVICES": ""}


def planned(tmp_path, nodes: NodeRange, nproc) -> list[RunRequest]:
    """Return one run as it would be submitted."""
    return [
        RunRequest(tmp_path, RunSettings(nodes, nproc, LocalSettings()), Entry("function", "f"))
    ]


@pytest.mark.parametrize("nproc", ["auto", "gpu", 1])
def test_more_nodes_than_gpus_are_refused(tmp_path, nproc):
    """Two processes of one group can not share a GPU; both numbers and the ways out are told."""
    runs = planned(tmp_path, NodeRange(1, 3), nproc)
    with pytest.raises(
        ConfigError, match=r"^nodes='1:3'.* 3 nodes .* has 2 GPUs.*nproc_per_node=cpu"
    ):
        local.require_gpus(runs, ["0", "1"])
    local.require_gpus(runs, ["0", "1", "2"])
    local.require_gpus(runs, [])
    local.require_gpus(planned(tmp_path, NodeRange(1, 3), "cpu"), ["0"])
