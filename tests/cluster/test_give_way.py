"""Runs that give nodes back for the jobs of others (``launcher.give_way``)."""

import pytest
from counting import counting, undisturbed_loss
from sweeps import eventually


@pytest.fixture
def other(slurm):
    """Return a function that submits a job of somebody else, and one that says where it runs."""
    submitted: list[str] = []

    def submit(*flags: str, seconds: int = 3600) -> str:
        argv = ["sbatch", "--parsable", "-o", "/dev/null", *flags, "--wrap", f"sleep {seconds}"]
        submitted.append(slurm.run(argv).stdout.strip())
        return submitted[-1]

    yield submit
    slurm.run(["scancel", *submitted])


def nodes_of(slurm, job):
    """Return the nodes of a job that runs."""
    argv = ["squeue", "-h", "-t", "RUNNING", "-j", job, "-O", "NodeList:0"]
    listed = slurm.run(argv).stdout.strip()
    return (
        set(slurm.run(["scontrol", "show", "hostnames", listed]).stdout.split())
        if listed
        else set()
    )


def test_a_run_gives_two_nodes_back_for_a_job_that_waits_and_takes_them_again(
    slurm, sweep, tmp_path, other
):
    """All four train; a job of two nodes starts at a checkpoint, and no step is made twice."""
    run = counting(sweep, tmp_path / "run", "nodes=1:4", "launcher.give_way=on")
    eventually(lambda: run.sweep.group_sizes()[-1:] == [4], "all four train")
    job = other("-N2", "--exclusive", "-t", "10")
    eventually(lambda: nodes_of(slurm, job), "the job starts, which no node was free for")
    (given,) = run.sweep.events("nodes_given_back")
    assert (given["job"], given["needs"], len(given["tasks"])) == (job, 2, 2)
    assert nodes_of(slurm, job) == set(given["hosts"])
    eventually(lambda: run.sweep.group_sizes()[-1] == 2, "the others train on")
    stops = [e for e in run.sweep.events("round_stopped") if e["cause"] == "regroup"]
    assert stops and all("step" in e for e in stops), "after a checkpoint"

    slurm.run(["scancel", job])
    eventually(lambda: run.sweep.group_sizes()[-1] == 4, "the nodes are back")
    assert len(run.sweep.events("nodes_given_back")) == 1
    run.hurry()
    output = run.sweep.output()
    assert run.sweep.result()["status"] == "succeeded", output
    assert run.audit().returncode == 0
    assert run.sweep.value() == pytest.approx(undisturbed_loss(), rel=0.01)
