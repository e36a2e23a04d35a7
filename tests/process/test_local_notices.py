"""A node that is told to go: whole tasks and runs with `launcher=local`, no Slurm."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import psutil
import pytest
from local_runs import PATIENCE_S, LocalRun

from ended import is_gone
from hpc_elastic.slurm.environment import as_array_task, outside

SCRIPT = textwrap.dedent(
    """
    import subprocess, time
    from pathlib import Path

    import hydra
    import torch
    import torch.distributed as dist
    from hpc_elastic import mark_checkpoint, should_checkpoint

    FOLDER = Path({folder!r})
    SAVED = FOLDER / "saved"

    @hydra.main(version_base=None)
    def main(cfg):
        dist.init_process_group("gloo")
        step = int(SAVED.read_text()) if SAVED.exists() else 0
        child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        (FOLDER / f"children-{{dist.get_world_size()}}").open("a").write(f"{{child.pid}}\\n")
        over = torch.tensor(0)
        while not over:
            time.sleep(0.02)
            over = torch.tensor(int((FOLDER / "over").exists()))
            dist.all_reduce(over)
            step += 1
            print("step", step, flush=True)
            if should_checkpoint(step, every_s=1000):
                if dist.get_rank() == 0:
                    SAVED.write_text(str(step))
                dist.barrier()
                mark_checkpoint(step=step)
        dist.destroy_process_group()

    if __name__ == "__main__":
        main()
    """
)


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., LocalRun]]:
    """Starts the script's run, and ends what is left of it."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(tmp_path)))
    with contextlib.ExitStack() as started:
        yield lambda *overrides: started.enter_context(
            LocalRun(
                script, tmp_path, "+launcher=local", "nproc_per_node=1",
                "launcher.agent.warm_workers=false", *overrides,
            )
        )  # fmt: skip


def steps(run: LocalRun, number: int) -> list[list[int]]:
    """The steps that each rank of a round has made."""
    files = (run.path / "tasks").glob(f"*/attempt-0/round-{number}.rank-*.out")
    return [[int(n) for n in re.findall(r"step (\d+)\n", f.read_text())] for f in files]


@pytest.mark.long
def test_a_node_that_is_told_to_go_leaves_nothing_and_costs_nothing(start, tmp_path):
    """Its workers are there until all have saved; the other node goes on from that step."""
    run = start("nodes=1:2")
    run.eventually(lambda: [len(s) > 20 for s in steps(run, 1)] == [True, True], "two nodes train")
    agents = {e["task"]: psutil.Process(e["pid"]) for e in run.events("task")}
    task, agent = min(agents.items())
    agent.send_signal(signal.SIGTERM)
    run.eventually(lambda: is_gone(agent.pid), "the agent ends")
    (left,) = run.events("task_exited")
    assert (left["task"], left["reason"], left["how"]) == (task, "signal", "requeue")
    run.eventually(lambda: steps(run, 2) and steps(run, 2)[0], "the other node goes on")
    children = map(int, (tmp_path / "children-2").read_text().split())
    assert all(map(is_gone, children)), "whatever session they are in"

    (tmp_path / "over").touch()
    assert run.wait() == 0, run.output()
    first, other = steps(run, 1)
    (after,) = steps(run, 2)
    assert first == other == list(range(1, len(first) + 1))
    assert after == list(range(len(first) + 1, len(first) + len(after) + 1))
    assert run.events("end")[0]["restarts"] == 0


def test_a_task_that_is_told_to_go_before_it_has_joined_goes_at_once(start, tmp_path):
    """It still imports torch: the signal is neither its end nor forgotten."""
    run = start("nodes=1", "launcher.dry_run=true")
    assert run.wait() == 0
    array = tmp_path / "sweep" / ".hpc_elastic" / "array-0.json"
    task = subprocess.Popen(
        [sys.executable, "-u", "-m", "hpc_elastic.agent", str(array)],
        env={**outside(os.environ), **as_array_task(9, 0, node_name="early", cpus=1)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert "logs of this task" in task.stdout.readline()
    task.terminate()
    task.communicate(timeout=PATIENCE_S)
    assert task.returncode == 143
    assert [e["how"] for e in run.events("task_exited")] == ["exit"]
    assert not run.events("joined")
