"""`submit --test-only`, and the next node in `status`, beside a queue that backfill has planned."""

import json
import os
import shutil
import subprocess
import sys
import time
from datetime import datetime

import pytest
from sweeps import ROOT, eventually

HOUR = 3600.0


def command(slurm, folder, *argv) -> dict:
    """What a command prints as JSON."""
    done = subprocess.run(
        slurm.on_login([sys.executable, "-m", "hpc_elastic", *map(str, argv)]), cwd=folder,
        env={**os.environ, **slurm.env}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def sbatch(slurm, *options: str, seconds: int = 600) -> str:
    """Submit a job that sleeps; return its id."""
    argv = ["sbatch", "--parsable", "--exclusive", "-o", "/dev/null", *options]
    return slurm.run([*argv, "--wrap", f"sleep {seconds}"]).stdout.strip()


def start_of(slurm, job: str) -> str:
    """The planned or real start of a job, as squeue prints it."""
    return slurm.run(["squeue", "-h", "-j", job, "-o", "%S"]).stdout.strip()


@pytest.fixture
def queue(slurm):
    """All nodes but one are busy, one of them for half an hour and the others for an hour.

    Then a job of all nodes is planned for two hours.
    """
    num = len(slurm.nodes)
    jobs = [sbatch(slurm, f"-N{num - 2}", "-t", "60"), sbatch(slurm, "-N1", "-t", "30")]
    eventually(lambda: all("20" in start_of(slurm, job) for job in jobs), "the other jobs run")
    jobs.append(sbatch(slurm, f"-N{num}", "-t", "120"))
    eventually(lambda: start_of(slurm, jobs[-1]) not in ("", "N/A"), "the start is planned")
    sinfo = ["sinfo", "-h", "-p", "low", "-o", "%T"]
    eventually(lambda: "planned" in slurm.run(sinfo).stdout, "a node is planned")
    yield jobs
    slurm.run(["scancel", *jobs])


def test_a_start_is_forecast_from_jobs_that_ended_long_before_their_limits(slurm, sweep, tmp_path):
    """They used some seconds of minutes; so does the one that has all nodes, most probably."""
    for _ in range(6):
        sbatch(slurm, "-N1", "-t", "3", "-p", "low", seconds=3)
    ended = ["squeue", "-h", "-t", "CD", "-o", "%A", "-p", "low"]
    eventually(lambda: len(slurm.run(ended).stdout.split()) >= 6, "jobs have ended")
    long = sbatch(slurm, f"-N{len(slurm.nodes)}", "-t", "30", "-p", "low")
    state = ["squeue", "-h", "-j", long, "-o", "%T"]
    eventually(lambda: "RUNNING" in slurm.run(state).stdout, "a job has all nodes")
    run = sweep("nodes=1:2", "launcher.time=20", "launcher.partition=low")
    queued = ["squeue", "-h", "-t", "PD", "-o", "%r", "-p", "low"]
    eventually(lambda: "Resources" in slurm.run(queued).stdout, "its tasks wait")
    found = command(slurm, tmp_path, "status", "--json", run.run())["next_node"]
    learned, at = found["learned"], found["at"]
    assert "ended jobs (squeue)" in found["learned_from"]
    assert time.time() - 60 < learned["p10"] <= learned["p50"] <= learned["p90"]
    assert at is None or learned["p50"] < at, "sooner than by time limits"
    slurm.run(["scancel", long])
    eventually(lambda: bool(run.events("task")), "a task starts")
    assert learned["p10"] - 60 <= run.events("task")[0]["time"] <= learned["p90"] + 60
    run.process.terminate()


@pytest.mark.long
def test_the_forecast_comes_true(slurm, queue, sweep, tmp_path):
    """A task that fits starts in the gap at once; the next node is planned in three hours."""
    for name in ("train.py", "train.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    arguments = ("train.py", "launcher=slurm", "launcher.partition=low", "nodes=1:2")
    found = command(
        slurm, tmp_path, "submit", "--test-only", "--json", *arguments, "launcher.time=240"
    )
    own, shorter = found["shapes"][0], found["shapes"][found["soonest"]]
    assert (found["idle"], found["planned"], found["unknown"]) == (1, 1, 0)
    assert own["starts_at"] - found["time"] == pytest.approx(3 * HOUR, abs=300)
    assert shorter["time_limit_s"] == HOUR / 2 and shorter["starts_at"] - found["time"] < 60
    assert shorter["growth"][0]["nodes"] == 1 and "1" in found["test_only"]
    assert not list(tmp_path.glob("multirun"))

    run = sweep(
        "nodes=1:2", "epochs=1000", "pause_s=0.25", "launcher.time=40", "launcher.partition=low"
    )  # the gap of an hour is too short for two of them
    eventually(lambda: len(run.events("first_step")) == 1, "it trains in the gap")

    def is_planned() -> bool:
        """Whether its plan is that of a pass of backfill after the start of the first task."""
        expected = command(slurm, tmp_path, "status", "--json", run.run())["next_node"]
        print(time.time(), expected)
        at = expected["at"]
        return at is not None and at - time.time() == pytest.approx(3 * HOUR, abs=300)

    eventually(is_planned, "the second task is planned in three hours")
    found = command(slurm, tmp_path, "status", "--json", run.run())["next_node"]
    assert found["shorter_s"] < HOUR * 2 / 3 and found["shorter_at"] - time.time() < HOUR
    run.process.terminate()


@pytest.mark.long
def test_a_task_with_a_fitted_limit_is_expected_in_the_next_gap(slurm, queue, sweep, tmp_path):
    """Slurm plans it with its present limit, for which the gap of half an hour is too short."""
    run = sweep(
        "nodes=1:2", "epochs=1000", "pause_s=0.25", "launcher.time=240", "launcher.time_min=10",
        "launcher.partition=low",
    )  # fmt: skip
    eventually(lambda: len(run.events("first_step")) == 1, "it trains in the gap of an hour")
    task = run.events("round")[-1]["members"][0]["task"].partition("_")[0] + "_1"

    def is_planned() -> bool:
        """Whether Slurm has planned the second task for when the other jobs have ended."""
        try:
            at = datetime.fromisoformat(start_of(slurm, task)).timestamp()
        except ValueError:  # N/A
            return False
        return at - time.time() > 2 * HOUR

    eventually(is_planned, "the second task is planned in three hours")
    at = command(slurm, tmp_path, "status", "--json", run.run())["next_node"]["at"]
    assert at - time.time() == pytest.approx(HOUR / 2, abs=120)
    run.process.terminate()
