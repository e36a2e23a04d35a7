"""A submission from a shell with options for sbatch, through a site's wrappers of the commands."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import Phase

DEADLINE_S = 60
COMMANDS = ("sbatch", "squeue", "scontrol", "scancel", "sinfo")
SHELL = {
    "SBATCH_TIMELIMIT": "1", "SBATCH_PARTITION": "high", "SBATCH_NO_REQUEUE": "1",
    "SBATCH_ARRAY_INX": "0-3", "SBATCH_MEM_PER_NODE": "7", "SBATCH_OUTPUT": "/dev/null",
    "SBATCH_EXPORT": "NONE", "SALLOC_PARTITION": "high", "SRUN_OUTPUT": "/dev/null",
    "SLURM_TIMELIMIT": "1",
}  # fmt: skip


@pytest.fixture
def client(slurm, tmp_path) -> SlurmClient:
    """Return a client in such a shell, whose commands print banners before and after the answer."""
    env = {**os.environ, **slurm.env, **SHELL}
    for name in COMMANDS:
        real = shutil.which(name, path=env["PATH"])
        wrapper = tmp_path / "bin" / name
        wrapper.parent.mkdir(exist_ok=True)
        wrapper.write_text(
            f'#!/bin/bash\necho "** Maintenance on 24.12. | read on **"\n{real} "$@"; rc=$?\n'
            'echo "17 hours are left" >&2; echo; echo "Bye 9"; exit $rc\n'
        )
        wrapper.chmod(0o755)
    return SlurmClient(30, env={**env, "PATH": f"{tmp_path / 'bin'}:{env['PATH']}"})


def eventually(ask, wanted) -> None:
    """Ask until the answer is as wanted."""
    deadline = time.monotonic() + DEADLINE_S
    while (answer := ask()) != wanted:
        assert time.monotonic() < deadline, answer
        time.sleep(0.2)


def test_a_script_alone_decides_about_its_job(client, slurm, tmp_path):
    """The job is found by its id, has the options of its script, and can be cancelled."""
    script = Path(tmp_path / "job.sbatch")
    script.write_text(
        f"#!/bin/bash\n#SBATCH --partition=low --time=7 --requeue --output={tmp_path}/%j.log\n"
        "env\nsleep 600\n"
    )
    job = client.sbatch(script)
    eventually(lambda: [s.phase for s in client.tasks([job]).values()], [Phase.RUNNING])
    shown = slurm.run(["scontrol", "-o", "show", "job", job]).stdout.split()
    assert {"Partition=low", "TimeLimit=00:07:00", "Requeue=1"} <= set(shown)
    assert not any(word.startswith("ArrayTaskId=") for word in shown)
    eventually(lambda: "SLURM_JOB_ID" in (tmp_path / f"{job}.log").read_text(), True)
    names = {line.partition("=")[0] for line in (tmp_path / f"{job}.log").read_text().splitlines()}
    assert not names & set(SHELL)
    assert set(client.partitions()) >= {"low", "high"}
    client.cancel([job])
    eventually(lambda: [s.state for s in client.tasks([job]).values()], ["CANCELLED"])
    client.cancel([job])
