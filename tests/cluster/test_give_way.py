"""Runs that give nodes back for the jobs of others (``launcher.give_way``)."""

import time

import pytest
from counting import counting, undisturbed_loss
from sweeps import eventually

from hpc_elastic.site.neighbours import CHECK_S
from hpc_elastic.slurm.nodelist import expand


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
    return {node for line in slurm.run(argv).stdout.split() for node in expand(line)}


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


@pytest.mark.long
def test_each_kind_of_job_that_could_start_gets_nodes_and_others_get_none(
    slurm, sweep, tmp_path, other
):
    """Each in turn; the last job is cancelled while nodes go back. Each sample is seen once."""
    run = counting(sweep, tmp_path / "run", "nodes=1:4", "launcher.give_way=auto")
    eventually(lambda: run.sweep.group_sizes()[-1:] == [4], "all four train")
    held = other("-N1", "-H")
    fruitless = [
        held, other("-N1", f"--dependency=afterok:{held}"), other("-N1", "--begin=now+2hours"),
        other("-N4", "-t", "5"), other("-N1", "--nice=100000000"),
    ]  # fmt: skip
    time.sleep(3 * CHECK_S)  # three checks: that nothing happens can only be waited for
    assert run.sweep.events("nodes_given_back") == []
    slurm.run(["scancel", *fruitless])

    last = run.sweep.events("round")[-1]["members"][-1]["host"]
    kinds = {
        "GPUs, a share of a node": ["-N1", "-n1", "--gres=gpu:1"],
        "CPUs on as many nodes as they need": ["-n", "12", "-t", "3"],
        "a named node": ["-w", last],
        "an array": ["--array=0-1", "--exclusive"],
    }
    for number, (kind, flags) in enumerate(kinds.items()):
        job = other("-t", "5", *flags)
        eventually(lambda job=job: nodes_of(slurm, job), f"{kind}: it starts")
        given = run.sweep.events("nodes_given_back")
        assert {event["job"] for event in given[number:]} == {job}, kind
        eventually(lambda: run.sweep.group_sizes()[-1] < 4, f"{kind}: the others train on")
        slurm.run(["scancel", job])
        eventually(lambda: run.sweep.group_sizes()[-1] == 4, f"{kind}: the nodes are back")

    before = len(run.sweep.events("nodes_given_back"))
    job = other("-N3", "--exclusive", "-t", "5")
    eventually(lambda: len(run.sweep.events("nodes_given_back")) > before, "nodes go back")
    slurm.run(["scancel", job])
    eventually(lambda: run.sweep.group_sizes()[-1] < 4, "as announced")
    eventually(lambda: run.sweep.group_sizes()[-1] == 4, "the nodes are back")
    run.hurry()
    output = run.sweep.output()
    assert run.sweep.result()["status"] == "succeeded", output
    assert "launcher.give_way=auto: nodes beyond the minimum go back for waiting jobs" in output
    assert run.audit().returncode == 0


@pytest.mark.long
def test_a_run_that_gives_all_returns_its_minimum_too(slurm, sweep, tmp_path, other):
    """It waits in the queue behind the job, and goes on where it was."""
    run = counting(sweep, tmp_path / "run", "nodes=2:4", "launcher.give_way=all")
    eventually(lambda: run.sweep.group_sizes()[-1:] == [4], "all four train")
    job = other("-N4", "--exclusive", "-t", "10")
    eventually(lambda: len(nodes_of(slurm, job)) == 4, "the job has all nodes")
    rounds = len(run.sweep.events("round"))
    slurm.run(["scancel", job])
    eventually(lambda: run.sweep.group_sizes()[rounds:][-1:] == [4], "all four train again")
    run.hurry()
    output = run.sweep.output()
    assert run.sweep.result()["status"] == "succeeded", output
    assert run.audit().returncode == 0
