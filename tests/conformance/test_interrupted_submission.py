"""Ctrl-C while a sweep is submitted to the fake Slurm."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from hpc_elastic.testing.fake_slurm import FakeSlurm

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "slurm"))

from sweeps import eventually  # noqa: E402

SLOW_SBATCH = """#!/bin/sh
trap '' INT TERM  # Slurm's own may have sent the job when the signal comes
{real} "$@"
touch {submitted}
sleep 2
"""


def test_an_interrupted_submission_leaves_no_run_and_prints_no_traceback(tmp_path):
    """The job that sbatch had submitted is cancelled, or ends when it starts."""
    with FakeSlurm(nodes=1) as slurm:
        submitted = tmp_path / "submitted"
        folder = tmp_path / "bin"
        folder.mkdir()
        real = next(
            p for p in map(Path, slurm.env["PATH"].split(os.pathsep)) if (p / "sbatch").exists()
        )
        (folder / "sbatch").write_text(
            SLOW_SBATCH.format(real=real / "sbatch", submitted=submitted)
        )
        (folder / "sbatch").chmod(0o755)
        env = {**slurm.env, "PATH": f"{folder}{os.pathsep}{slurm.env['PATH']}"}
        argv = [
            sys.executable,
            str(ROOT / "train.py"),
            "-m",
            "launcher=slurm",
            "hydra.sweep.dir=sweep",
        ]
        launcher = subprocess.Popen(
            argv, cwd=tmp_path, env=env, start_new_session=True, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        eventually(submitted.exists, "sbatch has submitted the job")
        os.killpg(launcher.pid, signal.SIGINT)
        output, _ = launcher.communicate(timeout=60)
        assert launcher.returncode == 130, output
        assert "Traceback" not in output and "interrupted during the submission" in output
        assert (tmp_path / "sweep" / "0" / "cancelled").exists()
        eventually(lambda: not slurm.tasks(), "the job has ended")
        assert not (tmp_path / "sweep" / "0" / "result.json").exists(), "it was not trained"
