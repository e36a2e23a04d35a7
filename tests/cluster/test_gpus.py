"""The GPUs of a worker are those that Slurm granted its job, whichever way they are asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from variants import cluster

from slurm_sandbox import SandboxConfig, SlurmSandbox

CONFIG = SandboxConfig(
    name="gpus", nodes=3, gpus=("gpu:a100:2,gpu:1g.10gb:2", "gpu:a100:1", "gpu:a100:2,shard:8")
)
SCRIPT = """
import os, pathlib
pathlib.Path(os.environ["SLURMD_NODENAME"]).write_text(os.environ["CUDA_VISIBLE_DEVICES"])
"""


@pytest.fixture(scope="module")
def gpus(slurm) -> Iterator[SlurmSandbox]:
    """Yield a cluster whose nodes have different GPUs."""
    for up in cluster(CONFIG, slurm):
        yield up.slurm


def devices(slurm: SlurmSandbox, folder: Path, *flags: str, script: str = SCRIPT) -> dict[str, str]:
    """Return what the worker of each node of a run writes: CUDA_VISIBLE_DEVICES."""
    file = folder / "show.py"
    file.write_text(script)
    argv = [sys.executable, "-m", "hpc_elastic", "run", "--launcher=slurm", "--nproc-per-node=1"]
    done = subprocess.run(
        slurm.on_login([*argv, *flags, "--", sys.executable, str(file)]),
        cwd=folder, env={**os.environ, **slurm.env}, text=True, capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.name: path.read_text() for path in folder.glob("node?")}


ON_1, ON_3 = "--exclude=node[2-3]", "--exclude=node[1-2]"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        pytest.param([ON_1], {"node1": "0,1,2,3"}, marks=pytest.mark.long),
        ([ON_1, "--gpus-per-node=a100:1"], {"node1": "0"}),
        pytest.param(
            [ON_1, "--gpus-per-node=2", "--exclusive=true", "--mem=0"], {"node1": "0,1"},
            marks=pytest.mark.long,
        ),
        pytest.param(
            [ON_1, "--gpus-per-node=1g.10gb:2"], {"node1": "2,3"}, marks=pytest.mark.long
        ),
        pytest.param(
            [ON_1, "--gpus-per-node=a100:1,1g.10gb:1"], {"node1": "0,2"}, marks=pytest.mark.long
        ),
        pytest.param(
            [ON_1, "--sbatch={gres: 'gpu:a100:2'}"], {"node1": "0,1"}, marks=pytest.mark.long
        ),
        pytest.param(
            [ON_1, "--gpus-per-node=2", "--cpus-per-node=4"], {"node1": "0,1"},
            marks=pytest.mark.long,
        ),
        pytest.param(
            [ON_3, "--sbatch={gres: 'shard:2'}"], {"node3": "0"}, marks=pytest.mark.long
        ),
        pytest.param(
            ["--nodes=2", "--exclude=node1", "--coallocate-min=true"],
            {"node2": "0", "node3": "0,1"},
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_a_worker_has_the_gpus_of_its_job(gpus, tmp_path, flags, expected):
    """On a whole node all of them; a step has none of those that only --exclusive has given."""
    assert devices(gpus, tmp_path, *flags) == expected


@pytest.mark.long
def test_a_step_may_ask_for_fewer_gpus_than_its_job(gpus, tmp_path):
    """A flag of the user's takes the place of ours: srun refuses two ways to ask."""
    assert devices(gpus, tmp_path, ON_1, "--srun-args=['--gres=gpu:a100:1']") == {"node1": "0"}


TRIES = """
import errno, os, pathlib
codes = []
for index in range(3):
    try:
        os.close(os.open(f"{os.environ['DEVICES']}{index}", os.O_RDWR))
    except OSError as e:
        codes.append(errno.errorcode[e.errno])
pathlib.Path(os.environ["SLURMD_NODENAME"]).write_text(
    os.environ["CUDA_VISIBLE_DEVICES"] + " " + " ".join(codes)
)
"""


@pytest.mark.long
@pytest.mark.skipif(
    not Path("/sys/fs/cgroup/devices").is_dir(), reason="needs cgroups of the first version"
)
def test_a_worker_opens_the_devices_of_its_job_alone(slurm, tmp_path, monkeypatch):
    """With task/cgroup and ConstrainDevices: no driver answers for its own (ENXIO) in this test."""
    config = SandboxConfig(name="devices", nodes=1, gpus_per_node=3, constrain_devices=True)
    for up in cluster(config, slurm):
        monkeypatch.setenv("DEVICES", str(up.slurm.home.parent / "dev" / "gpu"))
        found = devices(up.slurm, tmp_path, "--gpus-per-node=2", script=TRIES)
        assert found == {"node1": "0,1 ENXIO ENXIO EPERM"}
        assert devices(up.slurm, tmp_path, script=TRIES) == {"node1": "0,1,2 ENXIO ENXIO ENXIO"}
