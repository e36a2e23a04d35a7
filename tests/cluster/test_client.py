"""hpc_elastic.slurm.client on a real Slurm."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.environment import SlurmEnvironment
from hpc_elastic.slurm.job_state import Phase

DEADLINE_S = 60


@pytest.fixture
def cluster(slurm):
    """Return the environment of commands on the sandbox, with a user's habits in it."""
    return {**os.environ, **slurm.env, "SQUEUE_FORMAT": "%i", "SQUEUE_STATES": "RUNNING"}


@pytest.fixture
def client(cluster):
    """Return a client of the sandbox."""
    return SlurmClient(env=cluster)


@pytest.fixture
def sbatch(cluster, tmp_path):
    """Return a function that submits a shell line and gives its job id; all are cancelled."""
    jobs = []

    def submit(line, *flags):
        argv = ["sbatch", "--parsable", f"--output={tmp_path}/%j.out", *flags, f"--wrap={line}"]
        done = subprocess.run(argv, env=cluster, capture_output=True, text=True, check=True)
        jobs.append(done.stdout.strip())
        return jobs[-1]

    yield submit
    subprocess.run(["scancel", *jobs], env=cluster, check=False)


def wait_for(ask, wanted):
    """Ask until the answer is as wanted, and return it."""
    deadline = time.monotonic() + DEADLINE_S
    while not wanted(answer := ask()):
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)
    return answer


def phases(tasks):
    """Return the names of the tasks in each phase."""
    return {
        phase: sorted(name for name, task in tasks.items() if task.phase is phase)
        for phase in Phase
    }


def two_running(client, job):
    """Wait until a job has two running tasks, and return all of its tasks."""
    return wait_for(
        lambda: client.tasks([job]), lambda tasks: len(phases(tasks)[Phase.RUNNING]) == 2
    )


def test_every_element_of_an_array_has_a_state(client, sbatch):
    """The pending ones too, whatever the user's SQUEUE_* say."""
    job = sbatch("sleep 600", "--array=0-9%2")
    tasks = two_running(client, job)
    assert sorted(tasks) == [f"{job}_{i}" for i in range(10)]
    assert tasks[f"{job}_0"].node.startswith("node")
    assert tasks[f"{job}_9"].reason == "JobArrayTaskLimit"
    assert tasks[f"{job}_9"].restarts == 0


def test_no_pending_element_is_lost_among_gaps(client, sbatch):
    """Asked with -r, squeue itself loses the last one of a set with a step."""
    job = sbatch("sleep 600", "--array=0-199", "--begin=now+1hour")
    client.cancel([f"{job}_{i}" for i in range(0, 200, 2)])
    assert set(client.tasks([job])) == {f"{job}_{i}" for i in range(1, 200, 2)}


@pytest.mark.long
def test_a_forgotten_job_is_no_error_and_hides_no_other(client, sbatch):
    """Slurm forgets a job some minutes after its end."""
    job = sbatch("sleep 600", "--hold")
    assert client.tasks(["9999999"]) == {}
    assert client.tasks(["9999998", "9999999"]) == {}
    assert set(client.tasks(["9999999", job])) == {job}


@pytest.mark.long
def test_a_task_that_has_ended_is_still_known_for_a_while(client, sbatch):
    """So that its end is seen between two polls."""
    job = sbatch("true")
    tasks = wait_for(lambda: client.tasks([job]), lambda t: not phases(t)[Phase.PENDING])
    tasks = wait_for(lambda: client.tasks([job]), lambda t: phases(t)[Phase.ENDED])
    assert tasks[job].state == "COMPLETED"


def test_only_the_named_pending_elements_are_cancelled(client, sbatch):
    """Other runs have elements in the same array; running ones stay."""
    job = sbatch("sleep 600", "--array=0-9%2")
    two_running(client, job)
    client.cancel([f"{job}_{i}" for i in (0, 3, 5)], pending_only=True)
    seen = phases(client.tasks([job]))
    assert seen[Phase.RUNNING] == [f"{job}_0", f"{job}_1"]
    assert seen[Phase.PENDING] == [f"{job}_{i}" for i in (2, 4, 6, 7, 8, 9)]


@pytest.mark.long
def test_running_elements_are_cancelled_and_those_that_have_ended_are_no_error(client, sbatch):
    """Cancelling twice is cancelling once."""
    job = sbatch("sleep 600", "--array=0-1")
    two_running(client, job)
    for _ in range(2):
        client.cancel([f"{job}_0", "9999999", "9999998_1"])
    tasks = wait_for(lambda: client.tasks([job]), lambda t: phases(t)[Phase.ENDED])
    assert tasks[f"{job}_0"].state == "CANCELLED"
    assert tasks[f"{job}_1"].state == "RUNNING"


def test_a_requeued_task_that_is_released_starts_soon(client, sbatch, cluster):
    """Slurm alone would hold it back for two minutes, and end it if it came at once."""
    job = sbatch("sleep 600", "--array=0-0", "--requeue")
    task = f"{job}_0"

    def state():
        return client.tasks([job])[task]

    wait_for(state, lambda s: s.phase is Phase.RUNNING)
    subprocess.run(["scontrol", "requeue", task], env=cluster, check=True)
    assert wait_for(state, lambda s: s.phase is Phase.PENDING).restarts == 1
    client.release(task)
    assert wait_for(state, lambda s: s.phase is Phase.RUNNING).restarts == 1


def test_pending_elements_are_postponed_and_no_others(client, sbatch):
    """Neither those that run, nor the rest of the array, though all pending ones are one record."""
    job = sbatch("sleep 600", "--array=0-9%2", "--time=10")
    two_running(client, job)
    client.postpone([f"{job}_{i}" for i in (0, 4, 5, 9, 77)], 3600)
    tasks = client.tasks([job])
    assert sorted(tasks) == [f"{job}_{i}" for i in range(10)]
    assert phases(tasks)[Phase.RUNNING] == [f"{job}_0", f"{job}_1"]
    client.cancel([f"{job}_0", f"{job}_1"])
    tasks = two_running_of(client, job, 2, 3)
    client.cancel([f"{job}_2", f"{job}_3"])
    two_running_of(client, job, 6, 7)
    client.postpone([f"{job}_{i}" for i in (4, 5)], 0)
    client.cancel([f"{job}_{i}" for i in (6, 7, 8)])
    two_running_of(client, job, 4, 5)


def two_running_of(client, job, *indices):
    """Wait until these two elements run, and no others."""
    names = [f"{job}_{i}" for i in indices]
    return wait_for(
        lambda: client.tasks([job]), lambda tasks: phases(tasks)[Phase.RUNNING] == names
    )


@pytest.mark.long
def test_what_is_not_pending_need_not_be_postponed(client, sbatch):
    """It runs, has ended, or was never there."""
    job = sbatch("true")
    wait_for(lambda: client.tasks([job]), lambda t: phases(t)[Phase.ENDED])
    client.postpone([job, f"{job}_3", "9999999", "9999999_1"], 60)


@pytest.mark.long
def test_the_time_left_shrinks_from_the_limit(client, sbatch):
    """A task that waits has all of it."""
    job, waits = sbatch("sleep 600", "--time=10"), sbatch("true", "--time=1-0", "--hold")
    tasks = wait_for(
        lambda: client.tasks([job, waits]), lambda t: (t[job].time_left_s or 600) < 600
    )
    assert tasks[job].phase is Phase.RUNNING and tasks[job].time_left_s > 0
    assert tasks[waits].time_left_s == 86400


def test_slurm_tells_where_its_nodes_are(client, slurm):
    """An address of the network that the nodes share, and none for a stranger."""
    assert client.node("node2").address == slurm.address(2)
    assert client.node("no-such-node").address is None


def test_a_controller_that_is_not_there_is_an_error(slurm, tmp_path):
    """Within the time that was given, with Slurm's own words or ours."""
    conf = tmp_path / "slurm.conf"
    lines = Path(slurm.env["SLURM_CONF"]).read_text().splitlines()
    elsewhere = ["SlurmctldPort=1" if x.startswith("SlurmctldPort=") else x for x in lines]
    conf.write_text("\n".join([*elsewhere, ""]))
    client = SlurmClient(3, env={**os.environ, **slurm.env, "SLURM_CONF": str(conf)})
    with pytest.raises(SlurmCommandError, match=r"no answer|Unable to contact"):
        client.tasks(["1"])


@pytest.mark.long
def test_releasing_what_slurm_does_not_know_is_an_error(client):
    """The caller may have mistaken the task."""
    with pytest.raises(SlurmCommandError, match="Invalid job id"):
        client.release("9999999_1")


def test_the_cluster_tells_its_limits_and_partitions(client, slurm):
    """As slurm.conf has them."""
    assert client.max_array_size() > 1
    assert {"low", "high"} <= set(client.partitions())
    assert set(client.each_node("low,high")) == set(slurm.nodes)


def test_a_job_step_finds_itself_in_its_environment(cluster):
    """What srun sets on each node is what `SlurmEnvironment` reads."""
    done = subprocess.run(["srun", "-N2", "env"], env=cluster, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SLURM_JOB_ID=")]
    assert len(lines) == 2, done.stderr
    one = subprocess.run(["srun", "-N1", "env"], env=cluster, capture_output=True, text=True)
    env = dict(line.split("=", 1) for line in one.stdout.splitlines() if "=" in line)
    task = SlurmEnvironment.from_env(env)
    assert task.hosts == [task.node_name]
    assert (task.num_nodes, task.node_id, task.step_id) == (1, 0, 0)
    assert task.cpus_on_node >= 1
