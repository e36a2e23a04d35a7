"""A script without a line of ours: it asks Slurm who it is, spawns its loader, and ends slowly."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sweeps import eventually

from slurm_sandbox import SlurmSandbox

SCRIPT = """
import os, subprocess, threading, time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader


def main():
    names = os.environ["SLURM_JOB_NODELIST"]
    hosts = subprocess.check_output(["scontrol", "show", "hostnames", names], text=True).split()
    rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    assert size == int(os.environ["SLURM_JOB_NUM_NODES"]) == len(hosts)
    assert int(os.environ["SLURM_LOCALID"]) == 0
    where = f"tcp://{hosts[0]}:29511"
    dist.init_process_group("gloo", where, timedelta(seconds=120), rank=rank, world_size=size)
    saved, done = Path("saved"), Path("done")
    step = torch.tensor(int(saved.read_text()) if saved.exists() else 0)
    dist.broadcast(step, 0)
    loader = DataLoader(range(10**9), batch_size=4, num_workers=1,
                        multiprocessing_context="spawn")
    for batch in loader:
        over = torch.tensor(int(done.exists()))
        dist.all_reduce(over)
        if over:
            break
        time.sleep(0.1)
        step += 1
        if rank == 0:
            with open("steps", "a") as file:
                file.write(f"{int(step)} {size}\\n")
            Path("new").write_text(str(int(step)))
            Path("new").replace(saved)
    dist.destroy_process_group()
    threading.Thread(target=time.sleep, args=(70,)).start()  # a tracker that still sends


if __name__ == "__main__":
    main()
"""


@pytest.mark.long
def test_it_trains_in_groups_loses_a_node_and_ends_in_its_own_time(slurm: SlurmSandbox, tmp_path):
    """In each round it is one group, by Slurm's names alone; all else is as by default."""
    (tmp_path / "script.py").write_text(SCRIPT)
    argv = [sys.executable, "-m", "hpc_elastic", "run", "--launcher=slurm", "--nodes=1:2"]
    argv += ["--nproc-per-node=1", "--scale-up=immediate", "--"]  # else it waits for a boundary
    with subprocess.Popen(
        slurm.on_login([*argv, sys.executable, "script.py"]),
        cwd=tmp_path, env={**os.environ, **slurm.env}, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as run:  # fmt: skip

        def steps() -> list[list[int]]:
            if run.poll() is not None:
                pytest.fail(f"it has ended: {run.communicate()[0]}")
            file = tmp_path / "steps"
            lines = file.read_text().splitlines() if file.exists() else []
            return [[int(word) for word in line.split()] for line in lines]

        def trains(size: int, since: int) -> None:
            eventually(
                lambda: sum(s == size for _, s in steps()[since:]) > 5, f"{size} nodes train"
            )

        try:
            trains(2, 0)
            num = len(steps())
            slurm.preempt(["node2"], for_s=20)
            trains(1, num)
            num = len(steps())
            trains(2, num)
            made = [step for step, _ in steps()]
            (tmp_path / "done").touch()
            output = run.communicate(timeout=300)[0]
        finally:
            run.kill()
    assert run.returncode == 0, output
    assert sorted(set(made)) == list(range(1, made[-1] + 1)), "no step is missing"
    (result,) = tmp_path.rglob("result.json")
    assert json.loads(result.read_text())["restarts"] == 0, output
    assert not list(Path(tmp_path).rglob("error.json")), output
