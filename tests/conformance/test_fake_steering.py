"""A co-allocated job that ended without a result is waited for, and resumed, on the fake."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_elastic.testing.fake_slurm import FakeSlurm

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "slurm"))

from sweeps import eventually  # noqa: E402

pytestmark = pytest.mark.long
COMMAND = str(Path(sys.executable).with_name("hpc-elastic"))


class Runs:
    """A folder with train.py, and the command beside a fake Slurm."""

    def __init__(self, folder: Path, slurm: FakeSlurm) -> None:
        self.folder = folder
        self.run = folder / "sweep" / "0"
        self.env = {**os.environ, **slurm.env, "XDG_STATE_HOME": str(folder / "state")}
        for name in ("train.py", "train.yaml"):
            shutil.copy(ROOT / name, folder)

    def call(self, *argv: str, code: int = 0) -> str:
        """Return what a command prints; it has to return this exit code."""
        done = subprocess.run(
            argv, cwd=self.folder, env=self.env, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=180, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout
        return done.stdout

    def newest(self) -> int:
        """The step of the newest checkpoint; 0 if there is none."""
        steps = (int(f.name[5:]) for f in (self.run / "checkpoints").glob("step-*"))
        return max(steps, default=0)


@pytest.fixture
def runs(tmp_path) -> Iterator[Runs]:
    """Three nodes, on which nothing is left afterwards."""
    with FakeSlurm(nodes=3, grace_s=10) as slurm:
        yield Runs(tmp_path, slurm)


def test_a_coallocated_job_that_was_cancelled_by_hand_is_seen_to_be_lost_and_resumed(runs):
    """By scancel: no process is left to write a result. It is resumed as a smaller one."""
    runs.call(
        COMMAND, "submit", "train.py", "launcher=slurm", "nodes=2:3",
        "launcher.coallocate_min=true",
        "pause_s=0.1", "epochs=40", "save_every_s=2", "hydra.sweep.dir=sweep",
    )  # fmt: skip
    eventually(runs.newest, "the job has saved")
    assert "still has tasks" in runs.call(COMMAND, "resume", "last", code=1)
    jobs = {*runs.call("squeue", "-h", "-o", "%A").split()}
    runs.call("scancel", *jobs)
    told = runs.call(COMMAND, "logs", "last", "--follow", code=1)
    assert "it is lost: none of its tasks is left" in told and "hpc-elastic resume" in told
    for nodes, *more in (["1:2"], ["1", "launcher.coallocate_min=false"]):
        before = runs.newest()
        runs.call(COMMAND, "resume", "last", f"nodes={nodes}", *more)
        eventually(lambda before=before: runs.newest() > before, "it goes on from its checkpoint")
        runs.call(COMMAND, "cancel", "last", "--yes")
    told = json.loads(runs.call(COMMAND, "status", "last", "--json"))
    assert told["phase"] == told["ended"]["status"] == "cancelled"
