"""`torchrun --rdzv-backend=slurm` outside of Slurm."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TORCHRUN = str(Path(sys.executable).parent / "torchrun")


@pytest.mark.parametrize("program", [[TORCHRUN], [sys.executable, "-m", "torch.distributed.run"]])
def test_outside_of_slurm_one_line_says_what_to_do(program, tmp_path):
    """torch lets the error through as it is: a traceback of its own frames."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    argv = [*program, "--nnodes=1", "--rdzv-backend=slurm", "train.py"]
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "torchrun --rdzv-backend=slurm: this is no job step of Slurm (SLURM_JOB_ID is not set): "
        "start it by `srun torchrun ...` in an sbatch script, or after salloc; on this machine "
        "alone use `torchrun --standalone`"
    )
