"""Runs that give nodes back for the jobs of others (``launcher.give_way``)."""

import time

import pytest
from counting import counting, undisturbed_loss
from sweeps import eventually

from hpc_elastic.site.neighbours import CHECK_S
from hpc_elastic.slurm.job_state import WAITS_FOR_NODES
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
    slurm.run(["scancel", *submitted], check=False)


def nodes_of(slurm, job):
    """Return the nodes of a job that runs."""
    argv = ["squeue", "-h", "-t", "RUNNING", "-j", job, "-O", "NodeList:0"]
    return {node for line in slurm.run(argv).stdout.split() for node in expand(line)}


def test_a_run_gives_two_nodes_back_for_a_job_that_waits_and_takes_them_again(
    slurm, sweep, tmp_path, other
):
    """All four train; a job of two nodes starts at a checkpoint, and no step is made twice."""
    run = counting(sweep, tmp_path / "run", "nodes=1:4", "launcher.give_way=on")
    # before its first step a node is left without a checkpoint
    eventually(lambda: len(run.sweep.events("first_step")) == 4, "all four train")
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


KEPT = {
    "held": (["-H"], ["JobHeldUser"]),
    "begins later": (["--begin=now+2hours"], ["BeginTime"]),
    "needs more nodes than may go back": (["-N4"], WAITS_FOR_NODES),
    "gives way itself": (["--nice=100000000"], WAITS_FOR_NODES),
    "its other part could not start": ([":", "-N3"], WAITS_FOR_NODES),
    "more GPUs than nodes that may go back have": (["--gpus=5"], WAITS_FOR_NODES),
    "one of its two nodes stays": (["-N2", "-w", "{stays}"], WAITS_FOR_NODES),
    "a feature of a node that stays": (["-C", "stays"], WAITS_FOR_NODES),
    "a partition of other nodes": (["-p", "apart"], WAITS_FOR_NODES),
    "of a reservation": (["--reservation=theirs"], ["Reservation", *WAITS_FOR_NODES]),
    "reaches into a reservation": (["-t", "60"], WAITS_FOR_NODES),
}
"""Jobs that get nothing, each with its flags and with the reasons of Slurm, one of them."""
GIVEN = (
    {"a feature": ["-C", "goes", "--exclusive"], "a share of a node": ["-n1", "--gres=gpu:1"]},
    {"as many nodes as the CPUs need": ["-n", "12"]},
    {"a named node": ["-w", "{goes}", "--exclusive"], "memory": ["-N1", "--mem=60G"]},
    {"an array": ["--array=0-1", "--exclusive"]},
    {"GPUs in all": ["--gpus=3"]},
    {"GPUs of each task": ["-n4", "--gpus-per-task=1"]},
    {"two nodes or three": ["-N2-3", "--exclusive"]},
    {"a named node and another one": ["-N2", "-w", "{goes}", "--exclusive"]},
    {"two parts": ["--exclusive", ":", "--exclusive"]},
    {"memory of each CPU": ["-n4", "--mem-per-cpu=15G", "--exclusive"]},
    {"another partition": ["-N1", "-p", "short", "--exclusive"], "exclusive": ["--exclusive"]},
)
"""Jobs that get nodes, those of a row at the same time."""


@pytest.fixture
def site(slurm):
    """Return a function that sets up what an administrator may; it is undone afterwards."""
    undo = list[list[str]]()

    def set_up(kind: str, name: str, *fields: str) -> None:
        if kind == "features":
            each = f"availablefeatures={fields[0]}", f"activefeatures={fields[0]}"
            slurm.run(["scontrol", "update", f"nodename={name}", *each])
            none = "availablefeatures=", "activefeatures="
            undo.append(["scontrol", "update", f"nodename={name}", *none])
        else:
            slurm.run(["scontrol", "create", f"{kind}={name}", *fields])
            undo.append(["scontrol", "delete", f"{kind}={name}"])

    yield set_up
    for argv in undo:
        slurm.run(argv, check=False)


@pytest.mark.long
def test_each_kind_of_job_that_could_start_gets_nodes_and_others_get_none(
    slurm, sweep, tmp_path, other, site
):
    """Each in turn; the last job is cancelled while nodes go back. Each sample is seen once."""
    site("partitionname", "apart", "nodes=node4", "maxtime=infinite")
    apart = other("-w", "node4", "--exclusive")
    eventually(lambda: nodes_of(slurm, apart), "a node is not the run's")
    run = counting(sweep, tmp_path / "run", "nodes=1:3", "launcher.give_way=auto")
    eventually(lambda: run.sweep.group_sizes()[-1:] == [3], "three train")
    stays, *_, goes = (each["host"] for each in run.sweep.events("round")[-1]["members"])
    site("features", stays, "stays")
    site("features", goes, "goes")
    late = "starttime=now+30minutes", "duration=60", "users=root", "flags=ignore_jobs"
    site("reservation", "theirs", *late, f"nodes={','.join({*slurm.nodes} - {stays, 'node4'})}")

    kept = {
        kind: other("-t", "5", *(flag.format(stays=stays) for flag in flags))
        for kind, (flags, _) in KEPT.items()
    }
    dependent = other("-N1", "-t", "5", f"--dependency=afterok:{kept['held']}")
    time.sleep(3 * CHECK_S)  # three checks: that nothing happens can only be waited for
    assert run.sweep.events("nodes_given_back") == []
    for kind, job in kept.items():
        argv = ["squeue", "-h", "-j", job, "-O", "Reason:0"]
        reasons = {line.strip() for line in slurm.run(argv).stdout.splitlines()}
        assert reasons and reasons <= {*KEPT[kind][1]}, kind
    first = kept.pop("needs more nodes than may go back")
    slurm.run(["scancel", dependent, *kept.values()])

    job = other("-N1", "-t", "5", "-p", "short")
    eventually(lambda: nodes_of(slurm, job), "a job starts that ends before the reservation")
    assert {event["job"] for event in run.sweep.events("nodes_given_back")} == {job}
    slurm.run(["scontrol", "delete", "reservation=theirs"])
    slurm.run(["scancel", job, first])
    for kinds in GIVEN:
        what = ", ".join(kinds)
        eventually(lambda: run.sweep.group_sizes()[-1] == 3, f"{what}: all train before")
        before = len(run.sweep.events("nodes_given_back"))
        jobs = {
            other("-t", "5", *(flag.format(goes=goes) for flag in flags))
            for flags in kinds.values()
        }
        eventually(lambda jobs=jobs: all(nodes_of(slurm, j) for j in jobs), f"{what}: they start")
        given = run.sweep.events("nodes_given_back")[before:]
        assert {event["job"] for event in given} == jobs, what
        eventually(lambda: run.sweep.group_sizes()[-1] < 3, f"{what}: the others train on")
        slurm.run(["scancel", *jobs])

    eventually(lambda: run.sweep.group_sizes()[-1] == 3, "the nodes are back")
    before = len(run.sweep.events("nodes_given_back"))
    job = other("-N2", "--exclusive", "-t", "5")
    eventually(lambda: len(run.sweep.events("nodes_given_back")) > before, "nodes go back")
    slurm.run(["scancel", job])
    eventually(lambda: run.sweep.group_sizes()[-1] < 3, "as announced")
    eventually(lambda: run.sweep.group_sizes()[-1] == 3, "the nodes are back")
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
