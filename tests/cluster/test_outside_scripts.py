"""Scripts without a line of ours.

One asks Slurm for its ranks, spawns its loader, and ends slowly; one has Lightning's Trainer.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sweeps import eventually

from hpc_elastic.report.attempts import EventIndex
from hpc_elastic.report.timeline import build_timeline
from hpc_elastic.run.events import read_events
from slurm_sandbox import SlurmSandbox
from undisturbed import UNCHANGED, undisturbed

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


@pytest.mark.long
def test_a_lightning_script_is_exact_as_it_is(slurm: SlurmSandbox, tmp_path):
    """It grows, loses a node in an epoch and has it back; audit and parameters prove the rest."""
    pytest.importorskip("lightning.pytorch", reason="pip install -e '.[frameworks]'")
    script, path = UNCHANGED / "lightning_trainer.py", tmp_path / "run"
    argv = [sys.executable, "-m", "hpc_elastic", "run", "--launcher=slurm", "--nodes=1:2"]
    argv += ["--nproc-per-node=1", "--scale-up=immediate", f"--run-dir={path}", "--"]
    with subprocess.Popen(
        slurm.on_login([*argv, sys.executable, str(script), "result.json"]),
        cwd=tmp_path, env={**os.environ, **slurm.env, "PAUSE_S": "1.2"}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as run:  # fmt: skip

        def rounds(kind: str = "round") -> list[dict]:
            if run.poll() is not None:
                pytest.fail(f"it has ended: {run.communicate()[0]}")
            events = read_events(path / "events") if (path / "events").exists() else []
            return [event for event in events if event["kind"] == kind]

        def trains(size: int, after: int = 0) -> int:
            """Wait for the first step of a later round of this size; return its number."""

            def sized() -> list[int]:
                began = {e["round"] for e in rounds("first_step")}
                found = [(e["number"], e["world_size"]) for e in rounds()]
                return [n for n, world in found if n > after and world == size and n in began]

            eventually(sized, f"{size} nodes train")
            return sized()[0]

        try:
            number = trains(2)
            slurm.preempt(["node2"], for_s=45)
            number = trains(2, trains(1, number))
            output = run.communicate(timeout=500)[0]
        finally:
            run.kill()
    assert run.returncode == 0, output
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["steps"] == 90
    torch.testing.assert_close(
        torch.tensor(result["parameters"]), undisturbed(), rtol=1e-4, atol=1e-5
    )
    audit = [sys.executable, "-m", "hpc_elastic", "audit", str(path)]
    audited = subprocess.run(audit, capture_output=True, text=True, timeout=100, check=False)
    assert audited.returncode == 0, audited.stdout + audited.stderr
    story = build_timeline(EventIndex(read_events(path / "events")))
    assert [entry.cost.lost_steps for entry in story if entry.kind == "shrank"] == [0]


@pytest.mark.long
def test_a_script_continues_from_its_own_checkpoint(slurm: SlurmSandbox, tmp_path):
    """It is killed while it saves, and loses a node; no epoch that is saved is trained again."""
    script = UNCHANGED / "own_resume.py"
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    subprocess.run([sys.executable, script], cwd=whole, env={**os.environ, **alone}, check=True)
    settings = 'launcher: slurm\nnodes: "1:2"\nnproc_per_node: 1\nscale_up: immediate\n'
    settings += "resume_args: [--resume, '{newest:out/check*.pt}']\nrun_dir: run\n"
    (parts / "hpc_elastic.yaml").write_text(settings)
    env = {**os.environ, **slurm.env, "PAUSE_S": "1.2", "DIES_IN_SAVE_OF": "3"}
    argv = [sys.executable, "-m", "hpc_elastic", "run", "--", sys.executable, str(script)]
    with subprocess.Popen(
        slurm.on_login(argv), cwd=parts, env=env, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as run:  # fmt: skip

        def num_epochs() -> int:
            if run.poll() is not None:
                pytest.fail(f"it has ended: {run.communicate()[0]}")
            file = parts / "epochs"
            return len(file.read_text().split()) if file.exists() else 0

        try:
            eventually(lambda: num_epochs() >= 4, "epoch 3 is saved")
            slurm.preempt(["node1"], for_s=20)
            output = run.communicate(timeout=300)[0]
        finally:
            run.kill()
    assert run.returncode == 0, output
    events = read_events(parts / "run" / "events")
    assert len([e for e in events if e["kind"] == "round"]) >= 3
    assert [int(line) for line in (parts / "epochs").read_text().split()] == [*range(8)]
    assert (parts / "result.json").read_text() == (whole / "result.json").read_text()
    said = "".join(f.read_text() for f in (parts / "run" / "tasks").rglob("*rank-0.err"))
    assert said.count("continues from out/checkpoint.pt, which this run wrote at") >= 2, said
