"""`hpc-elastic init` on a real Slurm: what it writes trains there."""

import os
import subprocess
import sys

import pytest

PATIENCE_S = 180


@pytest.mark.long
def test_the_files_that_init_writes_train_on_the_cluster(slurm, tmp_path):
    """In an empty folder; the cluster file of the first call is not replaced."""
    env = {**os.environ, **slurm.env}

    def run(*argv: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, *argv], cwd=tmp_path, env=env, text=True, timeout=PATIENCE_S,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == code, done.stdout
        return done.stdout

    said = run("-m", "hpc_elastic", "init", "tux")
    assert "wrote conf/launcher/tux.yaml: partition low" in said
    assert "python train.py -m launcher=tux nodes=1:4" in said
    assert "exists: --force replaces it" in run("-m", "hpc_elastic", "init", "tux", code=1)
    output = run("train.py", "launcher=tux", "nodes=1:2", "epochs=1")
    assert "succeeded" in output
