"""The job whose exit code is the result of a submission, on a real Slurm."""

import pytest
from sweeps import eventually


@pytest.mark.long
def test_it_outlives_its_time_limit_and_what_depends_on_it_waits_on(slurm, sweep):
    """Where tasks are replaced, it starts while runs go on: here it is submitted at once."""
    run = sweep("nodes=1", "launcher.time=3", "launcher.result_job=true", "pause_s=1.0")
    script = run.folder / ".hpc_elastic" / "result-0.sbatch"
    eventually(lambda: run.events("first_step"), "it trains")

    def submit(*argv: str) -> str:
        return slurm.run(["sbatch", "--parsable", *argv]).stdout.strip()

    def field(job: str, name: str) -> str:
        words = slurm.run(["scontrol", "-o", "show", "job", job]).stdout.split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    job = submit("--partition=cancel", str(script))
    dependent = submit(f"--dependency=afterok:{job}", "--ntasks=1", "--wrap=true")
    eventually(
        lambda: field(job, "Restarts") == "1", "two minutes before its end it requeues itself"
    )
    assert field(dependent, "JobState") == "PENDING"
    assert "succeeded" in run.output()
    eventually(lambda: field(job, "JobState") == "COMPLETED", "it has seen the end of the run")
    eventually(lambda: field(dependent, "JobState") == "COMPLETED", "what depends on it runs")
