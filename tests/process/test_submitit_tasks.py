"""A run's task as a job of submitit's own, on its local executor: the checkpoint() protocol."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import submitit
from group import eventually

from hpc_elastic.errors import SubmissionError
from hpc_elastic.integrations import submitit as submitit_module
from hpc_elastic.integrations.submitit import ElasticTask

SCRIPT = """
import time
from pathlib import Path
import hydra
from hydra.core.hydra_config import HydraConfig
from hpc_elastic import mark_checkpoint, should_checkpoint

@hydra.main(version_base=None)
def main(cfg):
    folder = Path(HydraConfig.get().runtime.output_dir)
    saved = folder / "saved"
    first = int(saved.read_text()) + 1 if saved.exists() else 1
    with (folder / "starts").open("a") as f:
        f.write(f"{first}\\n")
    last = first + 5 if saved.exists() else 2000  # until it is interrupted
    for step in range(first, last + 1):
        time.sleep(0.05)
        (folder / "step").write_text(str(step))
        if should_checkpoint(step):
            saved.write_text(str(step))
            mark_checkpoint(step=step)
    return [int(line) for line in (folder / "starts").read_text().split()]

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def sweep(tmp_path) -> Path:
    """Prepare a run of one node, submit nothing, and return its sweep directory."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    folder = tmp_path / "sweep"
    options = ["+launcher=local", "nodes=1", "launcher.dry_run=true", f"hydra.sweep.dir={folder}"]
    done = subprocess.run(
        [sys.executable, str(script), *options],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def interrupt(job) -> None:
    """Send submitit's signal to the job's task, as its controller does before a time-out."""
    controller = job._process.pid
    (task,) = Path(f"/proc/{controller}/task/{controller}/children").read_text().split()
    os.kill(int(task), signal.SIGUSR2)


def test_a_job_that_submitit_interrupts_goes_on_where_it_was(sweep, tmp_path):
    """Its checkpoint() lets the run save; the next attempt has logs of its own, and the result."""
    (task,) = ElasticTask.of(sweep / ".hpc_elastic")
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    executor.update_parameters(timeout_min=30)
    job = executor.submit(task)
    run = sweep / "0"
    step = run / "step"
    eventually(lambda: step.exists() and int(step.read_text() or 0) >= 5, within_s=120)
    interrupt(job)
    starts = job.result()
    assert len(starts) == 2 and starts[0] == 1
    assert starts[1] > 5
    assert len(list((run / "tasks").glob("*/attempt-*/agent.log"))) == 2


def test_what_is_pickled_is_a_path_and_numbers(sweep):
    """Nothing of the process goes with it."""
    (task,) = ElasticTask.of(sweep / ".hpc_elastic")
    assert pickle.loads(pickle.dumps(task)) == task
    assert len(pickle.dumps(task)) < 1000


def test_a_folder_without_a_prepared_run_is_refused(tmp_path):
    """The message says how to prepare one."""
    with pytest.raises(SubmissionError, match="dry_run"):
        ElasticTask.of(tmp_path)


def test_tasks_that_are_no_job_array_are_refused(monkeypatch):
    """Each would take itself for another node of the run; the message says how to submit them."""
    monkeypatch.setattr(submitit_module, "_in_slurm", lambda: True)
    task = ElasticTask("/sweep/.hpc_elastic/array-0.json", 1)
    assert task._environment({"SLURM_ARRAY_TASK_ID": "1", "HOME": "/"})["HOME"] == "/"
    for env in ({}, {"SLURM_ARRAY_TASK_ID": "0"}):
        with pytest.raises(SubmissionError, match=r"with executor\.batch"):
            task._environment(env)


def test_a_coallocated_job_is_refused(tmp_path):
    """It is one job of several nodes, which submitit lays out in another way."""
    (tmp_path / "array-0.json").write_text('{"coallocated": true, "runs": []}')
    with pytest.raises(SubmissionError, match="coallocate_min=false"):
        ElasticTask.of(tmp_path)


def test_the_tasks_of_several_arrays_are_not_taken_for_one(tmp_path):
    """A run with pools has an array for each: without the second one it would never be whole."""
    for number in (0, 1):
        (tmp_path / f"array-{number}.json").write_text('{"runs": [{}]}')
    with pytest.raises(SubmissionError, match=r"several arrays.*ElasticTask\.of\(submission, k\)"):
        ElasticTask.of(tmp_path)
    assert len(ElasticTask.of(tmp_path, 1)) == 1
