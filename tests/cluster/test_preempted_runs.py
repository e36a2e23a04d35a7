"""Whole runs that are preempted, in every way that there is: nothing is lost, nothing made twice.

With HPC_ELASTIC_LONG=1 more often, and for as long as it would be on a cluster.
"""

import os
import random
import time
from collections.abc import Callable

import pytest
from counting import LONG, NUM_STEPS, Counting, counting, undisturbed_loss
from sweeps import eventually, hosts

from hpc_elastic.checkpoint.store import Store
from slurm_sandbox import SlurmSandbox
from soak.inject import agent_on

PREEMPTIONS, TAKEN_S = (5, 20) if LONG else (2, 7)
LINKS = 5 if LONG else 1
EVERY = 20
IN_FLIGHT = 10
"""Steps made while a periodic checkpoint is written."""


@pytest.fixture
def dice() -> random.Random:
    """Chance that can be had again: the seed is in the output of a test that fails."""
    seed = int(os.environ.get("HPC_ELASTIC_SEED") or time.time())
    print("HPC_ELASTIC_SEED =", seed)
    return random.Random(seed)


@pytest.fixture
def start(sweep, tmp_path) -> Callable[..., Counting]:
    """Starts runs of the counting script, each under a name."""
    return lambda name, *overrides, **options: counting(
        sweep, tmp_path / name, *overrides, **options
    )


def trains_with(run: Counting, num_nodes: int, num_steps: int = 1) -> None:
    """Wait until a group of that size has made so many steps."""

    def trains() -> bool:
        if run.sweep.process.poll() is not None:
            pytest.fail(f"it has ended: {run.sweep.output()}")
        rounds = run.rounds()
        of_size = run.sweep.group_sizes()[-1:] == [num_nodes]
        is_last = bool(rounds) and rounds[-1].number == run.sweep.events("round")[-1]["number"]
        return of_size and is_last and len(rounds[-1].steps) >= num_steps

    eventually(trains, f"{num_nodes} nodes train; group sizes: {run.sweep.group_sizes()}")


def ends_right(run: Counting) -> None:
    """The run has ended by itself, with the model that it would have had undisturbed."""
    run.hurry()
    output = run.sweep.output()
    assert run.sweep.result()["status"] == "succeeded", output
    assert run.sweep.result()["restarts"] == 0
    audit = run.audit()
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert run.sweep.value() == pytest.approx(undisturbed_loss(), rel=0.01)
    assert run.is_complete()


@pytest.mark.long
def test_announced_departures_cost_no_step(slurm, start, dice):
    """Two of four nodes are preempted again and again, then a task is cancelled, for good."""
    run = start("run", "nodes=1:4")
    for _ in range(PREEMPTIONS):
        trains_with(run, 4, dice.randint(3, 25))
        slurm.preempt(dice.sample(hosts(run.sweep), 2), for_s=TAKEN_S)
        trains_with(run, 2)
    trains_with(run, 4, dice.randint(3, 25))
    cancelled = dice.choice(run.sweep.events("round")[-1]["members"])["task"]
    slurm.run(["scancel", cancelled])
    trains_with(run, 3, 10)
    ends_right(run)
    assert run.steps() == list(range(1, NUM_STEPS + 1)), "every step was made once"
    attempts = {e["task"]: e["attempt"] for e in run.sweep.events("task")}
    assert sum(attempts.values()) == 2 * PREEMPTIONS, "they came back, the cancelled task did not"
    assert len(blamed(run, "preempted")) == 2 * PREEMPTIONS and len(blamed(run, "cancelled")) == 1
    changes = [e for e in run.sweep.timeline() if e.kind in ("shrank", "grew", "changed")]
    assert {e.cost.lost_steps for e in changes} == {0}


def test_the_whole_run_comes_back_and_a_dead_node_costs_what_was_not_saved(slurm, start, dice):
    """All nodes are preempted at once, and slurmctld is restarted meanwhile; later a node dies."""
    run = start("run", "nodes=1:4", every=EVERY)
    trains_with(run, 4, dice.randint(3, 25))
    before = run.sweep.events("round")[-1]["number"]
    slurm.preempt(slurm.nodes, for_s=TAKEN_S)
    eventually(lambda: len(run.sweep.events("task_exited")) == 4, "all have left")
    restart_controller(slurm)
    eventually(lambda: run.sweep.events("round")[-1]["number"] > before, "it is there again")
    trains_with(run, 4, EVERY + dice.randint(IN_FLIGHT, EVERY))
    assert run.replayed() == 0, "what was announced cost no step"
    first, store = run.rounds()[-1].steps[0], Store(run.folder / "checkpoints")
    eventually(lambda: store.steps()[0] >= first, "it has saved since")
    saved, number = store.steps()[0], run.rounds()[-1].number
    dead = dice.choice(hosts(run.sweep))
    slurm.kill_node(dead)
    trains_with(run, 3)
    after = next(r for r in run.rounds() if r.number > number)
    assert after.resumed >= saved
    assert blamed(run, "node_lost", "leader_lost") == [dead]
    assert len(blamed(run, "preempted")) == 4
    ends_right(run)


@pytest.mark.long
def test_a_task_whose_agent_is_killed_comes_back(slurm, start):
    """For Slurm it has failed. It leads the run; killed again, it may not come back any more."""
    run = start("run", "nodes=1:3", "launcher.max_requeues=1", every=EVERY)
    trains_with(run, 3, 5)
    leader = run.sweep.events("leader")[-1]["task"]
    kill_agent(slurm, run, leader)
    eventually(lambda: run.sweep.group_sizes()[-1:] == [2], "the others go on")
    trains_with(run, 3, 5)
    kill_agent(slurm, run, leader)
    trains_with(run, 2, 10)
    ends_right(run)
    attempts = [e["task"] for e in run.sweep.events("task")]
    assert sorted(map(attempts.count, {*attempts})) == [1, 1, 2], "it came back once only"


@pytest.mark.long
def test_time_limits_other_preemption_modes_and_a_cancelled_run(slurm, start):
    """Four runs of a node at once: each comes back by itself, but for the one that is cancelled."""
    limited = start("limited", "nodes=1", "launcher.time=1")
    cancel = start("cancel", "nodes=1", "launcher.partition=cancel")
    fixed = start("fixed", "nodes=1")
    unwanted = start("unwanted", "nodes=1")
    for run in (limited, cancel, fixed, unwanted):
        trains_with(run, 1, 5)
    slurm.run(["scontrol", "update", f"jobid={_job(fixed)}", "requeue=0"])  # as a site may
    slurm.run(["scancel", _job(unwanted)])
    assert "cancelled" in unwanted.sweep.output().lower()
    for run in (cancel, fixed):
        comes_back(slurm, run)
    for link in range(1, LINKS + 1):
        eventually(lambda link=link: _attempts(limited) > link, f"link {link + 1} has begun")
    for run in (cancel, fixed, limited):
        ends_right(run)
        assert run.steps() == list(range(1, NUM_STEPS + 1)), "every step was made once"
    eventually(
        lambda: not slurm.run(["squeue", "-h", "-o", "%i"]).stdout.strip(),
        "nothing stays in the queue, and what was cancelled did not come back",
    )
    assert _attempts(unwanted) == 1


def blamed(run: Counting, *what: str) -> list[str]:
    """The nodes with one of these causes in the timeline of the run."""
    causes = (cause for entry in run.sweep.timeline() for cause in entry.causes)
    return [host for cause in causes if cause.what in what for host in cause.hosts]


def comes_back(slurm: SlurmSandbox, run: Counting) -> None:
    """Take a run's only node for a while, and wait until it trains again."""
    before = len(run.rounds())
    slurm.preempt(hosts(run.sweep), for_s=3)
    eventually(lambda: len(run.rounds()) > before and run.rounds()[-1].steps, "it trains again")


def kill_agent(slurm: SlurmSandbox, run: Counting, task: str) -> None:
    """End a task's agent as the kernel does when a node has no memory left."""
    host = next(e["host"] for e in reversed(run.sweep.events("task")) if e["task"] == task)
    agent = agent_on(slurm, host)
    assert agent is not None
    agent.kill()


def _job(run: Counting) -> str:
    return str(run.sweep.events("task")[0]["task"]).partition("_")[0]


def _attempts(run: Counting) -> int:
    return len(run.sweep.events("task"))


def restart_controller(slurm: SlurmSandbox) -> None:
    """End slurmctld as an administrator does, and start it again."""
    slurm.stop_controller()
    slurm.start_controller()
