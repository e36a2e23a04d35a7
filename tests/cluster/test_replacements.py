"""What a run's leader does for lost tasks, on a real Slurm; and the nodes that a run avoids."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hpc_elastic.run.directory import Entry, RunDir, Submission
from hpc_elastic.slurm import run_tasks
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.exit_action import ExitAction, ExitFacts, Reason, decide
from hpc_elastic.slurm.job_state import Phase
from hpc_elastic.slurm.requeue import requeue_or_exit
from hpc_elastic.slurm.run_tasks import current_names
from hpc_elastic.slurm.scheduler import Scheduler
from specs import spec_of, started_run

DEADLINE_S = 60
"""Half of the two minutes for which Slurm would hold a requeued task."""

SCRIPT = """#!/bin/bash
#SBATCH --array=0-{last} --cpus-per-task=1 --mem=1M --requeue --output=/dev/null
#SBATCH {options}
srun sleep 300
"""


class Run:
    """A run whose tasks sleep, and what its leader reaches of it."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.client = SlurmClient(env={**os.environ, **env})
        self.dir = RunDir(folder / "run")
        self.submission = Submission(folder / ".hpc_elastic")
        self.submission.path.mkdir()

    def submit(self, num_tasks: int, *options: str) -> str:
        """Submit the run, which has the sbatch options for all of its tasks; return the job id."""
        files = self.submission.array(0)
        text = SCRIPT.format(last=num_tasks - 1, options=" ".join(options))
        files.script.write_text(text)
        tasks = [(0, index) for index in range(num_tasks)]
        entry = Entry("function", "f", "f.py")
        spec = spec_of("r", 1, num_tasks, 1, 0, entry, str(self.submission.path), tasks)
        started_run(self.dir, spec)
        job = self.client._run(["sbatch", "--parsable", str(files.script)]).strip()
        files.submitted_as(job)
        return job

    @property
    def scheduler(self) -> Scheduler:
        """The tasks as the leader sees them."""
        return Scheduler(self.dir, self.dir.load(), self.client)

    def states(self) -> dict[str, str]:
        """Slurm's word on each of the run's tasks."""
        return {name: state.state for name, state in (self.scheduler.poll_tasks() or {}).items()}


@pytest.fixture
def run(slurm, tmp_path):
    """Return a run that was not submitted yet."""
    return Run(tmp_path, slurm.env)


def wait_for(condition, what=lambda: "") -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)


def restart(run, names) -> None:
    """Do as a leader does: help again and again, until all tasks run."""

    def all_run():
        run.scheduler.restart_tasks([*names, *current_names(run.dir.load())])
        return set(run.states().values()) == {"RUNNING"}

    wait_for(all_run, run.states)


def test_tasks_of_a_node_that_died_run_again_at_once(slurm, run):
    """Slurm requeues and holds one, the leader ends the hold; the other can only be replaced."""
    job = run.submit(2, "--nodelist=node2")
    wait_for(lambda: set(run.states().values()) == {"RUNNING"}, run.states)
    run.client._run(["scontrol", "update", f"jobid={job}_1", "requeue=0"])
    slurm.kill_node("node2")
    wait_for(lambda: run.states()[f"{job}_1"] == "NODE_FAIL", run.states)
    slurm.start_node("node2")
    restart(run, [f"{job}_0", f"{job}_1"])
    kept, replaced = current_names(run.dir.load())
    assert kept == f"{job}_0" and replaced.endswith("_1") and replaced != f"{job}_1"
    view = run.scheduler.poll_tasks()
    assert (view[kept].restarts, view[replaced].restarts) == (1, 0)


@pytest.mark.long
def test_what_slurm_has_cancelled_to_preempt_it_comes_back(slurm, run):
    """PreemptMode=CANCEL and no grace: the agent has no time, the leader requeues its task."""
    slurm.run(["scontrol", "update", "partition=cancel", "gracetime=0"])
    try:
        job = run.submit(1, "--partition=cancel --exclusive --nodelist=node3")
        wait_for(lambda: run.states() == {f"{job}_0": "RUNNING"})
        slurm.preempt(["node3"], for_s=1)
        wait_for(lambda: run.states() == {f"{job}_0": "PREEMPTED"}, run.states)
    finally:
        slurm.run(["scontrol", "update", "partition=cancel", "gracetime=5"])
    restart(run, [f"{job}_0"])
    assert run.scheduler.poll_tasks()[f"{job}_0"].restarts == 1


def test_what_a_user_has_cancelled_does_not_come_back(run):
    """Neither by requeue nor by replacement."""
    job = run.submit(1)
    wait_for(lambda: run.states() == {f"{job}_0": "RUNNING"})
    run.client.cancel([f"{job}_0"])
    wait_for(lambda: run.states() == {f"{job}_0": "CANCELLED"})
    run.scheduler.restart_tasks([f"{job}_0"])
    assert run.states() == {f"{job}_0": "CANCELLED"}
    assert current_names(run.dir.load()) == [f"{job}_0"]


@pytest.mark.long
def test_a_suspended_task_stays_where_it_is(slurm, run):
    """It goes on by itself; nothing is requeued, whoever asks."""
    job = run.submit(1)
    name = f"{job}_0"
    wait_for(lambda: run.states() == {name: "RUNNING"})
    slurm.run(["scontrol", "suspend", name])
    wait_for(lambda: run.states() == {name: "SUSPENDED"})
    state = run.client.tasks([job])[name]
    assert decide(ExitFacts(Reason.SIGNAL, state, 0)) is ExitAction.STAY
    assert requeue_or_exit(name, run.client, attempt=0, run=run.dir) is ExitAction.STAY
    run.scheduler.restart_tasks([name])
    slurm.run(["scontrol", "resume", name])
    wait_for(lambda: run.states() == {name: "RUNNING"})
    assert run.client.tasks([job])[name].restarts == 0


@pytest.mark.long
def test_a_node_is_avoided_from_the_moment_it_is_blamed(run):
    """By the tasks that wait, by one that is being requeued, and by a replacement."""
    job = run.submit(6, "--exclusive")
    wait_for(lambda: list(run.states().values()).count("RUNNING") == 4)
    bad = run.client.tasks([job])[f"{job}_1"].node
    run.scheduler.exclude_nodes([bad], "CUDA error", 1e12)
    assert requeue_or_exit(f"{job}_1", run.client, attempt=0, run=run.dir) is ExitAction.REQUEUE
    run.client.cancel([f"{job}_0", f"{job}_2", f"{job}_3"])
    wait_for(lambda: [run.states()[f"{job}_{i}"] for i in (1, 4, 5)] == ["RUNNING"] * 3, run.states)
    assert bad not in {run.scheduler.poll_tasks()[f"{job}_{i}"].node for i in (1, 4, 5)}
    avoided = {
        task: record.excluded for record in run.client._records(job) for task in record.tasks
    }
    assert avoided[f"{job}_1"] == avoided[f"{job}_4"] == (bad,)


@pytest.mark.long
def test_replacements_go_with_their_run(run):
    """They are cancelled with the other tasks that wait when the run ends."""
    job = run.submit(1, "--exclusive --nodelist=node4")
    wait_for(lambda: run.states() == {f"{job}_0": "RUNNING"})
    name = run_tasks.resubmit(run.dir, f"{job}_0", run.client)
    assert name is not None
    assert run.states() == {name: "PENDING"}  # its node is busy
    run.scheduler.cancel_pending()
    wait_for(lambda: run.states().get(name, "CANCELLED") == "CANCELLED", run.states)
    assert run.client.tasks([job])[f"{job}_0"].phase is Phase.RUNNING
