"""`torchrun --rdzv-backend=slurm` inside a two-node srun, without this package's launcher."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
said = f"rank {dist.get_rank()} of {int(total)} on {os.uname().nodename}"
os.write(1, f"{said}\\n".encode())  # in one piece
fails = "--fail" in sys.argv and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if fails and dist.get_rank() == 1:
    raise SystemExit(3)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def torchrun(slurm, tmp_path):
    """Runs the script on two nodes under torchrun with our backend; returns what it printed."""

    def run(*options: str, arguments: tuple[str, ...] = ()) -> str:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        program = [str(Path(sys.executable).parent / "torchrun"), "--rdzv-backend=slurm"]
        conf = f"--rdzv-conf=key_file={tmp_path / 'key'}"
        done = subprocess.run(
            ["srun", "-N2", "--ntasks-per-node=1", *program, conf, *options, script, *arguments],
            env={**os.environ, **slurm.env}, capture_output=True, text=True, timeout=180,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_two_nodes_form_one_group(torchrun):
    """Both nodes are waited for, though one would do, and each has its ranks."""
    out = torchrun("--nnodes=1:2", "--nproc-per-node=2")
    for rank in range(4):
        assert f"rank {rank} of 4 on node" in out
    assert len(set(re.findall(r"on (node\d)", out))) == 2


@pytest.mark.long
def test_torchruns_own_restarts_work(torchrun):
    """A worker that fails once is restarted by the stock agents, in a new round."""
    out = torchrun("--nnodes=2", "--nproc-per-node=1", "--max-restarts=1", arguments=("--fail",))
    assert out.count("rank 1 of 2") == 2
