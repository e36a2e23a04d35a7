"""A run whose tasks a user submits through submitit himself, preempted on a real Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import submitit

from hpc_elastic.integrations.submitit import ElasticTask
from hpc_elastic.slurm.client import SlurmClient

PATIENCE_S = 110
"""Less than the two minutes for which Slurm would hold the requeued task."""

SCRIPT = """
import os, time
from pathlib import Path
import hydra
from hydra.core.hydra_config import HydraConfig
from hpc_elastic import mark_checkpoint, should_checkpoint
from hpc_elastic.shared_files import is_there

@hydra.main(version_base=None)
def main(cfg):
    folder = Path(HydraConfig.get().runtime.output_dir)
    saved, rank, size = folder / "saved", os.environ["RANK"], os.environ["WORLD_SIZE"]
    first = int(saved.read_text()) + 1 if is_there(saved) else 1
    with (folder / "starts").open("a") as f:
        f.write(f"{first} {size}\\n")
    if first > 1 and size == "2":
        return [line.split() for line in (folder / "starts").read_text().splitlines()]
    for step in range(first, 1 << 30):
        time.sleep(0.02)
        if should_checkpoint(step):
            if rank == "0":
                saved.write_text(str(step))
            mark_checkpoint(step=step)

if __name__ == "__main__":
    main()
"""


def wait_for(condition, what) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.mark.long
def test_submitits_jobs_are_an_elastic_run(slurm_env, tmp_path):
    """One of two is preempted: the other goes on alone, and is joined again; no step is lost.

    Slurm sends SIGTERM only, on which submitit itself does nothing.
    """
    script, sweep = tmp_path / "script.py", tmp_path / "sweep"
    script.write_text(SCRIPT)
    options = ["+launcher=slurm", "nodes=1:2", "launcher.dry_run=true", f"hydra.sweep.dir={sweep}"]
    subprocess.run([sys.executable, str(script), *options], cwd=tmp_path, check=True)
    executor = submitit.SlurmExecutor(tmp_path / "jobs")
    executor.update_parameters(time=30, exclusive=True)
    with executor.batch():
        jobs = [executor.submit(task) for task in ElasticTask.of(sweep / ".hpc_elastic")]

    starts = sweep / "0" / "starts"
    wait_for(lambda: starts.exists() and starts.read_text().count(" 2\n") == 2, "two nodes")
    client = SlurmClient(env={**os.environ, **slurm_env.env})
    node = client.tasks([jobs[1].job_id.partition("_")[0]])[jobs[1].job_id].node
    slurm_env.preempt([node], for_s=1)
    wait_for(lambda: all(job.paths.result_pickle.exists() for job in jobs), "two nodes again")
    (history,) = {tuple(map(tuple, job.result())) for job in jobs}
    steps, sizes = [int(step) for step, _ in history], [int(size) for _, size in history]
    assert sizes[:3] == [2, 2, 1] and sizes[-1] == 2
    assert steps == sorted(steps) and steps[2] > 1
    log = jobs[1].paths.stdout.read_text()
    assert "Calling checkpoint method" in log and "Requeued job" in log
