"""Submissions to a Slurm whose answers are lost: random schedules, and planted bugs."""

import os
from contextlib import suppress

import pytest

from hpc_elastic.agent import task
from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.launcher import slurm
from planted import require_found
from simulation import find, run_many
from simulation.submission import SubmissionSimulator

LONG = bool(os.environ.get("HPC_ELASTIC_LONG"))


@pytest.mark.schedules
def test_no_answer_that_is_lost_starts_a_run_twice_or_leaves_one_unnamed():
    """Whatever happens at each call; with HPC_ELASTIC_LONG 100,000 schedules."""
    total = run_many(SubmissionSimulator, 0, 100_000 if LONG else 250)
    assert not total.failures, next(iter(total.failures.values()))
    assert {*total.texts} == {"accepted", "died", "marked", "refused"} and len(total.faults) == 11


def lost_is_refused(monkeypatch):
    """Take an error of sbatch for a refusal, although its answer was lost."""
    monkeypatch.setattr(slurm, "has_submitted_nothing", lambda error: True)


def first_stays(monkeypatch):
    """Leave the first array in the queue when the second one is refused."""
    monkeypatch.setattr(slurm.SlurmJobs, "cancel", lambda jobs: None)


def second_interrupt(monkeypatch):
    """Let a cancellation have no effect, and raise as if nothing had been submitted."""
    take_back = slurm._take_back

    def take(*arguments, **options):
        left = take_back(*arguments, **options)
        if "(interrupted)" in left:
            raise KeyboardInterrupt
        return left

    monkeypatch.setattr(slurm, "_take_back", take)


def not_marked(monkeypatch):
    """Submit, and do not mark the runs of a job that may start later."""
    monkeypatch.setattr(slurm, "mark_cancelled", lambda run, warn: None)


def all_replace(monkeypatch):
    """Let a task train that was submitted in another's place and has no record."""
    monkeypatch.setattr(task.run_tasks, "is_recorded", lambda spec, task: True)


@pytest.mark.parametrize("seed", [1128, 4359, 14587, 15631])
def test_a_schedule_that_once_failed_holds(seed):
    """A job that has ended, which only an old squeue lists, was adopted."""
    assert find(SubmissionSimulator, seed, 1) is None


FIRST_SEEDS = {second_interrupt: 370}
"""Planted bugs that take luck: the seed to begin with."""
MUTANTS = (lost_is_refused, first_stays, second_interrupt, not_marked, all_replace)


@pytest.mark.schedules
@pytest.mark.parametrize("plant", MUTANTS)
def test_planted_bug_is_found(monkeypatch, plant):
    """Each breaks a promise."""
    plant(monkeypatch)
    require_found(SubmissionSimulator, "PromiseError", FIRST_SEEDS.get(plant, 0), 400)


def test_a_schedule_is_deterministic():
    """The seed of a failure shows the failure."""
    traces = []
    for _ in range(2):
        simulator = SubmissionSimulator(7, whole_trace=True)
        with suppress(SlurmCommandError):
            simulator.run()
        traces.append([(now, who, what) for now, who, what, _ in simulator.world.trace])
    assert traces[0] == traces[1]
