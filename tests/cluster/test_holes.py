"""Runs in the holes between other jobs (``launcher.time_min``)."""

import re

import pytest
from counting import Counting, counting, undisturbed_loss
from sweeps import eventually, hosts


@pytest.fixture
def limits(slurm):
    """Return the time limits of a run's tasks by state, in squeue's words."""

    def read(job: str) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        columns = "State:0|,TimeLimit:0"
        for line in slurm.run(["squeue", "-h", "-r", "-j", job, "-O", columns]).stdout.split():
            state, _, limit = line.partition("|")
            found.setdefault(state, set()).add(limit)
        return found

    return read


@pytest.mark.long
def test_a_run_trains_until_another_job_needs_its_nodes(slurm, sweep, tmp_path, limits):
    """Each task starts in the hole with what is left of it; one that returns has all its time.

    The one that waits fits on the fourth node, whose job may end early.
    """
    held = ["--exclusive", "-o", "/dev/null", "--wrap", "sleep 3600"]
    before = slurm.run(["sbatch", "--parsable", "-N1", "-t", "7", *held]).stdout.strip()
    eventually(lambda: limits(before).get("RUNNING"), "a job takes one of four nodes")
    after = slurm.run(["sbatch", "--parsable", "-N4", "-t", "10", *held]).stdout.strip()
    planned = ["squeue", "-h", "-j", after, "-O", "SchedNodes:0"]
    eventually(lambda: "node" in slurm.run(planned).stdout, "another one waits for all four")

    run = counting(sweep, tmp_path / "run", "nodes=2:4", "launcher.time=60", "launcher.time_min=2")
    eventually(lambda: 3 in run.sweep.group_sizes(), "the other three nodes train")
    job = run.sweep.events("round")[-1]["members"][0]["task"].partition("_")[0]
    found = limits(job)
    assert found["PENDING"] <= {"2:00", "4:00", "6:00"}
    assert found["RUNNING"] <= {"3:00", "4:00", "5:00", "6:00"}

    slurm.run(["scancel", before, after])
    slurm.preempt(hosts(run.sweep)[:1], for_s=1)
    eventually(lambda: "1:00:00" in limits(job).get("RUNNING", ()), "a task is back")
    run.hurry()
    output = run.sweep.output()
    assert run.sweep.result()["status"] == "succeeded", output
    assert run.audit().returncode == 0
    assert run.sweep.value() == pytest.approx(undisturbed_loss(), rel=0.01)


def shares(run: Counting) -> list[set[int]]:
    """How many samples of each batch the ranks of the last round have had."""
    files = [*run.sweep.run().glob("tasks/*/attempt-*/round-*.rank-*.out")]
    last = max(int(file.name.split(".")[0].removeprefix("round-")) for file in files)
    outputs = [file.read_text() for file in files if file.name.startswith(f"round-{last}.")]
    return [set(map(int, re.findall(r"^step \S+ \S+ (\d+)", text, re.M))) for text in outputs]


@pytest.mark.long
def test_a_run_has_nodes_of_two_partitions(slurm, sweep, tmp_path):
    """Those that can be preempted go and come, and the others train on; they are thrice as fast."""
    spot_pool = "{partition:low,nodes:2,throughput:3}"
    pools = f"launcher.pools=[{{partition:high,nodes:2,time:60}},{spot_pool}]"
    run = counting(sweep, tmp_path / "run", "nodes=2:4", pools)
    eventually(lambda: 4 in run.sweep.group_sizes(), "all four nodes train")
    listed = slurm.run(["squeue", "-h", "-r", "-O", "Partition:0|,TimeLimit:0|,NodeList:0"]).stdout
    rows = [line.strip().split("|") for line in listed.splitlines()]
    spot = [node for partition, _, node in rows if partition == "low"]
    assert sorted(partition for partition, *_ in rows) == ["high", "high", "low", "low"]
    assert {limit for partition, limit, _ in rows if partition == "high"} == {"1:00:00"}

    slurm.preempt(spot, for_s=5)
    eventually(lambda: run.sweep.group_sizes()[-1] == 2, "two nodes are left")
    assert set(hosts(run.sweep)).isdisjoint(spot)
    eventually(lambda: run.sweep.group_sizes()[-1] == 4, "the others are back")
    is_divided = lambda: sorted(shares(run), key=str) == [{3}, {3}, {9}, {9}]  # noqa: E731
    eventually(is_divided, "each has samples in proportion to its throughput")
    run.hurry()
    output = run.sweep.output()
    assert run.sweep.result()["status"] == "succeeded", output
    assert run.audit().returncode == 0 and run.is_complete()
