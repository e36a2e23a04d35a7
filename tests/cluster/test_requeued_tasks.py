"""Going back to the queue, on a real Slurm: at once, after a while, and not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import Phase

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60
"""Half of the two minutes for which Slurm would hold a requeued task."""

DELAY_S = 14

TASK = """
import os, signal, sys, time
from pathlib import Path

taken = []
signal.signal(signal.SIGTERM, lambda *_: taken.append(1))

from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.exit_action import Reason
from hpc_elastic.slurm.environment import SlurmEnvironment
from hpc_elastic.slurm.requeue import requeue_or_exit, requeue_after

task = SlurmEnvironment.from_env(os.environ)
log = Path(sys.argv[2], f"{task.task_name}.{task.restart_count}")
log.write_text(f"{time.time()}")
# the nodes of one job depart at once
of_job = f"{task.task_name.partition('.')[0]}*.{task.restart_count}"
while len(list(log.parent.glob(of_job))) < int(os.environ["SLURM_NTASKS"]):
    time.sleep(0.05)
while task.restart_count or (sys.argv[1] == "depart" and not taken):
    time.sleep(0.05)
    if task.restart_count and taken:
        sys.exit(1)
if sys.argv[1] == "depart":
    requeue_or_exit(task.task_name, SlurmClient(), attempt=task.restart_count)
elif sys.argv[1] == "time limit":
    why, attempt = Reason.TIME_LIMIT, task.restart_count
    requeue_or_exit(task.task_name, SlurmClient(), attempt=attempt, reason=why)
else:
    requeue_after(task.task_name, SlurmClient(), float(sys.argv[1]), attempt=task.restart_count)
"""


@pytest.fixture
def client(slurm):
    """Return a client of the sandbox."""
    return SlurmClient(env={**os.environ, **slurm.env})


@pytest.fixture
def task(slurm, tmp_path):
    """Submit a job whose first attempt goes back to the queue, and whose next stays.

    It is called with how the first one goes, and options of sbatch; it returns the job's id. Each
    attempt leaves a file, named by task and attempt, with the time at which it started.
    """
    script = tmp_path / "task.py"
    script.write_text(TASK)
    env = {**os.environ, **slurm.env, "PYTHONPATH": str(ROOT)}

    def submit(how, *options):
        argv = ["sbatch", "--parsable", "--requeue", f"--output={tmp_path}/%j.out", *options]
        line = f"--wrap=srun {sys.executable} {script} '{how}' {tmp_path}"
        done = subprocess.run([*argv, line], env=env, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    return submit


@pytest.fixture
def started(tmp_path):
    """Return a function that waits for an attempt, and returns when it started."""

    def wait(name):
        path = tmp_path / name
        deadline = time.monotonic() + DEADLINE_S
        while not (path.exists() and path.read_text()):
            assert time.monotonic() < deadline, sorted(p.name for p in tmp_path.iterdir())
            time.sleep(0.1)
        return float(path.read_text())

    return wait


def test_a_task_that_was_preempted_comes_back_once_the_node_is_free(slurm, client, task, started):
    """Slurm's two minutes do not apply: the attempt that ends says when the next one starts.

    Nor does it matter that Slurm would cancel it (PreemptMode=CANCEL, --no-requeue): it goes back
    to the queue before.
    """
    nodes = {"node2": (), "node3": ("--partition=cancel",), "node4": ("--no-requeue",)}
    jobs = [
        task("depart", "--array=3-3", "--exclusive", f"--nodelist={node}", *options)
        for node, options in nodes.items()
    ]
    for job in jobs:
        started(f"{job}_3.0")
    thief = slurm.preempt(list(nodes), for_s=1)
    for job in jobs:
        started(f"{job}_3.1")
    tasks = client.tasks([*jobs, thief])
    assert tasks[thief].phase is Phase.ENDED
    for job in jobs:
        assert (tasks[f"{job}_3"].phase, tasks[f"{job}_3"].restarts) == (Phase.RUNNING, 1)


@pytest.mark.long
def test_a_task_whose_time_is_almost_up_has_all_of_it_again(client, task, started):
    """It leaves before the limit, and the next attempt goes on: a chain."""
    job = task("time limit", "--array=0-0", "--time=2")
    started(f"{job}_0.1")
    state = client.tasks([job])[f"{job}_0"]
    assert (state.phase, state.restarts) == (Phase.RUNNING, 1)
    assert state.time_left_s is not None and state.time_left_s > 90


@pytest.mark.long
def test_a_task_that_gives_its_node_back_starts_again_after_its_delay(client, task, started):
    """Not before, although every node is free; it has its name, and the others are left alone."""
    job = task(DELAY_S, "--array=0-1")
    for i in (0, 1):
        assert started(f"{job}_{i}.1") - started(f"{job}_{i}.0") > DELAY_S - 1  # whole seconds
    tasks = client.tasks([job])
    assert sorted(tasks) == [f"{job}_0", f"{job}_1"]
    assert all((t.phase, t.restarts) == (Phase.RUNNING, 1) for t in tasks.values())


@pytest.mark.long
def test_the_nodes_of_one_job_give_it_back_together(client, task, started):
    """Both try at once; the job is requeued once, and has both nodes again."""
    job = task(DELAY_S, "--nodes=2", "--ntasks-per-node=1")
    for node in (0, 1):
        assert started(f"{job}.{node}.1") - started(f"{job}.{node}.0") > DELAY_S - 1
    state = client.tasks([job])[job]
    assert (state.phase, state.restarts) == (Phase.RUNNING, 1)


@pytest.mark.long
def test_a_task_that_a_user_requeues_is_not_held_either(client, task, started):
    """It finds itself requeued already, and says when it may start."""
    job = task("depart", "--array=0-0")
    started(f"{job}_0.0")
    client.requeue(f"{job}_0")
    started(f"{job}_0.1")


@pytest.mark.long
def test_a_task_that_was_cancelled_does_not_come_back(client, task, started):
    """It is told to go by the same signal."""
    job = task("depart", "--array=0-0")
    started(f"{job}_0.0")
    client.cancel([f"{job}_0"])
    deadline = time.monotonic() + DEADLINE_S
    while (state := client.tasks([job])[f"{job}_0"]).phase is not Phase.ENDED:
        assert time.monotonic() < deadline, state
        time.sleep(0.1)
    assert (state.state, state.restarts) == ("CANCELLED", 0)
